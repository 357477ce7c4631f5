"""The cost lines of collectives, by formula.

Every formula is ``(workers, alpha, beta, gamma) -> (a, b)`` of ``T(M) = a + b M``.

All-reduces: MG-WFBP, Table 2, and the two-tree algorithm. The paper states its table for powers of
two. Here ``log N`` is ``ceil(log2 N)``, a whole number of rounds; that many suffice for any N
(Bruck et al. for the all-gather and, reversed, for the reduce-scatter; Bar-Noy et al. for recursive
doubling). A library that first folds surplus workers into a power of two takes one round more. The
ring's formula holds for any N.

Broadcast and reduce, by minimum spanning tree and by bidirectional exchange: linear-pipeline, Table
1 (Thakur and Gropp; Chan et al.), for an n-byte message that one worker has, or of which one worker
gets the sum. ``log p`` is ``ceil(log2 p)``: the paper says that it omits the ceiling. The
all-reduces of that table are in ``ALL_REDUCE_ALGORITHMS``: the minimum spanning tree's is
``binary-tree``, the bidirectional exchange's ``halving-doubling``.

Push and pull through parameter servers; each is one way of a line.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.errors import UserError, require_known
from syncline.model.cost import CostCurve
from syncline.model.quantities import LARGEST_WORKERS

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "BROADCAST_ALGORITHMS",
    "REDUCE_ALGORITHMS",
    "SERVER_ALGORITHMS",
    "LineFormula",
    "all_reduce_line",
    "doubling_rounds",
    "folded_rounds",
    "line_formula",
    "pace_ring_line",
    "pull_line",
    "push_line",
    "require_workers",
    "server_formula",
]


def require_workers(workers: int) -> None:
    """Raise :class:`UserError` for no worker, or an absurd number of them."""
    if not 1 <= workers <= LARGEST_WORKERS:
        raise UserError(
            f"an all-reduce needs at least 1 and at most {LARGEST_WORKERS} workers, found {workers}"
        )


def doubling_rounds(workers: int) -> int:
    """Return ``ceil(log2 workers)``: rounds until one worker's data can have reached all."""
    return (workers - 1).bit_length()


def folded_rounds(workers: int) -> int:
    """Return the rounds of a butterfly; surplus workers send theirs first and get the result last.

    ``log2 workers`` for a power of two, else ``floor(log2 workers) + 2``. Needed where partial
    results must not overlap.
    """
    exact = workers.bit_length() - 1
    return exact if workers == 1 << exact else exact + 2


Line = tuple[float, float]
"""(a_s, b_s_per_byte)"""
LineFormula = Callable[[int, float, float, float], Line]
"""(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte) -> (a_s, b_s_per_byte)."""


def _binary_tree(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    rounds = doubling_rounds(workers)
    return 2 * alpha * rounds, (2 * beta + gamma) * rounds


def _recursive_doubling(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    rounds = doubling_rounds(workers)
    return alpha * rounds, (beta + gamma) * rounds


def _halving_doubling(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    a_s = 2 * alpha * doubling_rounds(workers)
    return a_s, 2 * beta - (2 * beta + gamma) / workers + gamma


def _double_binary_trees(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    return 2 * alpha * doubling_rounds(workers), beta + gamma


def _two_tree(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    return 2 * alpha * doubling_rounds(workers), 2 * beta + gamma


def _ring(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    share = (workers - 1) / workers
    return 2 * (workers - 1) * alpha, share * (2 * beta + gamma)


ALL_REDUCE_ALGORITHMS: dict[str, LineFormula] = {
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


def line_formula(algorithm: str) -> LineFormula:
    """Return the formula of an all-reduce; raise :class:`UserError` if its name is unknown."""
    require_known("all-reduce algorithm", algorithm, ALL_REDUCE_ALGORITHMS)
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


def _tree_broadcast(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    del gamma
    rounds = doubling_rounds(workers)
    return rounds * alpha, rounds * beta


def _tree_reduce(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    rounds = doubling_rounds(workers)
    return rounds * alpha, rounds * (beta + gamma)


def _exchange_broadcast(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    """Tree scatter, then all-gather by bidirectional exchange: ``log p`` rounds each.

    Erratum: Table 1 prints ``(log p + p - 1) alpha``. Its proof gives the all-gather
    ``(p - 1) alpha`` in the sentence on broadcast and ``log p alpha`` in the one on all-reduce. The
    first is a ring's all-gather, the second the bidirectional exchange that the row is named after.
    """
    del gamma
    share = (workers - 1) / workers
    return 2 * doubling_rounds(workers) * alpha, 2 * share * beta


def _scatter_ring_broadcast(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    """Tree scatter, then all-gather round a ring: the row as printed, MPI's long broadcast."""
    del gamma
    share = (workers - 1) / workers
    return (doubling_rounds(workers) + workers - 1) * alpha, 2 * share * beta


def _exchange_reduce(workers: int, alpha: float, beta: float, gamma: float) -> Line:
    """Reduce-scatter by bidirectional exchange, then tree gather."""
    share = (workers - 1) / workers
    return 2 * doubling_rounds(workers) * alpha, share * (2 * beta + gamma)


BROADCAST_ALGORITHMS: dict[str, LineFormula] = {
    "minimum-spanning-tree": _tree_broadcast,
    "bidirectional-exchange": _exchange_broadcast,
    "scatter-ring": _scatter_ring_broadcast,
}
"""name -> (workers, alpha, beta, gamma) -> (a, b). Source: linear-pipeline, Table 1."""

REDUCE_ALGORITHMS: dict[str, LineFormula] = {
    "minimum-spanning-tree": _tree_reduce,
    "bidirectional-exchange": _exchange_reduce,
}
"""name -> (workers, alpha, beta, gamma) -> (a, b). Source: linear-pipeline, Table 1."""


def push_line(
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    servers: int = 1,
) -> CostCurve:
    """Return the cost of sending all gradients to the servers and adding them there.

    Each of P workers sends ``M / S`` bytes to each of S servers, and a port passes one message at a
    time. A server's port passes P messages and a worker's S, so ``max(P, S)`` rounds are needed; as
    the messages form a complete bipartite graph, that many suffice (König). So the cost is
    ``max(P, S) (alpha + beta M / S)``, or ``P M beta / S`` for the bytes of few servers. A server
    adds P vectors: ``(P - 1) gamma M / S``. Servers stand beside the workers, on their own links.

    Args:
        workers: P, at least 1; one worker needs no server and costs nothing.
        alpha_s: startup time of one message.
        beta_s_per_byte: transmission time of the link of a worker or a server.
        gamma_s_per_byte: time to add.
        servers: S, at least 1; gradients are spread evenly.

    Raises:
        UserError: there is no worker or no server.
    """
    require_workers(workers)
    if servers < 1:
        raise UserError(f"parameter servers: at least 1 is needed, found {servers}")
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    rounds = max(workers, servers)
    moved = rounds * beta_s_per_byte / servers
    return CostCurve.line(rounds * alpha_s, moved + (workers - 1) * gamma_s_per_byte / servers)


def pull_line(
    workers: int, alpha_s: float, beta_s_per_byte: float, *, servers: int = 1
) -> CostCurve:
    """Return the cost of every worker fetching the sums: :func:`push_line` without adding."""
    return push_line(workers, alpha_s, beta_s_per_byte, servers=servers)


SERVER_ALGORITHMS = ("parameter-server", "sharded-parameter-server")
"""One server, unless more are named; and one for each worker, or for each host."""


def server_formula(servers: int | None) -> LineFormula:
    """Return the formula of a push and then a pull; None: as many servers as workers."""

    def formula(workers: int, alpha: float, beta: float, gamma: float) -> Line:
        costs = (
            push_line(workers, alpha, beta, gamma, servers=servers or workers),
            pull_line(workers, alpha, beta, servers=servers or workers),
        )
        return CostCurve.in_turn(costs).linearised(0)

    return formula
