"""The cost lines of all-reduce algorithms: MG-WFBP, Table 2, and the two-tree algorithm.

Every entry is ``(workers, alpha, beta, gamma) -> (a, b)`` of ``T(M) = a + b M``. The paper states
its table for powers of two. Here a whole number of rounds is meant, so ``log N`` is
``ceil(log2 N)``; that many rounds suffice for any N (Bruck et al. for the all-gather and, reversed,
for the reduce-scatter; Bar-Noy et al. for recursive doubling). A library that folds surplus
workers into a power of two first takes one round more. The ring's formula holds for any N.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.errors import UserError, did_you_mean, quoted
from syncline.model.cost import CostCurve
from syncline.model.rounds import doubling_rounds, require_workers

__all__ = ["ALL_REDUCE_ALGORITHMS", "Line", "all_reduce_line", "line_formula", "pace_ring_line"]

Line = Callable[[int, float, float, float], tuple[float, float]]
"""(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte) -> (a_s, b_s_per_byte)."""


def _binary_tree(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    rounds = doubling_rounds(workers)
    return 2 * alpha * rounds, (2 * beta + gamma) * rounds


def _recursive_doubling(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    rounds = doubling_rounds(workers)
    return alpha * rounds, (beta + gamma) * rounds


def _halving_doubling(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    a_s = 2 * alpha * doubling_rounds(workers)
    return a_s, 2 * beta - (2 * beta + gamma) / workers + gamma


def _double_binary_trees(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    return 2 * alpha * doubling_rounds(workers), beta + gamma


def _two_tree(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    return 2 * alpha * doubling_rounds(workers), 2 * beta + gamma


def _ring(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    share = (workers - 1) / workers
    return 2 * (workers - 1) * alpha, share * (2 * beta + gamma)


ALL_REDUCE_ALGORITHMS: dict[str, Line] = {
    "binary-tree": _binary_tree,
    "recursive-doubling": _recursive_doubling,
    "halving-doubling": _halving_doubling,
    "double-binary-trees": _double_binary_trees,
    "two-tree": _two_tree,
    "ring": _ring,
}
"""The rows of MG-WFBP, Table 2, and ``two-tree``: name -> (workers, alpha, beta, gamma) -> (a, b).

``double-binary-trees`` is the paper's row, ``two-tree`` the same algorithm with the bytes that its
workers really send; see :func:`all_reduce_line`. ``binary-tree`` is also linear-pipeline's Table 1
for the minimum spanning tree, and ``halving-doubling`` its bidirectional exchange.
"""


def line_formula(algorithm: str) -> Line:
    """Return the formula of an all-reduce algorithm whose cost is a line.

    Raises:
        UserError: the algorithm is unknown.
    """
    if algorithm not in ALL_REDUCE_ALGORITHMS:
        hint = did_you_mean(algorithm, ALL_REDUCE_ALGORITHMS)
        known = ", ".join(ALL_REDUCE_ALGORITHMS)
        raise UserError(f"unknown all-reduce algorithm {quoted(algorithm)}{hint} (known: {known})")
    return ALL_REDUCE_ALGORITHMS[algorithm]


def all_reduce_line(
    algorithm: str,
    *,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> CostCurve:
    """Return the cost line of an all-reduce algorithm. Source: MG-WFBP, Table 2.

    Erratum: for the double binary trees the paper prints ``a = 2 log N``, without the alpha that
    makes it a time; each of the ``2 log N`` rounds of the tree pays one startup, so it is
    ``2 alpha log N`` here.

    Erratum: its slope ``beta + gamma`` is taken over as printed, so that the paper's figures can be
    made again, but no all-reduce over one full-duplex port a worker is that fast for more than two
    workers. Each tree carries half of the message. A worker inside one tree receives two halves
    from its children and one from its parent, and as a leaf of the other tree one half: ``2 M``
    bytes in, and ``2 M`` out. So the slope is ``2 beta + gamma``, which ``two-tree`` has.

    Args:
        algorithm: a key of :data:`ALL_REDUCE_ALGORITHMS`.
        workers: ``N``, at least 1; one worker exchanges nothing and costs nothing.
        alpha_s: startup time between two nodes, in seconds.
        beta_s_per_byte: transmission time between two nodes, in seconds a byte.
        gamma_s_per_byte: summation time in one node, in seconds a byte of result.

    Raises:
        UserError: the algorithm is unknown, or there is no worker or an absurd number of them.
    """
    formula = line_formula(algorithm)
    require_workers(workers)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    return CostCurve.line(*formula(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte))


def pace_ring_line(
    workers: int, bandwidth_bytes_per_s: float, summation_bytes_per_s: float
) -> CostCurve:
    """Return the cost of a ring all-reduce without startup. Source: PACE, Eq. 1.

    ``2 (W - 1) / W * S / B + (W - 1) / W * S / G``: the slope of Table 2's ring with ``beta = 1/B``
    and ``gamma = 1/G``. PACE leaves the startup out, so splitting a tensor costs nothing in it.

    Args:
        workers: W.
        bandwidth_bytes_per_s: B, above 0.
        summation_bytes_per_s: G, above 0; ``math.inf`` if adding takes no time.

    Raises:
        UserError: there is no worker, or a rate is not above 0.
    """
    for what, rate in (("bandwidth", bandwidth_bytes_per_s), ("summation", summation_bytes_per_s)):
        if not rate > 0:
            raise UserError(f"{what} must be above 0 bytes a second, found {rate}")
    return all_reduce_line(
        "ring",
        workers=workers,
        alpha_s=0.0,
        beta_s_per_byte=1 / bandwidth_bytes_per_s,
        gamma_s_per_byte=1 / summation_bytes_per_s,
    )
