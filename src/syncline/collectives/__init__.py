"""Collectives as programs: one algorithm a file, the table of them, what is proved of them."""

from __future__ import annotations

from syncline.collectives.hierarchical import hierarchical
from syncline.collectives.schedule import Schedule, Step
from syncline.collectives.table import (
    PROGRAMS,
    ROOTED,
    Collective,
    Fixed,
    Pipelined,
    best_blocks,
    program,
)

__all__ = [
    "PROGRAMS",
    "ROOTED",
    "Collective",
    "Fixed",
    "Pipelined",
    "Schedule",
    "Step",
    "best_blocks",
    "hierarchical",
    "program",
]
