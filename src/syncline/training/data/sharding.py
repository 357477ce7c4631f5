"""Which samples each worker trains on: a shuffle that all workers agree on without a word."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.errors import UserError
from syncline.training.data.seeds import generator

__all__ = ["evaluation_shard", "steps_in_epoch", "training_shard"]


def steps_in_epoch(samples: int, *, workers: int, batch_size: int, accumulate: int) -> int:
    """Return the optimizer steps an epoch; the last incomplete global batch is dropped.

    Args:
        samples: training samples.
        workers: worker count.
        batch_size: samples a worker in one forward pass.
        accumulate: forward passes a step.

    Raises:
        UserError: the samples do not fill one global batch.
    """
    global_batch = workers * batch_size * accumulate
    if samples < global_batch:
        raise UserError(
            f"one step takes {global_batch} samples ({workers} workers x {batch_size} a batch "
            f"x {accumulate} accumulated), but there are only {samples}; lower --batch-size"
        )
    return samples // global_batch


def training_shard(
    samples: int,
    *,
    workers: int,
    rank: int,
    batch_size: int,
    accumulate: int,
    seed: int,
    epoch: int,
) -> Tensor:
    """Return one worker's samples of one epoch.

    All workers draw the same permutation from (seed, epoch) and take their part of each global
    batch, so that the shards are disjoint and every global batch is the same set of samples
    whatever the worker count that makes it up.

    Returns:
        (steps, accumulate, batch_size), int64 indices.
    """
    steps = steps_in_epoch(samples, workers=workers, batch_size=batch_size, accumulate=accumulate)
    order = torch.randperm(samples, generator=generator(seed, epoch))
    used = order[: steps * accumulate * workers * batch_size]
    return used.view(steps, accumulate, workers, batch_size)[:, :, rank]


def evaluation_shard(samples: int, *, workers: int, rank: int) -> Tensor:
    """Return one worker's samples of an evaluation, (n,), int64; none is dropped or repeated."""
    return torch.arange(samples)[rank::workers]
