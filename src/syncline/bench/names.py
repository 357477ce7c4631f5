"""The names of the contestants."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.collectives import PROGRAMS, Collective
from syncline.errors import UserError, did_you_mean

__all__ = [
    "COPY",
    "GLOO",
    "MPIS",
    "OURS",
    "TORCH",
    "ZERO_COPY",
    "algorithm_of",
    "all_contestants",
    "is_ours",
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
"""Before the name of an algorithm that is forced."""


def all_contestants(collective: Collective) -> tuple[str, ...]:
    """Return all there are for a collective, in the order in which they are listed."""
    forced = (PREFIX + algorithm for algorithm in PROGRAMS[collective])
    return (OURS, ZERO_COPY, TORCH, GLOO, *MPIS, *forced, COPY)


def algorithm_of(contestant: str) -> str | None:
    """Return the algorithm that a contestant's name forces, if it does."""
    return contestant.removeprefix(PREFIX) if contestant.startswith(PREFIX) else None


def is_ours(contestant: str) -> bool:
    """Return whether it is Syncline in one form or another."""
    return contestant in (OURS, ZERO_COPY, TORCH) or algorithm_of(contestant) is not None


def require_contestants(collective: Collective, names: Sequence[str]) -> None:
    """Check names.

    Raises:
        UserError: there is no such contestant for the collective, or one stands there twice.
    """
    known = all_contestants(collective)
    for index, name in enumerate(names):
        if name not in known:
            raise UserError(
                f"unknown contestant {name!r} for {collective}{did_you_mean(name, known)} "
                f"(known: {', '.join(known)})"
            )
        if name in names[:index]:
            raise UserError(f"{name!r} would run twice; name each contestant once")
