"""Broadcast and reduce by minimum spanning tree and by bidirectional exchange.

Source: linear-pipeline, Table 1 (Thakur and Gropp; Chan et al.), for an n-byte message: one worker
has it, or is to have the sum. ``log p`` is ``ceil(log2 p)``: the paper says that it omits the
ceiling. The all-reduces of its table are in ``ALL_REDUCE_ALGORITHMS``: the minimum spanning tree's
is ``binary-tree``, the bidirectional exchange's ``halving-doubling``.
"""

from __future__ import annotations

from syncline.model.collective_costs import Line
from syncline.model.rounds import doubling_rounds

__all__ = ["BROADCAST_ALGORITHMS", "REDUCE_ALGORITHMS"]


def _tree_broadcast(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    del gamma
    rounds = doubling_rounds(workers)
    return rounds * alpha, rounds * beta


def _tree_reduce(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    rounds = doubling_rounds(workers)
    return rounds * alpha, rounds * (beta + gamma)


def _exchange_broadcast(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    """Tree scatter, then all-gather by bidirectional exchange: ``log p`` rounds each.

    Erratum: Table 1 prints ``(log p + p - 1) alpha``. Its proof gives the all-gather
    ``(p - 1) alpha`` in the sentence on broadcast and ``log p alpha`` in the one on all-reduce. The
    first is a ring's all-gather, the second the bidirectional exchange that the row is named after.
    """
    del gamma
    share = (workers - 1) / workers
    return 2 * doubling_rounds(workers) * alpha, 2 * share * beta


def _scatter_ring_broadcast(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    """Tree scatter, then all-gather round a ring: the row as printed, MPI's long broadcast."""
    del gamma
    share = (workers - 1) / workers
    return (doubling_rounds(workers) + workers - 1) * alpha, 2 * share * beta


def _exchange_reduce(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    """Reduce-scatter by bidirectional exchange, then tree gather."""
    share = (workers - 1) / workers
    return 2 * doubling_rounds(workers) * alpha, share * (2 * beta + gamma)


BROADCAST_ALGORITHMS: dict[str, Line] = {
    "minimum-spanning-tree": _tree_broadcast,
    "bidirectional-exchange": _exchange_broadcast,
    "scatter-ring": _scatter_ring_broadcast,
}
"""name -> (workers, alpha, beta, gamma) -> (a, b). Source: linear-pipeline, Table 1."""

REDUCE_ALGORITHMS: dict[str, Line] = {
    "minimum-spanning-tree": _tree_reduce,
    "bidirectional-exchange": _exchange_reduce,
}
"""name -> (workers, alpha, beta, gamma) -> (a, b). Source: linear-pipeline, Table 1."""
