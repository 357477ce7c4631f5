"""The types of a sparse exchange: the steps of a rank, and its outcome.

An algorithm is a generator that runs on one rank. It yields an :class:`ExchangeStep`, is sent the
contents that arrived, and returns an :class:`ExchangeOutcome`. It does not communicate, so the code
runs over a process group (:mod:`syncline.train.sparse.sparse_transport`) and, for tests of any
number of ranks, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from syncline.errors import UserError
from syncline.train.sparse.vector import Precision, Quota, SparseVector, merged, rounded


class Refusal(NamedTuple):
    """Why there is no exchange. It is sent in place of a vector, and so reaches all ranks."""

    rank: int
    reason: int
    """One of the constants below."""
    detail: int
    """Such as the number of a parameter."""


Content = SparseVector | Refusal
"""The content of a message."""


class Share(NamedTuple):
    """The input of one rank."""

    rank: int
    ranks: int
    """P, at least 1."""
    own: Content
    """Within the quota, with values that the wire can hold without rounding."""
    quota: Quota
    precision: Precision
    """The precision of values on the wire."""
    lowest_keeps: bool = False
    """Whether, of the ranks that make the same merge, the lowest keeps what the merge drops."""

    @property
    def length(self) -> int:
        """Length of the dense vector, in elements."""
        return self.quota.length


class ExchangeStep(NamedTuple):
    """Send to one rank, receive from one rank, or both at once."""

    send_to: int | None = None
    contents: tuple[Content, ...] = ()
    receive_from: int | None = None
    receives: int = 0
    """How many contents arrive."""


class ExchangeOutcome(NamedTuple):
    """How an exchange ended on one rank.

    Over all ranks, ``sum(own) = delivered + sum(returned)``, to rounding.
    """

    delivered: Content
    """The kept entries of the sum of all ranks' vectors, or why there was no exchange; the same
    bits on every rank."""
    returned: SparseVector
    """What goes back into this rank's residual. Undefined if the exchange was refused."""


Algorithm = Callable[[Share], Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]]


def join(a: Content, b: Content, share: Share) -> tuple[Content, list[SparseVector]]:
    """Add two vectors and keep the largest entries; a refusal is passed on.

    ``(b, a)`` gives the same bits. Of two refusals the one of the lower rank is kept.

    Returns:
        The sum cut to the quota, with values that the wire can hold without rounding; and what is
        missing from it: the other entries, and the rounding errors of those kept.
    """
    if isinstance(a, Refusal) or isinstance(b, Refusal):
        return min(content for content in (a, b) if isinstance(content, Refusal)), []
    kept, dropped = merged(a, b, share.quota)
    kept, remainder = rounded(kept, share.precision)
    return kept, [dropped, remainder]


UNREADABLE = 1
"""The reason of a refusal: a message is of another exchange; the detail is the sender's rank."""
NOT_FINITE = 2
"""The reason of a refusal: a gradient holds an infinity or NaN; the detail is the parameter, in the
order of the model."""
OVERFLOW = 3
"""The reason of a refusal: residual and gradient add up to an infinity or NaN; the detail is one of
the parameters of the unit."""


def refusal_error(refusal: Refusal, names: Sequence[str], *, together: int) -> UserError:
    """Return the error for a refusal.

    Args:
        refusal: of any rank.
        names: of all parameters, in the order of the model.
        together: how many parameters were exchanged together.
    """
    rank, reason, detail = refusal
    if reason == UNREADABLE:
        return UserError(
            f"rank {rank} cannot read what rank {detail} sent in this exchange; give all ranks "
            "the same recipe and the same number of steps, and let all step ahead or none"
        )
    where = f"parameter {names[detail]!r} on rank {rank}"
    if reason == NOT_FINITE:
        return UserError(
            f"the gradient of {where} is infinite or NaN; the exchange was refused on all "
            "ranks. Lower the learning rate, or look for the operation that overflows"
        )
    return UserError(
        f"residual and gradient of {where}, or of one of the {together} parameters it is "
        "exchanged with, add up to more than float32 holds; resume all ranks from the last "
        "checkpoint with a lower learning rate"
    )
