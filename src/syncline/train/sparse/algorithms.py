"""Sparse exchange: top-k, and gTop-k by a tree, by a butterfly and by gathering everything.

An algorithm is a generator that runs on one rank. It yields an :class:`ExchangeStep`, is sent the
contents that arrived, and returns an :class:`ExchangeOutcome`. It does not communicate, so the code
runs over a process group (:mod:`.sparse_transport`) and, for tests of any number of ranks, in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from syncline.errors import UserError
from syncline.train.sparse.vector import Precision, Quota, SparseVector, merged, rounded, total


class Refusal(NamedTuple):
    """Why there is no exchange. It is sent in place of a vector, and so reaches all ranks."""

    rank: int
    reason: int  # one of the constants below
    detail: int  # such as the number of a parameter


Content = SparseVector | Refusal


class Share(NamedTuple):
    """The input of one rank."""

    rank: int
    ranks: int  # P, at least 1
    own: Content  # within the quota, with values that need no rounding for the wire
    quota: Quota
    precision: Precision
    lowest_keeps: bool = False  # whether the lowest rank of a merge keeps all that it drops

    @property
    def length(self) -> int:
        """Elements of the dense vector."""
        return self.quota.length


class ExchangeStep(NamedTuple):
    """Send to one rank, receive from one rank, or both at once."""

    send_to: int | None = None
    contents: tuple[Content, ...] = ()
    receive_from: int | None = None
    receives: int = 0  # how many contents arrive


class ExchangeOutcome(NamedTuple):
    """How an exchange ended on one rank.

    Over all ranks, ``sum(own) = delivered + sum(returned)``, to rounding.
    """

    delivered: Content  # kept entries of the sum, or why there are none; the same bits on all ranks
    returned: SparseVector  # for this rank's residual; undefined if the exchange was refused


Algorithm = Callable[[Share], Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]]


UNREADABLE = 1  # refused: a message is of another exchange; the detail is the sender's rank
NOT_FINITE = 2  # refused: a gradient is not finite; the detail is the parameter's number
OVERFLOW = 3  # refused: residual and gradient overflow; the detail is one of the parameters


def refusal_error(refusal: Refusal, names: Sequence[str], *, together: int) -> UserError:
    """Return the error for a refusal; ``together`` parameters, of those named, were exchanged."""
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


def join(a: Content, b: Content, share: Share) -> tuple[Content, list[SparseVector]]:
    """Add two vectors and keep the largest entries; a refusal is passed on.

    ``(b, a)`` gives the same bits. Of two refusals the one of the lower rank is kept. The sum is
    cut to the quota, and its values are rounded for the wire. Also return what the sum has lost:
    the other entries, and the rounding errors of those kept.
    """
    if isinstance(a, Refusal) or isinstance(b, Refusal):
        return min(content for content in (a, b) if isinstance(content, Refusal)), []
    kept, dropped = merged(a, b, share.quota)
    kept, remainder = rounded(kept, share.precision)
    return kept, [dropped, remainder]


def all_gather(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], list[Content]]:
    """Return every rank's content, in the order of ranks.

    In round j a rank sends all it has, at most ``2^j`` contents, to the rank ``2^j`` before it:
    ``ceil(log2 P)`` rounds for any P, and ``P - 1`` contents received, as in Eq. 6.

    Source: Bruck et al. (1997), "Efficient algorithms for all-to-all communications in multiport
    message-passing systems", section 3.
    """
    rank, ranks = share.rank, share.ranks
    held: list[Content] = [share.own]  # of ranks rank, rank + 1, ...
    while len(held) < ranks:
        distance = len(held)
        count = min(distance, ranks - distance)
        held += yield ExchangeStep(
            (rank - distance) % ranks, tuple(held[:count]), (rank + distance) % ranks, count
        )
    return [held[(other - rank) % ranks] for other in range(ranks)]


def summed(contents: Sequence[Content], length: int) -> Content:
    """Return the sum, added pairwise, or the refusal of the lowest rank that refused.

    Pairwise, because partial sums grow: this reads ``P k log2 P`` entries, not ``P^2 k / 2``.
    """
    refusals = [content for content in contents if isinstance(content, Refusal)]
    if refusals:
        return min(refusals)
    sums = [content for content in contents if isinstance(content, SparseVector)]
    while len(sums) > 1:
        sums = [total(length, sums[first : first + 2]) for first in range(0, len(sums), 2)]
    return total(length, sums)


def top_k(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]:
    """Deliver the sum of all ranks' entries, up to P k of them; nothing is dropped.

    Source: gTop-k, Algorithm 1, TopKAllReduce (lines 12 to 21). Its line 15 begins the sum with the
    rank's own vector, which the gathered ones hold already; here each is added once.
    """
    contents = yield from all_gather(share)
    return ExchangeOutcome(summed(contents, share.length), SparseVector.empty(share.length))


def naive(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]:
    """Deliver the k largest entries of the sum of all ranks' entries.

    The definition of gTop-k: it delivers the best k entries. It sends as much as top-k and serves
    as a reference.

    Source: gTop-k, Algorithm 2, lines 9 to 14: a rank takes back its values at indices outside the
    global mask.
    """
    contents = yield from all_gather(share)
    nothing = SparseVector.empty(share.length)
    delivered = summed(contents, share.length)
    if isinstance(delivered, Refusal) or isinstance(share.own, Refusal):
        return ExchangeOutcome(delivered, nothing)
    kept, dropped = merged(delivered, nothing, share.quota)
    returned, _ = share.own.divided(dropped.indices)
    return ExchangeOutcome(kept, returned)


def tree(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]:
    """Merge towards rank 0 along a binomial tree, then broadcast along it.

    In round j the ranks whose lowest set bit is j send to the rank without that bit, which merges:
    ``ceil(log2 P)`` rounds, and as many for the broadcast, as in Eq. 7. A rank without a partner
    skips the round, so P may be any number; the paper's participateRanks assume a power of two.

    Values that a merge drops, and rounding errors, go into the residual of the rank that merges. In
    the paper each rank puts back what the final mask lacks (Algorithm 4, line 10), which loses
    values whose index was dropped in one merge and survived in another.

    Source: gTop-k, Algorithm 3. Its barrier is not needed.
    """
    rank, ranks = share.rank, share.ranks
    held = share.own
    returned: list[SparseVector] = []
    bit = 1
    while bit < ranks and not rank & bit:
        if rank + bit < ranks:
            (theirs,) = yield ExchangeStep(receive_from=rank + bit, receives=1)
            held, left_over = join(held, theirs, share)
            returned += left_over
        bit *= 2
    # Now `bit` is the rank's lowest set bit, or for rank 0 the first power of 2 not below P.
    if rank:
        yield ExchangeStep(send_to=rank - bit, contents=(held,))
        (held,) = yield ExchangeStep(receive_from=rank - bit, receives=1)
    while bit > 1:
        bit //= 2
        if rank + bit < ranks:
            yield ExchangeStep(send_to=rank + bit, contents=(held,))
    return ExchangeOutcome(held, total(share.length, returned))


def butterfly(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]:
    """In round j exchange with the rank that differs in bit j; both merge the same contents.

    After round j all ``2^(j+1)`` ranks whose numbers agree in the higher bits hold the same k
    entries, so after log2 P rounds every rank has the result: half the rounds and half the bytes of
    Eq. 7, ``log2(P) (alpha + 2 k beta)``.

    If P is not a power of two, let ``P = 2^m + r``. The odd ones of the first 2 r ranks send their
    vector to the rank before them and receive the result at the end, in two more rounds.

    Nothing is lost: values that a merge drops, and rounding errors, go into the residual of exactly
    one of the ranks that make the same merge, where their whole magnitude counts in the next
    selection. The lowest bits of the index choose the rank, so that all keep equally many; with
    :attr:`Share.lowest_keeps` it is always the lowest rank, as in the tree. The published code
    loses values as the published tree does.

    Source: gTop-k, Algorithm 3 and section III.C for the merging, for powers of two and with a
    broadcast; the fold is of Rabenseifner (2004), section 3.
    """
    rank, ranks = share.rank, share.ranks
    surplus = ranks - (1 << (ranks.bit_length() - 1))
    if rank < 2 * surplus and rank % 2:
        yield ExchangeStep(send_to=rank - 1, contents=(share.own,))
        (delivered,) = yield ExchangeStep(receive_from=rank - 1, receives=1)
        return ExchangeOutcome(delivered, SparseVector.empty(share.length))

    held = share.own
    returned: list[SparseVector] = []
    if rank < 2 * surplus:
        (handed_in,) = yield ExchangeStep(receive_from=rank + 1, receives=1)
        held, left_over = join(held, handed_in, share)
        returned += left_over

    number = rank // 2 if rank < 2 * surplus else rank - surplus
    bit = 1
    while bit < ranks - surplus:
        other = number ^ bit
        partner = 2 * other if other < surplus else other + surplus
        (theirs,) = yield ExchangeStep(partner, (held,), partner, 1)
        held, left_over = join(held, theirs, share)
        bit *= 2
        if not share.lowest_keeps:
            returned += [_own_part(each, number, bit) for each in left_over]
        elif number % bit == 0:
            returned += left_over

    if rank < 2 * surplus:
        yield ExchangeStep(send_to=rank + 1, contents=(held,))
    return ExchangeOutcome(held, total(share.length, returned))


def _own_part(vector: SparseVector, number: int, ranks: int) -> SparseVector:
    """Return what one rank keeps of a vector that ``ranks`` ranks, a power of two, have."""
    # By positions: indexing with booleans takes several times as long.
    own = np.flatnonzero((vector.indices & np.uint32(ranks - 1)) == number % ranks)
    return SparseVector(vector.length, vector.indices[own], vector.values[own])


ALGORITHMS: dict[str, Algorithm] = {
    "top-k": top_k,
    "gtop-k-naive": naive,
    "gtop-k": tree,
    "gtop-k-butterfly": butterfly,
}
"""``syncline.plan.sparse_costs`` uses the same names."""
