"""The costs of collectives by formula: all-reduces, parameter servers and the linear pipeline."""

from __future__ import annotations

from collections.abc import Callable

from syncline.errors import UserError, require_known
from syncline.plan.cost import CostCurve, lower_envelope
from syncline.plan.quantities import LARGEST_WORKERS, require_count


def require_workers(workers: int) -> None:
    """Raise :class:`UserError` for fewer than one worker, or more than a network can have."""
    require_count("workers of an all-reduce", workers, LARGEST_WORKERS)


def doubling_rounds(workers: int) -> int:
    """Return ``ceil(log2 workers)``: the rounds until one worker's data can reach all others."""
    return (workers - 1).bit_length()


def folded_rounds(workers: int) -> int:
    """Return a butterfly's rounds; workers beyond a power of two send first and receive last."""
    exact = workers.bit_length() - 1
    return exact if workers == 1 << exact else exact + 2


Line = tuple[float, float]
LineFormula = Callable[[int, float, float, float], Line]
"""(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte) -> (a_s, b_s_per_byte) of ``a + b M``."""


ALL_REDUCE_ALGORITHMS: dict[str, LineFormula] = {
    "binary-tree": lambda n, alpha, beta, gamma: (
        2 * alpha * doubling_rounds(n),
        (2 * beta + gamma) * doubling_rounds(n),
    ),
    "recursive-doubling": lambda n, alpha, beta, gamma: (
        alpha * doubling_rounds(n),
        (beta + gamma) * doubling_rounds(n),
    ),
    "halving-doubling": lambda n, alpha, beta, gamma: (
        2 * alpha * doubling_rounds(n),
        2 * beta - (2 * beta + gamma) / n + gamma,
    ),
    "double-binary-trees": lambda n, alpha, beta, gamma: (
        2 * alpha * doubling_rounds(n),
        beta + gamma,
    ),
    "two-tree": lambda n, alpha, beta, gamma: (2 * alpha * doubling_rounds(n), 2 * beta + gamma),
    "ring": lambda n, alpha, beta, gamma: (2 * (n - 1) * alpha, (n - 1) / n * (2 * beta + gamma)),
}
"""The rows of MG-WFBP, Table 2, and ``two-tree``: the double binary trees with the bytes that their
workers really send; see :func:`all_reduce_line`. ``binary-tree`` is also linear-pipeline's Table 1
for the minimum spanning tree, and ``halving-doubling`` its bidirectional exchange."""


def all_reduce_line(
    algorithm: str,
    *,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> CostCurve:
    """Return the cost line of an all-reduce algorithm. Source: MG-WFBP, Table 2.

    Erratum: for the double binary trees the paper prints ``a = 2 log N``, without the alpha of each
    round. Their slope is also too low, but kept to reproduce the paper's figures; see the page
    "Algorithms and costs". ``log N`` is ``ceil(log2 N)`` for any N.

    The algorithm is a key of :data:`ALL_REDUCE_ALGORITHMS`. alpha is the latency between two nodes,
    beta the transmission time of a byte, and gamma the time to sum up a byte of result. One worker
    exchanges nothing and costs nothing.

    Raises:
        UserError: the algorithm is unknown, or the number of workers is out of range.
    """
    require_known("all-reduce algorithm", algorithm, ALL_REDUCE_ALGORITHMS)
    require_workers(workers)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    return CostCurve.line(
        *ALL_REDUCE_ALGORITHMS[algorithm](workers, alpha_s, beta_s_per_byte, gamma_s_per_byte)
    )


def server_line(
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    servers: int = 1,
    colocated: bool = False,
) -> CostCurve:
    """Return the cost of sending all gradients to the servers and adding them there.

    ``max(P, S) (alpha + beta M / S) + gamma M / S`` for P workers and S servers that add faster
    than they receive; see the page "Algorithms and costs". ``colocated``: servers are on the hosts
    of as many workers, whose own shares cross no link, so ``P - 1`` rounds are enough. One worker
    needs no server.
    """
    require_workers(workers)
    require_count("parameter servers", servers)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    if colocated and servers > workers:
        raise UserError(
            f"{servers} servers cannot be on the hosts of {workers} workers; take fewer"
        )
    rounds = workers - 1 if colocated else max(workers, servers)
    # A server adds while it receives; its last sum follows its last message. If adding is slower,
    # its sums follow the first two of its messages.
    first, beta, gamma = rounds - workers + 2, beta_s_per_byte, gamma_s_per_byte
    curve = CostCurve.line(rounds * alpha_s, (rounds * beta + gamma) / servers)
    return curve.at_least(first * alpha_s, (first * beta + (workers - 1) * gamma) / servers)


SERVER_ALGORITHMS = ("parameter-server", "sharded-parameter-server")
"""First: one server unless more are given. Second: one per worker or, with hosts, per host."""


def pipeline_steps(workers: int, blocks: float) -> tuple[float, float]:
    """Return how many steps of an all-reduce add blocks, and how many only forward them.

    Source: linear-pipeline, section 3, with the errata in the page "Algorithms and costs".
    """
    # With two workers, the first forwards no sums, so its own blocks delay nothing.
    return workers - 2 + blocks, 1 if workers == 2 else max(blocks, workers) - 1


def pipeline_line(
    steps: tuple[float, float],
    blocks: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> CostCurve:
    """Return the cost of a message cut into blocks; each step adds or forwards one block."""
    adding, forwarding = steps
    moved = adding * (beta_s_per_byte + gamma_s_per_byte) + forwarding * beta_s_per_byte
    return CostCurve.line((adding + forwarding) * alpha_s, moved / blocks)


BLOCK_COUNTS = (1, *(half << i for i in range(20) for half in (2, 3)))
"""1, 2, 3, 4, 6, 8, 12, ...: numbers of blocks that are tried, besides the worker count."""


def pipeline_curve(
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    steps: Callable[[int, float], tuple[float, float]] = pipeline_steps,
) -> CostCurve:
    """Return the cost of a linear pipeline's collective, within 2.1 % of the best block count."""
    require_workers(workers)
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    costs = (alpha_s, beta_s_per_byte, gamma_s_per_byte)
    return lower_envelope(
        [
            pipeline_line(steps(workers, blocks), blocks, *costs)
            for blocks in (*BLOCK_COUNTS, workers)
        ]
    )
