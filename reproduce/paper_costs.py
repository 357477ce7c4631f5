"""Costs that the papers print and the product does not ask for.

A ring all-reduce without latency: PACE, Eq. 1.

Broadcast and reduce, by minimum spanning tree and by bidirectional exchange: linear-pipeline, Table
1 (Thakur and Gropp; Chan et al.), for an n-byte message that one worker has, or of which one worker
gets the sum. ``log p`` is ``ceil(log2 p)``: the paper says that it omits the ceiling. The
all-reduces of that table are in ``ALL_REDUCE_ALGORITHMS``: the minimum spanning tree's is
``binary-tree``, the bidirectional exchange's ``halving-doubling``.

Linear pipeline: a chain of workers that pass a message on in blocks.

Source: linear-pipeline, section 3. In a step every worker sends one block to the next and receives
one from the worker before; a step takes ``alpha + beta b``, or ``alpha + (beta + gamma) b`` where
blocks are added. The first of m blocks reaches the last of p workers after p - 1 steps, and one
more follows with each step: ``p - 2 + m`` steps in all.

Erratum: Table 1 prints ``p - 1 + n / b`` steps, one too many. The paper's own example counts 10
steps for reducing and broadcasting 4 blocks on 3 workers, which is ``2 (3 - 2 + 4)``; the table
gives 12. With two workers and one block it gives two steps for a single message.

Erratum: Table 1 costs an all-reduce as a reduce and then a broadcast, though the text says that it
"only needs to fill the pipeline once" (9 steps in the example). Blocks that travel in one direction
round a ring do that. The reduce takes ``p - 2 + m`` steps. Worker 0 sends its last own block in
step m, and from step ``max(m, p) + 1`` on passes on the sums that come back to it from the last
worker. Worker ``p - 2`` has the last sum after ``max(m, p) + m + p - 3`` steps, so the broadcast
adds ``max(m, p) - 1`` steps to the reduce, instead of ``p - 2 + m``. For the example that is 8: the
ninth step of the paper carries a sum to the worker that formed it. Two workers need ``m + 1``.

The interior of the chain receives every byte twice. So the all-reduce moves ``2 n`` bytes through a
port, more than the ``2 n (p - 1) / p`` of ring or bidirectional exchange. Proposition 1 (up to
twice the speed of bidirectional exchange) holds for broadcast and reduce, which its proof treats,
and not for all-reduce, where Table 1 itself says the opposite.
"""

from __future__ import annotations

import math
from functools import partial

from syncline.errors import UserError
from syncline.plan import collective_costs
from syncline.plan.collective_costs import (
    LineFormula,
    all_reduce_line,
    doubling_rounds,
    pipeline_line,
    require_workers,
)
from syncline.plan.cost import CostCurve
from syncline.plan.quantities import LARGEST_BYTES

__all__ = [
    "BROADCAST_ALGORITHMS",
    "REDUCE_ALGORITHMS",
    "best_block_bytes",
    "pace_ring_line",
    "pipeline_curve",
    "pipeline_steps",
]

Line = tuple[float, float]
"""(a_s, b_s_per_byte)"""


def pace_ring_line(
    workers: int, bandwidth_bytes_per_s: float, summation_bytes_per_s: float
) -> CostCurve:
    """Return the cost of a ring all-reduce without latency. Source: PACE, Eq. 1.

    ``2 (W - 1) / W * S / B + (W - 1) / W * S / G``: the slope of Table 2's ring with ``beta = 1/B``
    and ``gamma = 1/G``. PACE leaves the latency out, so splitting a tensor costs nothing in it.

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


def pipeline_steps(collective: str, workers: int, blocks: float) -> tuple[float, float]:
    """Return (steps in which blocks are added, steps in which they are only passed on).

    Args:
        collective: ``"broadcast"``, ``"reduce"`` or ``"all-reduce"``.
        workers: p, at least 2.
        blocks: m, at least 1.

    Raises:
        UserError: the collective is none of the three.
    """
    through = workers - 2 + blocks
    if collective == "broadcast":
        return 0, through
    if collective == "reduce":
        return through, 0
    if collective == "all-reduce":
        return collective_costs.pipeline_steps(workers, blocks)
    raise UserError(f"no linear pipeline for {collective!r} (known: broadcast, reduce, all-reduce)")


def best_block_bytes(
    collective: str,
    size_bytes: int,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> float:
    """Return the block size with which a pipelined collective costs least.

    A cost of ``c m + D n / m`` plus what does not depend on m is least at ``m = sqrt(D n / c)``.
    Broadcast: ``c = alpha``, ``D = (p - 2) beta``, so ``b = sqrt(n alpha / ((p - 2) beta))``;
    reduce the same with ``beta + gamma``. All-reduce with m >= p: ``c = 2 alpha`` and
    ``D = (p - 2) (beta + gamma) - beta``; with m <= p: ``c = alpha`` and
    ``D = (p - 2) (beta + gamma) + (p - 1) beta``; the better of the two. A block is at most the
    message, and at least one byte.

    Raises:
        UserError: fewer than two workers, an empty message, or an unknown collective.
    """
    if workers < 2 or size_bytes < 1:
        raise UserError(
            "a best block needs at least 2 workers and a message of at least 1 byte, found "
            f"{workers} workers and {size_bytes} bytes"
        )
    beta, added = beta_s_per_byte, (workers - 2) * (beta_s_per_byte + gamma_s_per_byte)
    regimes: list[tuple[float, float, float, float]]  # c, D, least m, most m
    if collective == "all-reduce" and workers > 2:
        regimes = [
            (2 * alpha_s, added - beta, workers, math.inf),
            (alpha_s, added + (workers - 1) * beta, 1, workers),
        ]
    elif collective == "all-reduce":
        regimes = [(alpha_s, beta, 1, math.inf)]
    else:
        rate = beta if collective == "broadcast" else beta + gamma_s_per_byte
        regimes = [(alpha_s, (workers - 2) * rate, 1, math.inf)]

    def cost_s(blocks: float) -> float:
        adding, passing = pipeline_steps(collective, workers, blocks)
        block = size_bytes / blocks
        return (adding + passing) * alpha_s + block * (
            adding * (beta + gamma_s_per_byte) + passing * beta
        )

    found = []
    for per_block, spread, least, most in regimes:
        if spread <= 0:
            blocks = least
        elif per_block == 0:
            blocks = most
        else:
            blocks = math.sqrt(spread * size_bytes / per_block)
        found.append(min(max(blocks, least), most, float(max(size_bytes, 1))))
    return size_bytes / min(found, key=cost_s)


def pipeline_curve(
    collective: str,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    block_bytes: int | None = None,
) -> CostCurve:
    """Return the cost of a pipelined collective of n bytes in blocks of b.

    Broadcast: ``(p - 2 + n / b) (alpha + beta b)``. Reduce:
    ``(p - 2 + n / b) (alpha + (beta + gamma) b)``. An all-reduce fills the pipeline once: for
    m = n / b >= p > 2, ``(m + p - 2) (alpha + (beta + gamma) b)`` for the sums and
    ``(m - 1) (alpha + beta b)`` until all have them.

    Args:
        collective: ``"broadcast"``, ``"reduce"`` or ``"all-reduce"``.
        workers: p, at least 1.
        alpha_s: latency of one block.
        beta_s_per_byte: transmission time.
        gamma_s_per_byte: time to add; no part of a broadcast.
        block_bytes: b; a shorter message is one block. Exact where b divides n, linear between. If
            None, the message is cut into as many equal blocks as cost least, of 1, 2, 3, 4, 6, 8,
            12, ...: at most 2.1 % more than with the best number of blocks.

    Raises:
        UserError: the collective is none of the three, there is no worker, or a block has no bytes.
    """
    costs = (alpha_s, beta_s_per_byte, gamma_s_per_byte)
    steps = partial(pipeline_steps, collective)
    if block_bytes is None or workers == 1:
        return collective_costs.pipeline_curve(workers, *costs, steps=steps)
    require_workers(workers)
    if block_bytes < 1:
        raise UserError(f"a block needs at least 1 byte, found {block_bytes}")

    def line(blocks: int) -> CostCurve:
        return pipeline_line(steps(workers, blocks), blocks, *costs)

    def at(blocks: int) -> float:
        return line(blocks).seconds(blocks * block_bytes)

    # Linear in the number of whole blocks but for where max(m, p) turns.
    turns = sorted({1, workers}) if collective == "all-reduce" else [1]
    rows = [
        (blocks * block_bytes, at(blocks), (at(blocks + 1) - at(blocks)) / block_bytes)
        for blocks in turns
        if blocks * block_bytes <= LARGEST_BYTES
    ]
    return CostCurve.of_rows([*line(1).rows(), *rows])
