"""Top-k by all-gather: every rank gets every rank's k entries and adds them up."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from syncline.sparse.exchange import Content, Outcome, Refusal, Share, Step
from syncline.sparse.vector import SparseVector, total

__all__ = ["all_gather", "summed", "top_k"]


def all_gather(share: Share) -> Generator[Step, tuple[Content, ...], list[Content]]:
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
        held += yield Step(
            (rank - distance) % ranks, tuple(held[:count]), (rank + distance) % ranks, count
        )
    return [held[(other - rank) % ranks] for other in range(ranks)]


def summed(contents: Sequence[Content], length: int) -> Content:
    """Return the sum of neighbours in pairs, or the refusal of the lowest rank that refused.

    In pairs, since sums grow: ``P k log2 P`` entries are read, and not ``P^2 k / 2``.
    """
    refusals = [content for content in contents if isinstance(content, Refusal)]
    if refusals:
        return min(refusals)
    sums = [content for content in contents if isinstance(content, SparseVector)]
    while len(sums) > 1:
        sums = [total(length, sums[first : first + 2]) for first in range(0, len(sums), 2)]
    return total(length, sums)


def top_k(share: Share) -> Generator[Step, tuple[Content, ...], Outcome]:
    """Deliver the sum of all ranks' entries, up to P k of them; nothing is dropped.

    Source: gTop-k, Algorithm 1, TopKAllReduce (lines 12 to 21). Its line 15 begins the sum with the
    rank's own vector, which the gathered ones hold already; here each is added once.
    """
    contents = yield from all_gather(share)
    return Outcome(summed(contents, share.length), SparseVector.empty(share.length))
