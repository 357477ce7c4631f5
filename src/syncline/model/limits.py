"""How large values may be, so that no sum in the native core leaves its 64 bits."""

from __future__ import annotations

import math

from syncline.errors import UserError

__all__ = [
    "LARGEST_BYTES",
    "LARGEST_CONTENTION",
    "LARGEST_IN_FLIGHT",
    "LARGEST_WORKERS",
    "LONGEST_NS",
    "require_time",
]

LARGEST_BYTES = 1 << 62
"""Bytes of all gradients together."""
LARGEST_CONTENTION = 100.0
"""Factor by which computing and communicating may slow each other."""
LARGEST_IN_FLIGHT = 64
"""Messages of a plan that may be under way at once."""
LARGEST_WORKERS = 1 << 31
"""Workers of a network."""
LONGEST_NS = 1 << 46
"""All operations, or all messages, of one iteration: 19.5 hours."""


def require_time(what: str, seconds: float) -> None:
    """Check a time.

    Args:
        what: what the time is of, for the message.
        seconds: the time.

    Raises:
        UserError: it is negative, not finite or longer than 19.5 hours.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UserError(f"{what} must be a finite time of at least 0 s, found {seconds}")
    if seconds * 1e9 > LONGEST_NS:
        raise UserError(
            f"{what} is {seconds:.4g} s, longer than the {LONGEST_NS / 1e9:.0f} s that one "
            "iteration may take; times are in seconds"
        )
