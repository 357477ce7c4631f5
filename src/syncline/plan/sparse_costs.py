"""The costs of sparse exchanges: gTop-k, Table I, Eq. 6 and 7, as functions of the dense message.

Each of P workers keeps the k largest of m elements, ``k = rho m``, and sends values and indices.
The paper does not count selecting and merging; with :class:`SparseSpeeds` they are counted, on the
worker on which they take longest. The page "Algorithms and costs" has the formulas and units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from syncline.errors import UserError, require_known
from syncline.plan.collective_costs import doubling_rounds, folded_rounds, require_workers
from syncline.plan.cost import CostCurve
from syncline.plan.document import Value
from syncline.plan.quantities import require_finite

INDEX_BYTES = VALUE_BYTES = 4
CODED_INDEX_BYTES, ESCAPE = 2, 1 << 16
"""An index is coded as its distance from the last one; from ``ESCAPE`` on it takes 4 more bytes."""


class SparseSpeeds(Value, frozen=True, kw_only=True):
    """How fast a worker selects and merges; see ``train.measure.sparse``."""

    select_s_per_element: float
    """Per element of the dense message: to add it to its residual, compare it, perhaps select it,
    and write the average into its place."""
    merge_s_per_entry: float  # per merged entry, including coding it for the wire and decoding it
    message_s: float = 0.0  # per message, whatever its size
    round_s: float = 0.0  # per round, whatever its size, in addition to the link's latency

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            require_finite(f"speeds of sparse exchange: {field}", getattr(self, field))


class SparseWork(NamedTuple):
    """The work of an exchange on its slowest worker, in vectors of k entries."""

    latencies: int  # rounds, one after another
    vectors: int  # vectors that pass its link, one after another
    merged: int  # input vectors of its merges
    sent: int  # vectors that all workers send together


def _top_k(workers: int) -> SparseWork:
    rounds = doubling_rounds(workers)
    # The gathered vectors are added in pairs, and nothing is dropped: P vectors a level.
    return SparseWork(rounds, workers - 1, workers * rounds, workers * (workers - 1))


def _gtop_k(workers: int) -> SparseWork:
    rounds = doubling_rounds(workers)
    return SparseWork(2 * rounds, 2 * rounds, 2 * rounds, 2 * (workers - 1))


def _gtop_k_butterfly(workers: int) -> SparseWork:
    # Both partners of a round compute the same merge, so no broadcast is needed. A worker that
    # serves a surplus one merges once more, and sends it the result at the end.
    rounds = folded_rounds(workers)
    paired = 1 << (workers.bit_length() - 1)
    sent = paired * (paired.bit_length() - 1) + 2 * (workers - paired)
    return SparseWork(rounds, rounds, 2 * doubling_rounds(workers), sent)


SPARSE_ALGORITHMS: dict[str, Callable[[int], SparseWork]] = {
    "top-k": _top_k,
    "gtop-k": _gtop_k,
    "gtop-k-butterfly": _gtop_k_butterfly,
}


Sends = list[tuple[int, int]]  # who sends to whom at the same time


def sends(algorithm: str, workers: int) -> Iterator[tuple[int, Sends]]:
    """Yield the rounds of an exchange: how many vectors each sender sends, and to whom."""
    doublings = [1 << bit for bit in range(doubling_rounds(workers))]
    if algorithm == "top-k":
        for apart in doublings:
            count = min(apart, workers - apart)
            yield count, [(rank, (rank - apart) % workers) for rank in range(workers)]
        return
    paired = 1 << (workers.bit_length() - 1)
    surplus = workers - paired
    if algorithm == "gtop-k":
        before = [[(k, k - apart) for k in range(apart, workers, 2 * apart)] for apart in doublings]
        pairs = []
    else:
        before = [[(2 * k + 1, 2 * k) for k in range(surplus)]] if surplus else []
        ranks = [2 * k if k < surplus else k + surplus for k in range(paired)]
        doublings = [apart for apart in doublings if apart < paired]
        pairs = [[(ranks[k], ranks[k ^ apart]) for k in range(paired)] for apart in doublings]
    after = [[(receiver, sender) for sender, receiver in each] for each in reversed(before)]
    for each in (*before, *pairs, *after):
        yield 1, each


class HostRound(NamedTuple):
    """One round of an exchange between workers of several hosts, in vectors of k entries."""

    inside: int  # vectors from one worker to another of its host; 0 if there are none
    across: int  # vectors that the busiest host sends or receives
    everywhere: int  # vectors that all hosts send


@lru_cache
def rounds_over_hosts(algorithm: str, workers: int, hosts: int) -> tuple[HostRound, ...]:
    """Return what each round sends inside hosts and between them; O(P log P) for P workers.

    Workers are spread evenly, in the order of ranks. Those of a host share its link.
    """
    found = []
    for count, pairs in sends(algorithm, workers):
        ends = [(sender * hosts // workers, to * hosts // workers) for sender, to in pairs]
        crossing = [(sender, to) for sender, to in ends if sender != to]
        busy = Counter(sender for sender, _ in crossing) | Counter(to for _, to in crossing)
        inside = count if len(crossing) < len(ends) else 0
        found.append(
            HostRound(inside, count * max(busy.values(), default=0), count * len(crossing))
        )
    return tuple(found)


def coded_index_bytes(density: float) -> float:
    """Return an upper bound on the mean bytes of a coded index (``train.sparse.wire``)."""
    return min(float(INDEX_BYTES), CODED_INDEX_BYTES + 4 / (ESCAPE * density))


def sparse_line(
    algorithm: str,
    *,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    density: float,
    index_bytes: float = INDEX_BYTES,
    switch_bytes_per_s: float | None = None,
) -> CostCurve:
    """Return the cost of a sparse exchange as a line in the bytes of the dense message.

    Selecting and merging are not counted; see :func:`computing_line`. One worker exchanges nothing.
    Values have 4 bytes. ``switch_bytes_per_s`` is for the bytes of all workers; None: no limit.
    """
    work = _work_of(algorithm, workers, density)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    sent_share = sent_share_of(density, index_bytes)
    link = CostCurve.line(work.latencies * alpha_s, work.vectors * sent_share * beta_s_per_byte)
    if switch_bytes_per_s is not None:
        link = link.at_least(link.latency_s, work.sent * sent_share / switch_bytes_per_s)
    return link


def sent_share_of(density: float, index_bytes: float) -> float:
    """Return the bytes of a sparse vector over those of the dense message."""
    return density * (1 + index_bytes / VALUE_BYTES)


def computing_line(
    algorithm: str, *, workers: int, density: float, speeds: SparseSpeeds, element_bytes: float = 4
) -> CostCurve:
    """Return what selecting and merging cost, as a line in the bytes of the dense message."""
    work = _work_of(algorithm, workers, density)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    latency_s = speeds.message_s + work.latencies * speeds.round_s
    element_s = speeds.select_s_per_element + work.merged * density * speeds.merge_s_per_entry
    return CostCurve.line(latency_s, element_s / element_bytes)


def _work_of(algorithm: str, workers: int, density: float) -> SparseWork:
    require_known("sparse exchange", algorithm, SPARSE_ALGORITHMS)
    require_workers(workers)
    if not (math.isfinite(density) and 0 < density <= 1):
        raise UserError(f"density must be above 0 and at most 1, found {density}")
    return SPARSE_ALGORITHMS[algorithm](workers)
