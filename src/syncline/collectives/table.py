"""The table of collectives and algorithms, and their programs by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncline.collectives import (
    bidirectional_exchange,
    direct,
    double_binary_trees,
    halving_doubling,
    linear_pipeline,
    minimum_spanning_tree,
    ring,
)
from syncline.collectives.schedule import Schedule, require_ranks
from syncline.collectives.transfers import Transfers
from syncline.errors import UserError, require_known

__all__ = ["PROGRAMS", "ROOTED", "Collective", "Fixed", "Pipelined", "best_blocks", "program"]

Collective = Literal["broadcast", "reduce", "all-reduce", "reduce-scatter", "all-gather"]

ROOTED = ("broadcast", "reduce")
"""Collectives that have a root."""

MOST_BLOCKS = 4096
"""The most blocks that :func:`best_blocks` tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """An algorithm whose number of blocks follows from the number of ranks."""

    transfers: Callable[[int], Transfers]
    """For a number of ranks; a rooted collective has rank 0 as the root."""
    blocks: Callable[[int], int]
    """The number of blocks for a number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """An algorithm that takes the number of blocks."""

    transfers: Callable[[int, int], Transfers]
    """For numbers of ranks and blocks; a rooted collective has rank 0 as the root."""
    steps: Callable[[int, int], int]
    """How many steps it takes for numbers of ranks and blocks."""


def _whole(ranks: int) -> int:
    del ranks
    return 1


def _shards(ranks: int) -> int:
    return ranks


_TREE_ALL_REDUCE = Fixed(transfers=minimum_spanning_tree.all_reduce, blocks=_whole)
_EXCHANGE_ALL_REDUCE = Fixed(
    transfers=halving_doubling.halving_doubling_all_reduce, blocks=halving_doubling.folded_blocks
)

PROGRAMS: dict[Collective, dict[str, Fixed | Pipelined]] = {
    "broadcast": {
        "minimum-spanning-tree": Fixed(transfers=minimum_spanning_tree.broadcast, blocks=_whole),
        "bidirectional-exchange": Fixed(
            transfers=bidirectional_exchange.broadcast, blocks=halving_doubling.folded_blocks
        ),
        "scatter-ring": Fixed(transfers=ring.broadcast, blocks=_shards),
        "direct": Fixed(transfers=direct.broadcast, blocks=_whole),
        "double-binary-trees": Pipelined(
            transfers=double_binary_trees.broadcast, steps=double_binary_trees.broadcast_steps
        ),
        "linear-pipeline": Pipelined(
            transfers=linear_pipeline.broadcast, steps=linear_pipeline.one_way_steps
        ),
    },
    "reduce": {
        "minimum-spanning-tree": Fixed(transfers=minimum_spanning_tree.reduce, blocks=_whole),
        "bidirectional-exchange": Fixed(
            transfers=bidirectional_exchange.reduce, blocks=halving_doubling.folded_blocks
        ),
        "direct": Fixed(transfers=direct.reduce, blocks=_shards),
        "double-binary-trees": Pipelined(
            transfers=double_binary_trees.reduce, steps=double_binary_trees.reduce_steps
        ),
        "linear-pipeline": Pipelined(
            transfers=linear_pipeline.reduce, steps=linear_pipeline.one_way_steps
        ),
    },
    "all-reduce": {
        "binary-tree": _TREE_ALL_REDUCE,
        "minimum-spanning-tree": _TREE_ALL_REDUCE,
        "recursive-doubling": Fixed(transfers=halving_doubling.doubling_all_reduce, blocks=_whole),
        "halving-doubling": _EXCHANGE_ALL_REDUCE,
        "bidirectional-exchange": _EXCHANGE_ALL_REDUCE,
        "ring": Fixed(transfers=ring.all_reduce, blocks=_shards),
        "direct": Fixed(transfers=direct.all_reduce, blocks=_shards),
        "double-binary-trees": Pipelined(
            transfers=double_binary_trees.all_reduce, steps=double_binary_trees.all_reduce_steps
        ),
        "linear-pipeline": Pipelined(
            transfers=linear_pipeline.all_reduce, steps=linear_pipeline.all_reduce_steps
        ),
    },
    "reduce-scatter": {
        "ring": Fixed(transfers=ring.reduce_scatter, blocks=_shards),
        "recursive-halving": Fixed(
            transfers=halving_doubling.halving_reduce_scatter, blocks=_shards
        ),
        "direct": Fixed(transfers=direct.reduce_scatter, blocks=_shards),
    },
    "all-gather": {
        "ring": Fixed(transfers=ring.all_gather, blocks=_shards),
        "recursive-doubling": Fixed(transfers=halving_doubling.doubling_all_gather, blocks=_shards),
        "direct": Fixed(transfers=direct.all_gather, blocks=_shards),
    },
}
"""Algorithms by collective and name; the names of the cost lines in ``syncline.model`` where they
have one. Two papers name two all-reduces differently: MG-WFBP's binary tree is linear-pipeline's
minimum spanning tree, its halving and doubling the other's bidirectional exchange."""


def program(
    collective: Collective,
    algorithm: str,
    ranks: int,
    *,
    blocks: int | None = None,
    root: int = 0,
) -> Schedule:
    """Return the program of a collective.

    What the collectives promise, on a vector of the same length on every rank, in place:

    - broadcast: every rank ends with the root's vector;
    - reduce: the root ends with the sum of all;
    - all-reduce: every rank ends with the sum of all;
    - reduce-scatter: rank r ends with the sum of shard r, the rth of P equal parts of the vector;
    - all-gather: every rank ends with shard r of rank r, for all r.

    What else a rank's vector holds at the end is not said: partial sums, mostly. Where there are
    shards there are P blocks, and where P divides the length, shards are equal.

    Args:
        collective: a key of :data:`PROGRAMS`.
        algorithm: a key of the table there.
        ranks: how many ranks take part.
        blocks: how many blocks to cut the vector into; for :class:`Pipelined` algorithms only.
        root: the root of a broadcast or reduce; of those only.

    Raises:
        UserError: there is no such collective or algorithm, or no such number of ranks; blocks are
            missing, or given where the algorithm decides on them itself; the root is none of the
            ranks, or is given where there is none.
    """
    entry = _entry(collective, algorithm)
    if isinstance(entry, Pipelined):
        if blocks is None:
            raise UserError(
                f"{algorithm} needs a number of blocks; best_blocks() gives a good one for a size"
            )
        require_ranks(algorithm, ranks, blocks=blocks)
        transfers = entry.transfers(ranks, blocks)
    else:
        if blocks is not None:
            raise UserError(
                f"{algorithm} cuts the vector as it must; blocks={blocks} has no meaning"
            )
        require_ranks(algorithm, ranks)
        blocks, transfers = entry.blocks(ranks), entry.transfers(ranks)
    if root != 0 and collective not in ROOTED:
        raise UserError(f"{collective} has no root; root={root} has no meaning")
    return Schedule.of(
        collective=collective,
        algorithm=algorithm,
        ranks=ranks,
        blocks=blocks,
        transfers=transfers.rotated(root, ranks),
        root=root,
    )


def best_blocks(
    collective: Collective,
    algorithm: str,
    ranks: int,
    *,
    size_bytes: int,
    alpha_s: float,
    beta_s_per_byte: float,
) -> int:
    """Return the number of blocks with which a pipelined program is fastest, within about 3 %.

    More blocks fill the pipeline sooner and cost more startups. It tries 1, 2, 3, 4, 6, 8 ... 4,096
    blocks, and one less than each, at ``steps (alpha + beta M / blocks)``.

    Args:
        collective: a key of :data:`PROGRAMS`.
        algorithm: a :class:`Pipelined` algorithm of the table there.
        ranks: how many ranks take part.
        size_bytes: M, the size of the vector.
        alpha_s: startup time of a transfer, in seconds.
        beta_s_per_byte: transmission time, in seconds a byte.

    Raises:
        UserError: there is no such collective or algorithm, or it is not pipelined.
    """
    entry = _entry(collective, algorithm)
    if not isinstance(entry, Pipelined):
        pipelined = [n for n, other in PROGRAMS[collective].items() if isinstance(other, Pipelined)]
        raise UserError(
            f"{algorithm!r} takes no number of blocks; pipelined are: "
            f"{', '.join(pipelined) or 'none'}"
        )
    steps = entry.steps

    def seconds(blocks: int) -> float:
        return steps(ranks, blocks) * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    powers = [1 << k for k in range(MOST_BLOCKS.bit_length())]
    counts = [1, *powers, *(p + p // 2 for p in powers if 1 < p < MOST_BLOCKS)]
    # One less, because two trees that take turns may end two steps sooner with an odd number.
    candidates = sorted({*counts, *(count - 1 for count in counts if count > 1)})
    return min((b for b in candidates if b <= max(size_bytes, 1)), key=seconds)


def _entry(collective: Collective, algorithm: str) -> Fixed | Pipelined:
    require_known("collective", collective, PROGRAMS)
    known = PROGRAMS[collective]
    require_known(f"{collective} algorithm", algorithm, known)
    return known[algorithm]
