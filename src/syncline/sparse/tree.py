"""gTopKAllReduce as the paper has it: a tree of merges and a broadcast, for any P, without loss."""

from __future__ import annotations

from collections.abc import Generator

from syncline.sparse.exchange import Content, Outcome, Share, Step, join
from syncline.sparse.vector import SparseVector, total

__all__ = ["tree"]


def tree(share: Share) -> Generator[Step, tuple[Content, ...], Outcome]:
    """Merge towards rank 0 along a binomial tree, then broadcast along it.

    In round j the ranks whose lowest set bit is j send to the rank without that bit, which merges:
    ``ceil(log2 P)`` rounds, and as many for the broadcast, as in Eq. 7. A rank without a partner
    sits a round out, so P may be any number; the paper's participateRanks assume a power of two.

    What a merge drops, and what rounding takes, goes into the residual of the rank that merges. The
    paper leaves it to the ranks to put back what the final mask lacks (Algorithm 4, line 10), which
    loses values whose index was dropped on the way and survived elsewhere.

    Source: gTop-k, Algorithm 3. Its barrier is not needed.
    """
    rank, ranks = share.rank, share.ranks
    held = share.own
    returned: list[SparseVector] = []
    bit = 1
    while bit < ranks and not rank & bit:
        if rank + bit < ranks:
            (theirs,) = yield Step(receive_from=rank + bit, receives=1)
            joined = join(held, theirs, share)
            held = joined.kept
            returned += [joined.dropped, joined.remainder]
        bit *= 2
    # Now `bit` is the rank's lowest set bit, or of rank 0 the first that is not below P.
    if rank:
        yield Step(send_to=rank - bit, contents=(held,))
        (held,) = yield Step(receive_from=rank - bit, receives=1)
    while bit > 1:
        bit //= 2
        if rank + bit < ranks:
            yield Step(send_to=rank + bit, contents=(held,))
    return Outcome(held, total(share.length, returned))
