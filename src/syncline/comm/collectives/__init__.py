"""Collectives as programs: one algorithm a file, and the table of them.

In the algorithms P, or ``ranks``, is the number of ranks, at least 1; M the bytes of the vector;
alpha the latency of a transfer, beta the time to send a byte and gamma the time to add one. What
each program costs is in the page "Algorithms and costs".
"""

from syncline.comm.collectives.hierarchical import hierarchical
from syncline.comm.collectives.schedule import Schedule, Step
from syncline.comm.collectives.table import (
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
