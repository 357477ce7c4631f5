"""The cost tables of docs/algorithms.md say what the code computes."""

from __future__ import annotations

import re

import pytest
from reproduce.paper_costs import BROADCAST_ALGORITHMS, REDUCE_ALGORITHMS, pipeline_steps

from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS, BLOCK_COUNTS
from syncline.plan.exchange import EXCHANGES
from tests.pages import evaluate, table_rows, text_of

TEXT = text_of("algorithms.md")
ROOTED = {"broadcast": BROADCAST_ALGORITHMS, "reduce": REDUCE_ALGORITHMS}


def test_the_table_of_broadcast_and_reduce() -> None:
    compared = set()
    for collective, name, *formulas in table_rows(TEXT, 4):
        if collective not in ROOTED:
            continue
        formula = ROOTED[collective][name.strip("`")]
        compared.add((collective, name.strip("`")))
        for workers in (2, 3, 8, 1000):
            values = {"N": float(workers), "alpha": 2.0, "beta": 3.0, "gamma": 5.0}
            found = [evaluate(f.strip("`"), **values) for f in formulas]
            assert found == pytest.approx(list(formula(workers, 2.0, 3.0, 5.0))), name
    assert compared == {(c, name) for c, table in ROOTED.items() for name in table}


def test_the_table_of_the_pipeline() -> None:
    rows = {cells[0]: cells[1:] for cells in table_rows(TEXT, 3) if "reduce" in cells[0]}
    for workers, blocks in ((3, 4), (8, 4), (8, 100)):
        names = {"p": float(workers), "m": float(blocks)}
        with_sums = evaluate(rows["reduce"][0].strip("`"), **names)
        assert pipeline_steps("reduce", workers, blocks) == (with_sums, 0)
        assert rows["all-reduce, p > 2"] == ["`p - 2 + m`", "`max(m, p) - 1`"]
        expected = (with_sums, max(blocks, workers) - 1)
        assert pipeline_steps("all-reduce", workers, blocks) == expected
    assert rows["all-reduce, p = 2"] == ["`m`", "1"]
    assert pipeline_steps("all-reduce", 2, 9) == (9, 1)
    assert ", ".join(map(str, BLOCK_COUNTS[:7])) in TEXT.replace("\n", " ")


def test_every_exchange_is_described() -> None:
    described = set(re.findall(r"`([a-z-]+)`", TEXT))
    assert set(EXCHANGES) - {"linear-pipeline"} <= described
    assert "### Linear pipeline" in TEXT
    assert set(ALL_REDUCE_ALGORITHMS) <= described
