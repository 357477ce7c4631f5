"""What users do with training, and what then happens to overlapping: the rows of a table.

Each row has a script that trains under DDP and under the engine alike; the tests hold that
both end with the same bits (or, of some rows, within 1e-6), and that what happens is what the row
says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from syncline.plan.profile import Norm
from tests.train.overlap import sharded_rows
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Script

__all__ = ["GROUPS", "Feature", "feature", "features", "table"]

GROUPS = {
    "overlap_optimizers": "Optimizers",
    "overlap_loops": "The training loop",
    "overlap_reads": "Reading and changing what is pending",
    "overlap_modules": "Models",
    "overlap_torch": "Checkpointing, compiling, transforming",
    "overlap_several": "Several models, optimizers, groups",
    "overlap_threads": "Threads that read",
    "overlap_scripts": "Scripts that people have",
}
"""The modules with scripts, and the headings of their rows."""
MEANING = {
    OVERLAPS: "messages run under the next forward pass",
    SYNCHRONIZES: "`step` returns at once; the first read of a value waits for all messages",
    SYNCHRONOUS: "`step` waits for all messages and updates at once",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """A row: what the user does, and what happens."""

    text: str
    happens: str
    script: Script
    group: str
    norm: Norm | None
    """What norm the plan exchanges."""
    near: bool
    """Whether values must be near those of DDP, not the same."""


_FOUND: list[Feature] = []


def feature(
    text: str, happens: str, *, norm: Norm | None = None, near: bool = False
) -> Callable[[Script], Script]:
    """Make a row of a script."""

    def add(script: Script) -> Script:
        named = script.func if isinstance(script, partial) else script
        group = named.__module__.rsplit(".", 1)[-1]
        _FOUND.append(Feature(text, happens, script, group, norm, near))
        return script

    return add


def features() -> dict[str, Feature]:
    """Return all rows by their text."""
    for name in GROUPS:
        importlib.import_module(f"tests.train.overlap.{name}")
    found = {f.text: f for group in GROUPS for f in _FOUND if f.group == group}
    assert len(found) == len(_FOUND), "two rows have the same text"
    return found


def table() -> str:
    """Return the rows as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for happens, meaning in MEANING.items():
        yield f"- **{happens}**: {meaning}."
    yield from ("", "With [`shard=True`](sharding.md):", "")
    for happens, meaning in sharded_rows.MEANING.items():
        yield f"- **{happens}**: {meaning}."
    for group, heading in GROUPS.items():
        yield from ("", f"## {heading}", "")
        yield from ("| what you do | what happens | sharded |", "|---|---|---|")
        for row in features().values():
            if row.group == group:
                yield f"| {row.text} | {row.happens} | {sharded_rows.sharded(row.text)} |"
