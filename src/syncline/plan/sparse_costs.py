"""The costs of sparse exchanges: gTop-k, Table I, Eq. 6 and 7, as functions of the dense message.

Each of P workers keeps the k largest of m elements, ``k = rho m``, and sends values and indices.
The paper does not count selecting and merging; with :class:`SparseSpeeds` they are counted, on the
worker on which they take longest. The page "Algorithms and costs" has the formulas and units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    sent_share = density * (1 + index_bytes / VALUE_BYTES)
    link = CostCurve.line(work.latencies * alpha_s, work.vectors * sent_share * beta_s_per_byte)
    if switch_bytes_per_s is not None:
        link = link.at_least(link.latency_s, work.sent * sent_share / switch_bytes_per_s)
    return link


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
