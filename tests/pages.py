"""Reading of the documentation's pages: their tables and formulas."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def code_blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, which may be a pattern."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def table_rows(text: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of every table row, headers and rulers too, of that many columns."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns:
            yield cells


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(formula: str, **names: float) -> float:
    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int(number)):
                return float(number)
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id="log2"), args=[argument]):
                return math.log2(value(argument))
            case ast.Call(func=ast.Name(id="ceil"), args=[argument]):
                return float(math.ceil(value(argument)))
        raise AssertionError(f"{formula}: {ast.dump(node)}")

    return value(ast.parse(formula, mode="eval").body)
