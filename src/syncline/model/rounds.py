"""How many rounds an algorithm takes that doubles or halves in each."""

from __future__ import annotations

from syncline.errors import UserError
from syncline.model.limits import LARGEST_WORKERS

__all__ = ["doubling_rounds", "folded_rounds", "require_workers"]


def require_workers(workers: int) -> None:
    """Check a worker count.

    Raises:
        UserError: there is no worker or an absurd number of them.
    """
    if not 1 <= workers <= LARGEST_WORKERS:
        raise UserError(
            f"an all-reduce needs at least 1 and at most {LARGEST_WORKERS} workers, found {workers}"
        )


def doubling_rounds(workers: int) -> int:
    """Return ``ceil(log2 workers)``: rounds until one worker's data can have reached all."""
    return (workers - 1).bit_length()


def folded_rounds(workers: int) -> int:
    """Return the rounds of a butterfly whose surplus workers fold in first and hear last.

    ``log2 workers`` for a power of two, else ``floor(log2 workers) + 2``. Needed where partial
    results must not overlap.
    """
    exact = workers.bit_length() - 1
    return exact if workers == 1 << exact else exact + 2
