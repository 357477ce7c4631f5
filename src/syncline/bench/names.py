"""The names of the contestants."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.collectives import PROGRAMS, Collective
from syncline.errors import UserError, require_known

__all__ = [
    "COPY",
    "GLOO",
    "MPIS",
    "OURS",
    "TORCH",
    "ZERO_COPY",
    "algorithm_of",
    "all_contestants",
    "require_contestants",
]

OURS = "syncline"
"""A group's own choice of the algorithm."""
ZERO_COPY = "zero-copy"
"""The same on buffers of :meth:`Group.allocate <syncline.groups.Group.allocate>`."""
TORCH = "torch"
"""``torch.distributed`` with backend ``syncline``."""
GLOO = "gloo"
"""``torch.distributed`` with backend ``gloo``."""
COPY = "memcpy"
"""No collective: every rank copies a vector."""
MPIS = ("open-mpi", "mpich")
PREFIX = f"{OURS}:"
"""Precedes the name of a forced algorithm."""


def all_contestants(collective: Collective) -> tuple[str, ...]:
    """Return all contestants of a collective, in the order of the table."""
    forced = (PREFIX + algorithm for algorithm in PROGRAMS[collective])
    return (OURS, ZERO_COPY, TORCH, GLOO, *MPIS, *forced, COPY)


def algorithm_of(contestant: str) -> str | None:
    """Return the algorithm that a contestant's name forces; None for others."""
    return contestant.removeprefix(PREFIX) if contestant.startswith(PREFIX) else None


def require_contestants(collective: Collective, names: Sequence[str]) -> None:
    """Check names.

    Raises:
        UserError: the collective has no such contestant, or one is named twice.
    """
    known = all_contestants(collective)
    for index, name in enumerate(names):
        require_known(f"{collective} contestant", name, known)
        if name in names[:index]:
            raise UserError(f"{name!r} would run twice; name each contestant once")
