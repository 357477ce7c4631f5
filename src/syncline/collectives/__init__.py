"""Collectives as programs: one algorithm a file, and the table of them by name."""

from __future__ import annotations

from collections.abc import Callable

from syncline.collectives.binary_tree import binary_tree
from syncline.collectives.double_binary_trees import (
    double_binary_trees,
    double_binary_trees_steps,
)
from syncline.collectives.halving_doubling import halving_doubling
from syncline.collectives.linear_pipeline import linear_pipeline, linear_pipeline_steps
from syncline.collectives.recursive_doubling import recursive_doubling
from syncline.collectives.ring import ring
from syncline.collectives.schedule import Schedule, Step
from syncline.errors import UserError, did_you_mean

__all__ = [
    "ALL_REDUCE",
    "PIPELINED",
    "Schedule",
    "Step",
    "all_reduce",
    "best_blocks",
    "binary_tree",
    "double_binary_trees",
    "halving_doubling",
    "linear_pipeline",
    "recursive_doubling",
    "ring",
]

ALL_REDUCE: dict[str, Callable[[int], Schedule]] = {
    "binary-tree": binary_tree,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "ring": ring,
}
"""All-reduce programs by the names of the cost lines in :mod:`syncline.model.collective_costs`."""

PIPELINED: dict[str, tuple[Callable[..., Schedule], Callable[[int, int], int]]] = {
    "double-binary-trees": (double_binary_trees, double_binary_trees_steps),
    "linear-pipeline": (linear_pipeline, linear_pipeline_steps),
}
"""All-reduce programs that are told how many blocks to cut, and how many steps they then take."""

MOST_BLOCKS = 4096
"""Where :func:`best_blocks` stops."""


def all_reduce(algorithm: str, ranks: int, *, blocks: int | None = None) -> Schedule:
    """Return the program of an all-reduce.

    Args:
        algorithm: a key of :data:`ALL_REDUCE` or :data:`PIPELINED`.
        ranks: how many ranks take part.
        blocks: how many blocks to cut the vector into; for those of :data:`PIPELINED`, and for
            them only.

    Raises:
        UserError: the algorithm or the number of ranks is unknown, or blocks are missing, or given
            where the algorithm decides on them itself.
    """
    if algorithm in PIPELINED:
        if blocks is None:
            raise UserError(
                f"{algorithm} needs a number of blocks; best_blocks() gives a good one for a size"
            )
        return PIPELINED[algorithm][0](ranks, blocks=blocks)
    if algorithm not in ALL_REDUCE:
        known = [*ALL_REDUCE, *PIPELINED]
        raise UserError(
            f"unknown all-reduce algorithm {algorithm!r}{did_you_mean(algorithm, known)} "
            f"(known: {', '.join(known)})"
        )
    if blocks is not None:
        raise UserError(f"{algorithm} cuts the vector as it must; blocks={blocks} has no meaning")
    return ALL_REDUCE[algorithm](ranks)


def best_blocks(
    algorithm: str, ranks: int, *, size_bytes: int, alpha_s: float, beta_s_per_byte: float
) -> int:
    """Return the number of blocks with which a pipelined program is fastest, within about 2 %.

    More blocks fill the pipe sooner and pay more startups. Tried are 1, 2, 3, 4, 6, 8 ... 4,096
    blocks, at ``steps (alpha + beta M / blocks)``.

    Args:
        algorithm: a key of :data:`PIPELINED`.
        ranks: how many ranks take part.
        size_bytes: M, the size of the vector.
        alpha_s: startup time of a transfer, in seconds.
        beta_s_per_byte: transmission time, in seconds a byte.

    Raises:
        UserError: the algorithm is not pipelined.
    """
    if algorithm not in PIPELINED:
        raise UserError(
            f"{algorithm!r} is not told a number of blocks; pipelined are: {', '.join(PIPELINED)}"
        )
    steps = PIPELINED[algorithm][1]

    def seconds(blocks: int) -> float:
        return steps(ranks, blocks) * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    powers = [1 << k for k in range(MOST_BLOCKS.bit_length())]
    candidates = sorted({1, *powers, *(p + p // 2 for p in powers if p > 1)})
    return min((b for b in candidates if b <= max(size_bytes, 1)), key=seconds)
