"""gTop-k by a butterfly: ours; log2 P rounds, no broadcast, and nothing is lost."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from syncline.sparse.exchange import Content, Outcome, Share, Step, join
from syncline.sparse.vector import SparseVector, total

__all__ = ["butterfly"]


def butterfly(share: Share) -> Generator[Step, tuple[Content, ...], Outcome]:
    """Exchange with the rank whose number differs in bit j, in round j; both merge the same.

    After round j all ``2^(j+1)`` ranks whose numbers agree in the higher bits hold the same k
    entries, so after log2 P rounds every rank has the result: half the rounds and half the bytes of
    Eq. 7, ``log2(P) (alpha + 2 k beta)``.

    Where P is no power of two, ``P = 2^m + r``: the odd ones of the first 2 r ranks hand their
    vector to the rank before them, and get the result at the end: two rounds more.

    Nothing is lost: what a merge drops, and what rounding to the wire's precision takes, goes into
    the residual of exactly one of the ranks that make the same merge. So all of a dropped sum waits
    in one place, where it is selected again by its whole size. The lowest bits of the index tell
    which rank it is, so that all have as many of them; or it is always the lowest, as in the tree,
    if :attr:`Share.lowest_keeps` says so. The published code puts back only what the *final* mask
    lacks, and loses a value whose index was dropped on the way and yet survived elsewhere.

    Source: gTop-k, Algorithm 3 and section III.C for the merging, for powers of two and with a
    broadcast; the fold is of Rabenseifner (2004), section 3.
    """
    rank, ranks = share.rank, share.ranks
    surplus = ranks - (1 << (ranks.bit_length() - 1))
    if rank < 2 * surplus and rank % 2:
        yield Step(send_to=rank - 1, contents=(share.own,))
        (delivered,) = yield Step(receive_from=rank - 1, receives=1)
        return Outcome(delivered, SparseVector.empty(share.length))

    held = share.own
    returned: list[SparseVector] = []
    if rank < 2 * surplus:
        (handed_in,) = yield Step(receive_from=rank + 1, receives=1)
        joined = join(held, handed_in, share)
        held = joined.kept
        returned += [joined.dropped, joined.remainder]

    number = rank // 2 if rank < 2 * surplus else rank - surplus
    bit = 1
    while bit < ranks - surplus:
        other = number ^ bit
        partner = 2 * other if other < surplus else other + surplus
        (theirs,) = yield Step(partner, (held,), partner, 1)
        joined = join(held, theirs, share)
        held = joined.kept
        bit *= 2
        both = joined.dropped, joined.remainder
        if not share.lowest_keeps:
            returned += [_own_part(each, number, bit) for each in both]
        elif number % bit == 0:
            returned += both

    if rank < 2 * surplus:
        yield Step(send_to=rank + 1, contents=(held,))
    return Outcome(held, total(share.length, returned))


def _own_part(vector: SparseVector, number: int, ranks: int) -> SparseVector:
    """Return the entries that wait on one of the ranks, a power of two, that all have them."""
    # By positions: indexing with booleans takes several times as long.
    own = np.flatnonzero((vector.indices & np.uint32(ranks - 1)) == number % ranks)
    return SparseVector(vector.length, vector.indices[own], vector.values[own])
