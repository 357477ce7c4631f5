"""Every error that Syncline raises on purpose.

The tree, with what each means for the caller::

    SynclineError
    |-- UserError            the input is wrong; change it and try again      exit code 2
    |   |-- FileError        a file is missing, broken or of another version  exit code 2
    |   `-- MismatchError    a plan or profile is for another model or size   exit code 2
    |-- PeerError            a worker or the network failed; restart the job  exit code 1
    `-- InternalError        our own bug; please report it                    exit code 1

Each message says what was expected, what came, where, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "FileError",
    "InternalError",
    "MismatchError",
    "PeerError",
    "SynclineError",
    "UserError",
    "did_you_mean",
]


class SynclineError(Exception):
    """Base of all errors that Syncline raises on purpose."""

    exit_code = 1


class UserError(SynclineError, ValueError):
    """The caller's input cannot be used; the message says what to change."""

    exit_code = 2


class FileError(UserError):
    """A file is missing, truncated, of another version, or holds invalid values."""


class MismatchError(UserError):
    """A plan, profile or checkpoint was made for another model or worker count."""


class PeerError(SynclineError, RuntimeError):
    """A peer process or the network under it failed; the job can be restarted."""


class InternalError(SynclineError, AssertionError):
    """An invariant of Syncline itself does not hold: a bug to report."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
