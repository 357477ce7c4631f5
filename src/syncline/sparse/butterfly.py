"""gTop-k by a butterfly: ours; log2 P rounds, no broadcast, and nothing is lost."""

from __future__ import annotations

from collections.abc import Generator

from syncline.sparse.exchange import Content, Joined, Outcome, Share, Step, join
from syncline.sparse.vector import SparseVector, total

__all__ = ["butterfly"]


def butterfly(share: Share) -> Generator[Step, tuple[Content, ...], Outcome]:
    """Exchange with the rank whose number differs in bit j, in round j; both merge the same.

    After round j all ``2^(j+1)`` ranks whose numbers agree in the higher bits hold the same k
    entries, so after log2 P rounds every rank has the result: half the rounds and half the bytes of
    Eq. 7, ``log2(P) (alpha + 2 k beta)``.

    Where P is no power of two, ``P = 2^m + r``: the odd ones of the first 2 r ranks hand their
    vector to the rank before them, and get the result at the end: two rounds more.

    Nothing is lost:

    - A rank that sees an index dropped takes its own contribution to it back. It does so once: the
      index may survive in another part of the butterfly, but this contribution is not in that sum.
      The published code puts back only what the *final* mask lacks, and so loses a value whose
      index was dropped on the way and yet survived elsewhere.
    - What a folded rank handed in is its partner's contribution from then on.
    - What rounding to the wire's precision takes from a merged value, the lowest of the ranks that
      hold it keeps: in its residual, and taken off its contribution.

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

    contribution = _Contribution(held, share.length)
    number = rank // 2 if rank < 2 * surplus else rank - surplus
    bit = 1
    while bit < ranks - surplus:
        other = number ^ bit
        partner = 2 * other if other < surplus else other + surplus
        (theirs,) = yield Step(partner, (held,), partner, 1, contribution.take_back)
        joined = join(held, theirs, share)
        held = joined.kept
        contribution.joined(joined, keeps_remainder=number % (2 * bit) == 0)
        bit *= 2

    if rank < 2 * surplus:
        yield Step(send_to=rank + 1, contents=(held,), meanwhile=contribution.take_back)
    contribution.take_back()
    return Outcome(held, total(share.length, [*returned, *contribution.returned]))


class _Contribution:
    """What a rank has given to what is held, and what of it came back.

    Nothing of it is needed for the next round, so it is worked out while that is under way.
    """

    def __init__(self, own: Content, length: int) -> None:
        self._own = own
        self._length = length
        self._joined: list[tuple[Joined, bool]] = []
        self.returned: list[SparseVector] = []

    def joined(self, joined: Joined, *, keeps_remainder: bool) -> None:
        self._joined.append((joined, keeps_remainder))

    def take_back(self) -> None:
        """Take back what was dropped of it in the rounds so far."""
        done, self._joined = self._joined, []
        if not isinstance(self._own, SparseVector):
            return
        for joined, keeps_remainder in done:
            back, self._own = self._own.divided(joined.dropped.indices)
            self.returned.append(back)
            if keeps_remainder and len(joined.remainder):
                self.returned.append(joined.remainder)
                self._own = total(self._length, [self._own, joined.remainder.negated()])
