"""Windows follow one another in the text, and every target is the token after its input."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.lab.training.data.sampling import (
    StepShape,
    evaluation_windows,
    training_windows,
    windows_in_epoch,
)


@settings(max_examples=50)
@given(
    tokens=st.integers(60, 500),
    workers=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    epoch=st.integers(0, 5),
)
def test_windows_are_consecutive_and_disjoint(
    tokens: int, workers: int, batch_size: int, accumulate: int, epoch: int
) -> None:
    window = 3
    shape = StepShape(workers, batch_size, accumulate)
    stream = torch.arange(tokens)
    seen: list[int] = []
    for rank in range(workers):
        steps = list(training_windows(stream, shape, rank=rank, window=window, seed=0, epoch=epoch))
        assert len(steps) == windows_in_epoch(tokens, shape, window=window)
        batches = [batch for step in steps for batch in step]
        for batch in batches:
            assert batch.inputs.shape == (batch_size, window)
            assert torch.equal(batch.targets, batch.inputs + 1)
            seen += batch.inputs.flatten().tolist()
        for one, following in itertools.pairwise(batches):
            assert torch.equal(one.inputs[:, -1] + 1, following.inputs[:, 0])
    assert len(seen) == len(set(seen))


def test_the_start_moves_from_epoch_to_epoch() -> None:
    def first_token(epoch: int) -> int:
        steps = training_windows(
            torch.arange(500), StepShape(1, 1, 1), rank=0, window=20, seed=0, epoch=epoch
        )
        return int(next(iter(steps))[0].inputs[0, 0])

    starts = [first_token(epoch) for epoch in range(8)]
    assert len(set(starts)) > 3
    assert max(starts) < 20


@pytest.mark.parametrize("workers", [1, 2, 3, 40])
def test_evaluation_reads_the_same_tokens_at_every_worker_count(workers: int) -> None:
    stream = torch.arange(330)
    tokens = [
        token
        for rank in range(workers)
        for batch in evaluation_windows(stream, workers=workers, rank=rank, window=4)
        for token in batch.inputs.flatten().tolist()
    ]
    assert sorted(tokens) == list(range(320))  # 32 rows of 10


def test_too_few_tokens_name_the_numbers() -> None:
    with pytest.raises(UserError, match="only 40; lower --batch-size"):
        windows_in_epoch(40, StepShape(2, 4, 1), window=5)
