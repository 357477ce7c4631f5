"""What an exchange of sparse vectors is: steps that a rank asks for, and what it ends with.

An algorithm is a generator of one rank. It yields a :class:`Step`, is sent what has arrived, and
returns an :class:`Outcome`. It does no communication itself, so that the same code runs over a
process group (:mod:`syncline.sparse.courier`) and, in one process, over a simulated world
(:mod:`syncline.sparse.world`), where it can be tested for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from syncline.sparse.precision import Precision, rounded
from syncline.sparse.vector import Quota, SparseVector, merged

__all__ = ["Algorithm", "Content", "Joined", "Outcome", "Refusal", "Share", "Step", "join"]


class Refusal(NamedTuple):
    """Why there is no exchange; it travels in the place of a vector, and so reaches all ranks."""

    rank: int
    """Who refused."""
    reason: int
    """A number that the two ends agree on."""
    detail: int
    """Such as which parameter."""


Content = SparseVector | Refusal
"""What a message brings."""


class Share(NamedTuple):
    """What one rank takes part with."""

    rank: int
    ranks: int
    """P, at least 1."""
    own: Content
    """Within the quota, and of values that can travel without rounding."""
    quota: Quota
    """How many entries of which parts a vector may have."""
    precision: Precision
    """In which values travel."""
    lowest_keeps: bool = False
    """Whether what a merge drops waits on the lowest of the ranks that make it, wherever several
    do."""

    @property
    def length(self) -> int:
        """Of the dense vector, in elements."""
        return self.quota.length


class Step(NamedTuple):
    """Send to one rank, receive from one rank, or both at once."""

    send_to: int | None = None
    contents: tuple[Content, ...] = ()
    receive_from: int | None = None
    receives: int = 0
    """How many contents."""


class Outcome(NamedTuple):
    """How an exchange ended on one rank.

    Over all ranks, ``sum(own) = delivered + sum(returned)``, to rounding.
    """

    delivered: Content
    """The sum of what was kept of all ranks' vectors, the same bits on every rank; or why there was
    no exchange, also the same on every rank."""
    returned: SparseVector
    """What goes back into this rank's residual. Without meaning if the exchange was refused."""


Algorithm = Callable[[Share], Generator[Step, tuple[Content, ...], Outcome]]


class Joined(NamedTuple):
    """Two vectors made one."""

    kept: Content
    """Its values can travel without rounding."""
    dropped: SparseVector
    """Entries of the sum that were not kept."""
    remainder: SparseVector
    """What rounding took from those kept."""


def join(a: Content, b: Content, share: Share) -> Joined:
    """Add two vectors and keep the largest entries; or pass on a refusal.

    The same bits for ``(b, a)``. Of two refusals the one of the lower rank is kept.
    """
    nothing = SparseVector.empty(share.length)
    refusals = [content for content in (a, b) if isinstance(content, Refusal)]
    if isinstance(a, Refusal) or isinstance(b, Refusal):
        return Joined(min(refusals), nothing, nothing)
    kept, dropped = merged(a, b, share.quota)
    kept, remainder = rounded(kept, share.precision)
    return Joined(kept, dropped, remainder)
