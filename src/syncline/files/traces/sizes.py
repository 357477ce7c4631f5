"""Sizes of gradients, written by hand for a profiler trace that does not hold them.

A text file with two columns, separated by white space: a header, then one line for each gradient in
the order in which they become ready, the last layer's first. ``#`` begins a comment.

    name          elements
    fc.bias       1000
    fc.weight     2048000

The second column may be ``bytes`` instead. If there are as many lines as messages in the trace, but
not as many as gradients, they are sizes of the messages (buckets).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.errors import MismatchError, UserError, quoted
from syncline.files.traces.kineto_steps import ReadyPoint, StepTasks, element_dtype
from syncline.files.traces.reading import open_trace, text_lines
from syncline.plan.quantities import LARGEST_BYTES, bytes_per_element

HEADER = "expected the header 'name elements' or 'name bytes'"


class GradientSizes(NamedTuple):
    """The content of a file of sizes."""

    source: str
    in_bytes: bool  # whether sizes are in bytes, not in elements
    rows: Mapping[str, tuple[str, int]]  # by name: the line, and the size

    def join(self, step: StepTasks) -> StepTasks:
        """Return a step of a profiler trace with these sizes and names, if they match it."""
        step = step._replace(notes=[*step.notes, f"sizes are those in {self.source}"])
        if len(self.rows) == len(step.parameters):
            return step._replace(parameters=self._sized(step.parameters, step.source))
        if len(self.rows) != len(step.messages):
            raise MismatchError(
                f"{self.source}: {len(self.rows)} sizes, but step {step.number} of {step.source} "
                f"has {len(step.parameters)} gradients in {len(step.messages)} messages; write one "
                "line for each gradient, in the order in which they become ready"
            )
        return step._replace(messages=self._sized(step.messages, step.source))

    def _sized(self, points: Sequence[ReadyPoint], profiled: str) -> list[ReadyPoint]:
        sized = []
        for (name, (line, size)), point in zip(self.rows.items(), points, strict=True):
            dtype = element_dtype(point.dtype)
            width = bytes_per_element(dtype or "float32") if self.in_bytes else 1
            elements, rest = divmod(size, width)
            where = f"{self.source}: {line}, {quoted(name)}"
            if rest:
                raise MismatchError(
                    f"{where}: {size} bytes are not a whole number of {dtype or 'float32'} "
                    "elements; correct the size"
                )
            # Without a dtype, a size of 1 may mean that there is no tensor.
            if point.elements not in (None, elements) and dtype is not None:
                raise MismatchError(
                    f"{where}: {elements} elements, but {profiled} says {point.elements}; write "
                    "the gradients in the order in which they become ready, the last layer's first"
                )
            sized.append(point._replace(elements=elements, dtype=dtype or "float32", name=name))
        return sized


def read_sizes(path: str | os.PathLike[str]) -> GradientSizes:
    """Read a file of sizes."""
    source = os.fspath(path)
    rows: dict[str, tuple[str, int]] = {}
    with open_trace(path) as stream:
        lines = (
            (where, line, words)
            for where, line in text_lines(stream)
            if (words := line.partition("#")[0].split())
        )
        where, line, header = next(lines, ("", "", []))
        if header not in (["name", "elements"], ["name", "bytes"]):
            raise UserError(
                f"{where}: {HEADER}, found {quoted(line)}" if line else f"{HEADER}, found none"
            )
        unit = header[1]
        for where, line, words in lines:
            if len(words) != 2 or not re.fullmatch(r"\d{1,20}", words[1]):
                raise UserError(
                    f"{where}: expected a name and a whole number of {unit}, found {quoted(line)}"
                )
            name, size = words[0], int(words[1])
            if not 0 < size <= LARGEST_BYTES:
                raise UserError(
                    f"{where}: a size is from 1 to {LARGEST_BYTES} {unit}, found {size}"
                )
            if name in rows:
                raise UserError(
                    f"{where}: {quoted(name)} was named before; name each gradient once"
                )
            rows[name] = (where, size)
        if not rows:
            raise UserError(f"{HEADER}, then a line for each gradient; found none")
    return GradientSizes(source, unit == "bytes", rows)
