"""Shards and windows are disjoint, whole and reproducible, and differ from epoch to epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.lab.training.data.sampling import (
    StepShape,
    evaluation_shard,
    evaluation_windows,
    prefetched,
    steps_in_epoch,
    training_shard,
    training_windows,
    windows_in_epoch,
)


def shards(samples: int, shape: StepShape, *, seed: int = 0, epoch: int = 0) -> list[torch.Tensor]:
    ranks = range(shape.workers)
    return [training_shard(samples, shape, rank=r, seed=seed, epoch=epoch) for r in ranks]


SHAPES = st.builds(StepShape, st.integers(1, 9), st.integers(1, 12), st.integers(1, 4))


@given(st.integers(1, 400), SHAPES, st.integers(0, 2**40), st.integers(0, 1000))
def test_shards_are_disjoint_and_whole(
    samples: int, shape: StepShape, seed: int, epoch: int
) -> None:
    step = shape.workers * shape.batch_size * shape.accumulate
    assume(samples >= step)
    parts = shards(samples, shape, seed=seed, epoch=epoch)
    used = torch.cat([part.flatten() for part in parts])
    assert {tuple(p.shape) for p in parts} == {
        (samples // step, shape.accumulate, shape.batch_size)
    }
    assert len(used.unique()) == len(used) == samples // step * step
    assert 0 <= int(used.min()) <= int(used.max()) < samples


@given(workers=st.sampled_from([1, 2, 3, 4, 6]), epoch=st.integers(0, 50))
def test_a_global_batch_is_the_same_set_at_every_worker_count(workers: int, epoch: int) -> None:
    alone = shards(100, StepShape(1, 12, 1), epoch=epoch)[0]
    together = shards(100, StepShape(workers, 12 // workers, 1), epoch=epoch)
    for step, batch in enumerate(alone):
        parts = torch.cat([part[step].flatten() for part in together])
        assert set(parts.tolist()) == set(batch.flatten().tolist())


def test_epochs_and_seeds_give_different_orders_and_each_always_the_same() -> None:
    shape = StepShape(2, 8, 1)
    first = shards(64, shape)[0]
    assert torch.equal(first, shards(64, shape)[0])
    assert not torch.equal(first, shards(64, shape, epoch=1)[0])
    assert not torch.equal(first, shards(64, shape, seed=1)[0])


@given(samples=st.integers(0, 100), workers=st.integers(1, 9))
def test_evaluation_takes_every_sample_once(samples: int, workers: int) -> None:
    parts = [evaluation_shard(samples, workers=workers, rank=rank) for rank in range(workers)]
    assert sorted(torch.cat(parts).tolist()) == list(range(samples))


def test_too_few_samples_or_tokens_name_the_numbers() -> None:
    with pytest.raises(UserError, match=r"24 samples \(2 workers x 4 .* x 3 .* only 23; lower"):
        steps_in_epoch(23, StepShape(2, 4, 3))
    assert steps_in_epoch(24, StepShape(2, 4, 3)) == 1
    with pytest.raises(UserError, match="only 40; lower --batch-size"):
        windows_in_epoch(40, StepShape(2, 4, 1), window=5)


@given(
    st.integers(60, 500),
    st.builds(StepShape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    st.integers(0, 5),
)
def test_windows_are_consecutive_and_disjoint(tokens: int, shape: StepShape, epoch: int) -> None:
    window = 3
    stream = torch.arange(tokens)
    seen: list[int] = []
    for rank in range(shape.workers):
        steps = list(training_windows(stream, shape, rank=rank, window=window, seed=0, epoch=epoch))
        assert len(steps) == windows_in_epoch(tokens, shape, window=window)
        batches = [batch for step in steps for batch in step]
        for batch in batches:
            assert batch.inputs.shape == (shape.batch_size, window)
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


def test_items_made_ahead_come_in_order() -> None:
    assert list(prefetched(iter(range(20)))) == list(range(20))
    assert list(prefetched(iter(()))) == []


def test_an_error_is_raised_where_the_item_would_have_been() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("broken")

    ahead = prefetched(items())
    assert (next(ahead), next(ahead)) == (1, 2)
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_leaving_early_ends_the_thread() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    for item in prefetched(items()):
        if item == 3:
            break
    assert len(made) <= 6
