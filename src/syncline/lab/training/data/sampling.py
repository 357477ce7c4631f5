"""Batches of each worker, drawn from seeds, so that all workers agree without a message.

A text is cut into as many pieces as there are rows in a global batch. A worker reads its pieces
from start to end, one window per step, so that a recurrent model can carry its state from one
window to the next.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from syncline.errors import UserError


class Batch(NamedTuple):
    """Inputs and targets of a forward pass."""

    inputs: Tensor  # images: (N, 3, size, size), float32; text: (N, T), int64
    targets: Tensor  # images: (N,), int64; text: (N, T), int64


def seed_from(*parts: int) -> int:
    """Return a 63-bit seed that differs for different ``parts``, such as (seed, epoch, step)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int) -> torch.Generator:
    """Return a generator on the CPU, seeded by :func:`seed_from`."""
    return torch.Generator().manual_seed(seed_from(*parts))


T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yield ``items`` in order, preparing each while the one before it is in use."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="syncline-batch") as pool:
        coming = pool.submit(next, items, end)
        while True:
            item = coming.result()
            if item is end:
                return
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]


class StepShape(NamedTuple):
    """How many samples, or rows of text, one optimizer step takes."""

    workers: int
    batch_size: int  # samples of one worker in one forward pass
    accumulate: int


def steps_in_epoch(samples: int, shape: StepShape) -> int:
    """Return the optimizer steps an epoch, at least one; an incomplete global batch is dropped."""
    workers, batch_size, accumulate = shape
    global_batch = workers * batch_size * accumulate
    if samples < global_batch:
        raise UserError(
            f"one step takes {global_batch} samples ({workers} workers x {batch_size} a batch "
            f"x {accumulate} accumulated), but there are only {samples}; lower --batch-size"
        )
    return samples // global_batch


def training_shard(samples: int, shape: StepShape, *, rank: int, seed: int, epoch: int) -> Tensor:
    """Return one worker's samples of one epoch: (steps, accumulate, batch_size), int64 indices.

    All workers draw the same permutation from (seed, epoch), and take their parts of each global
    batch. So shards are disjoint, and global batches of one size are the same for any worker count.
    """
    workers, batch_size, accumulate = shape
    steps = steps_in_epoch(samples, shape)
    order = torch.randperm(samples, generator=generator(seed, epoch))
    used = order[: steps * accumulate * workers * batch_size]
    return used.view(steps, accumulate, workers, batch_size)[:, :, rank]


def evaluation_shard(samples: int, *, workers: int, rank: int) -> Tensor:
    """Return one worker's samples of an evaluation, (n,), int64; none is dropped or repeated."""
    return torch.arange(samples)[rank::workers]


EVALUATION_ROWS = 32  # pieces of the text in an evaluation, whatever the worker count


def windows_in_epoch(tokens: int, shape: StepShape, *, window: int) -> int:
    """Return the optimizer steps an epoch over a stream, at least one; the rest is dropped."""
    workers, batch_size, accumulate = shape
    # One window's length is left for the random start, one token for the last target.
    steps = (tokens - window) // (workers * batch_size * window * accumulate)
    if steps < 1:
        needed = workers * batch_size * accumulate * window + window
        raise UserError(
            f"one step takes {needed} tokens ({workers} workers x {batch_size} rows x "
            f"{accumulate} windows of {window}), but there are only {tokens}; lower --batch-size"
        )
    return steps


def training_windows(
    stream: Tensor, shape: StepShape, *, rank: int, window: int, seed: int, epoch: int
) -> Iterator[tuple[Batch, ...]]:
    """Yield one worker's windows of one epoch, ``accumulate`` of them a step.

    The text starts at a random token of its first window, drawn from (seed, epoch), so that the
    borders of the windows move from epoch to epoch.
    """
    workers, batch_size, accumulate = shape
    steps = windows_in_epoch(len(stream), shape, window=window)
    start = int(torch.randint(window, (), generator=generator(seed, epoch)))
    rows = workers * batch_size
    inputs, targets = _columns(stream[start:], rows, (len(stream) - window) // rows)
    own = slice(rank * batch_size, (rank + 1) * batch_size)
    windows = _windows(inputs[own], targets[own], window)
    for _ in range(steps):
        yield tuple(itertools.islice(windows, accumulate))


def evaluation_windows(stream: Tensor, *, workers: int, rank: int, window: int) -> Iterator[Batch]:
    """Yield one worker's windows of an evaluation; the last may be shorter than ``window``."""
    rows = min(EVALUATION_ROWS, len(stream) - 1)
    inputs, targets = _columns(stream, rows, (len(stream) - 1) // rows)
    inputs, targets = inputs[rank::workers], targets[rank::workers]
    if len(inputs) > 0:
        yield from _windows(inputs, targets, window)


def _windows(inputs: Tensor, targets: Tensor, window: int) -> Iterator[Batch]:
    return map(Batch, inputs.split(window, 1), targets.split(window, 1))


def _columns(stream: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    used = rows * length
    return stream[:used].view(rows, length), stream[1 : used + 1].view(rows, length)
