"""Linear pipeline: blocks flow along a chain, filled once for reduction and broadcast."""

from __future__ import annotations

import numpy as np

from syncline.collectives.schedule import Schedule, Transfers, require_ranks

__all__ = ["linear_pipeline", "linear_pipeline_steps"]


def linear_pipeline(ranks: int, *, blocks: int) -> Schedule:
    """Return the all-reduce by linear pipeline, for any number of ranks.

    Block after block goes down the chain 0, 1, ... P - 1 and is added up on its way; the last rank
    has the sums. They go on in the same direction: from the last rank to rank 0, and down the chain
    again as soon as rank 0 has sent all its own blocks. Each rank sends and receives at most one
    block a step, and data flow in one direction, as section 3.1 asks for.

    Fig. 2c of the paper takes 9 steps for 3 ranks and 4 blocks, because it also sends the sums to
    the rank that formed them. That is left out here, which makes 8 (:func:`linear_pipeline_steps`).

    Args:
        ranks: P, at least 1.
        blocks: how many blocks the vector is cut into, at least 1.

    Source: linear-pipeline, section 3 and Fig. 2c.
    """
    require_ranks("linear-pipeline", ranks, blocks=blocks)
    if ranks == 1:
        parts = []
    else:
        block = np.arange(blocks)
        rank = np.arange(ranks - 1)[:, None]
        again = max(ranks, blocks)  # rank 0 has sent its own blocks, and the first sum has come
        parts = [
            Transfers.of(
                step=rank + block,
                source=rank,
                destination=rank + 1,
                block_start=block,
                reduces=True,
            ),
            Transfers.of(
                step=ranks - 1 + block,
                source=ranks - 1,
                destination=0,
                block_start=block,
                reduces=False,
            ),
            Transfers.of(
                step=again + rank[:-1] + block,
                source=rank[:-1],
                destination=rank[:-1] + 1,
                block_start=block,
                reduces=False,
            ),
        ]
    return Schedule.of(
        collective="all-reduce",
        algorithm="linear-pipeline",
        ranks=ranks,
        blocks=blocks,
        transfers=parts,
    )


def linear_pipeline_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`linear_pipeline`: 2 B + P - 3 once there are P blocks or more.

    The paper prints a cost of 2 (P - 1 + B) steps for reduction and broadcast one after the other
    (Table 1). Its own Fig. 2 shows P - 2 + B for each.
    """
    if ranks == 1:
        return 0
    if ranks == 2:
        return blocks + 1
    return max(ranks, blocks) + blocks + ranks - 3
