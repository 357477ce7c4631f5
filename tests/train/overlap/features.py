"""What users do with training, and what then happens to overlapping: the rows of a table.

Each row has a script that trains under DDP and under the engine alike; the tests hold that
both end with the same bits (or, of some rows, within 1e-6), and that what happens is what the row
says.
"""

from __future__ import annotations

import re

from tests.pages import DOCS
from tests.train.overlap import (
    overlap_loops,
    overlap_modules,
    overlap_optimizers,
    overlap_reads,
    overlap_scripts,
    overlap_several,
    overlap_threads,
    overlap_torch,
)
from tests.train.overlap.loop import REFUSED, ROUNDS, SHARES, TRAINS, Loop
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS

PAGE = DOCS / "overlap-features.md"
SECTION = "(<!-- {0}: begin -->\n)(.*)(<!-- {0}: end -->\n)"

GROUPS: dict[str, dict[str, Loop]] = {
    "Optimizers": overlap_optimizers.SCENARIOS,
    "The training loop": overlap_loops.SCENARIOS,
    "Reading and changing what is pending": overlap_reads.SCENARIOS,
    "Models": overlap_modules.SCENARIOS,
    "Checkpointing, compiling, transforming": overlap_torch.SCENARIOS,
    "Several models, optimizers, groups": overlap_several.SCENARIOS,
    "Threads that read": overlap_threads.SCENARIOS,
    "Scripts that people have": overlap_scripts.SCENARIOS,
}
MEANING = {
    OVERLAPS: "messages run under the next forward pass",
    SYNCHRONIZES: "`step` returns at once; the first read of a value waits for all messages",
    SYNCHRONOUS: "`step` waits for all messages and updates at once",
}
SHARDED = {
    TRAINS: "values are those of DDP, within a relative 1e-6; `step`, or code that reads a "
    "value, may wait where it does not with overlap alone",
    REFUSED: "a `UserError` says why",
    SHARES: "it reads the optimizer's state, of which each rank has only a share",
    ROUNDS: "16-bit values are rounded differently, and parameters without elements have no state",
}


def features() -> dict[str, Loop]:
    found = {text: row for rows in GROUPS.values() for text, row in rows.items()}
    assert len(found) == sum(map(len, GROUPS.values())), "two rows have the same text"
    return found


def section(name: str) -> str:
    """Return the part of the page between the marks of this name."""
    (found,) = re.findall(SECTION.format(name), PAGE.read_text(), re.DOTALL)
    return str(found[1])


def write_section(name: str, text: str) -> None:
    page = PAGE.read_text()
    PAGE.write_text(page.replace(section(name), text))


def table() -> str:
    lines = [f"- **{happens}**: {meaning}." for happens, meaning in MEANING.items()]
    lines += ["", "With [`shard=True`](sharding.md):", ""]
    lines += [f"- **{happens}**: {meaning}." for happens, meaning in SHARDED.items()]
    for heading, rows in GROUPS.items():
        lines += ["", f"## {heading}", ""]
        lines += ["| what you do | what happens | sharded |", "|---|---|---|"]
        lines += [f"| {text} | {row.happens} | {row.sharded} |" for text, row in rows.items()]
    return "\n".join(lines) + "\n"
