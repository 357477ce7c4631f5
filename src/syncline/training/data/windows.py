"""How a text is cut for training: columns side by side, windows one below the other.

The stream is laid out in as many columns as there are rows in a global batch; each column is a
piece of the text that its worker reads from top to bottom, a window a step, so that a recurrent
model can carry its state from one window to the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from syncline.errors import UserError
from syncline.training.data.seeds import generator
from syncline.training.data.spec import Batch

__all__ = ["evaluation_windows", "training_windows", "windows_in_epoch"]

EVALUATION_ROWS = 32
"""Columns of an evaluation, over all workers: the result must not depend on the worker count."""


def windows_in_epoch(
    tokens: int, *, workers: int, batch_size: int, accumulate: int, window: int
) -> int:
    """Return the optimizer steps an epoch over a stream; incomplete ones are dropped.

    Raises:
        UserError: the stream does not fill one step.
    """
    # One window's length is left for the random start, one token for the last target.
    column = (tokens - window) // (workers * batch_size)
    steps = column // (window * accumulate)
    if steps < 1:
        needed = workers * batch_size * accumulate * window + window
        raise UserError(
            f"one step takes {needed} tokens ({workers} workers x {batch_size} rows x "
            f"{accumulate} windows of {window}), but there are only {tokens}; lower --batch-size"
        )
    return steps


def training_windows(
    stream: Tensor,
    *,
    workers: int,
    rank: int,
    batch_size: int,
    accumulate: int,
    window: int,
    seed: int,
    epoch: int,
) -> Iterator[tuple[Batch, ...]]:
    """Yield one worker's windows of one epoch, ``accumulate`` of them a step.

    The text starts at a random token of its first window, drawn from (seed, epoch), so that the
    borders of the windows move from epoch to epoch.
    """
    steps = windows_in_epoch(
        len(stream), workers=workers, batch_size=batch_size, accumulate=accumulate, window=window
    )
    start = int(torch.randint(window, (), generator=generator(seed, epoch)))
    rows = workers * batch_size
    inputs, targets = _columns(stream[start:], rows, (len(stream) - window) // rows)
    own = slice(rank * batch_size, (rank + 1) * batch_size)
    for step in range(steps):
        places = range(step * accumulate, (step + 1) * accumulate)
        yield tuple(
            Batch(
                inputs[own, place * window : (place + 1) * window],
                targets[own, place * window : (place + 1) * window],
            )
            for place in places
        )


def evaluation_windows(stream: Tensor, *, workers: int, rank: int, window: int) -> Iterator[Batch]:
    """Yield one worker's windows of an evaluation; the last may be shorter than ``window``."""
    rows = min(EVALUATION_ROWS, len(stream) - 1)
    inputs, targets = _columns(stream, rows, (len(stream) - 1) // rows)
    inputs, targets = inputs[rank::workers], targets[rank::workers]
    if len(inputs) == 0:
        return
    for start in range(0, inputs.shape[1], window):
        yield Batch(inputs[:, start : start + window], targets[:, start : start + window])


def _columns(stream: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    used = rows * length
    return stream[:used].view(rows, length), stream[1 : used + 1].view(rows, length)
