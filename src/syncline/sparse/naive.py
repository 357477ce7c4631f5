"""gTop-k without a clever exchange: gather everything, then keep the k largest of the sum."""

from __future__ import annotations

from collections.abc import Generator

from syncline.sparse.exchange import Content, Outcome, Refusal, Share, Step
from syncline.sparse.gather import all_gather, summed
from syncline.sparse.vector import SparseVector, merged

__all__ = ["naive"]


def naive(share: Share) -> Generator[Step, tuple[Content, ...], Outcome]:
    """Deliver the k largest entries of the sum of all ranks' entries.

    The definition of gTop-k: what it delivers is the best that k entries can. It sends as much as
    top-k and is there to compare with.

    Source: gTop-k, Algorithm 2, lines 9 to 14: a rank takes back what it gave to the indices that
    are not in the global mask.
    """
    contents = yield from all_gather(share)
    nothing = SparseVector.empty(share.length)
    delivered = summed(contents, share.length)
    if isinstance(delivered, Refusal) or isinstance(share.own, Refusal):
        return Outcome(delivered, nothing)
    kept, dropped = merged(delivered, nothing, share.quota)
    returned, _ = share.own.divided(dropped.indices)
    return Outcome(kept, returned)
