"""Shards are disjoint, whole, reproducible, and differ from epoch to epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.lab.training.data.sampling import (
    StepShape,
    evaluation_shard,
    steps_in_epoch,
    training_shard,
)

SHAPES = {
    "samples": st.integers(1, 400),
    "workers": st.integers(1, 9),
    "batch_size": st.integers(1, 12),
    "accumulate": st.integers(1, 4),
}


def shards(
    samples: int, workers: int, batch_size: int, accumulate: int, *, seed: int, epoch: int
) -> list[torch.Tensor]:
    return [
        training_shard(
            samples, StepShape(workers, batch_size, accumulate), rank=rank, seed=seed, epoch=epoch
        )
        for rank in range(workers)
    ]


@given(**SHAPES, seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_shards_are_disjoint_and_drop_only_an_incomplete_step(
    samples: int, workers: int, batch_size: int, accumulate: int, seed: int, epoch: int
) -> None:
    step = workers * batch_size * accumulate
    assume(samples >= step)
    parts = shards(samples, workers, batch_size, accumulate, seed=seed, epoch=epoch)
    used = torch.cat([part.flatten() for part in parts])
    assert {tuple(p.shape) for p in parts} == {(samples // step, accumulate, batch_size)}
    assert len(used.unique()) == len(used) == samples // step * step
    assert 0 <= int(used.min()) <= int(used.max()) < samples


@given(workers=st.sampled_from([1, 2, 3, 4, 6]), epoch=st.integers(0, 50))
def test_a_global_batch_is_the_same_set_at_every_worker_count(workers: int, epoch: int) -> None:
    alone = shards(100, 1, 12, 1, seed=5, epoch=epoch)[0]
    together = shards(100, workers, 12 // workers, 1, seed=5, epoch=epoch)
    for step, batch in enumerate(alone):
        parts = torch.cat([part[step].flatten() for part in together])
        assert set(parts.tolist()) == set(batch.flatten().tolist())


def test_epochs_and_seeds_give_different_orders_and_each_always_the_same() -> None:
    first = shards(64, 2, 8, 1, seed=0, epoch=0)[0]
    assert torch.equal(first, shards(64, 2, 8, 1, seed=0, epoch=0)[0])
    assert not torch.equal(first, shards(64, 2, 8, 1, seed=0, epoch=1)[0])
    assert not torch.equal(first, shards(64, 2, 8, 1, seed=1, epoch=0)[0])


@given(samples=st.integers(0, 100), workers=st.integers(1, 9))
def test_evaluation_takes_every_sample_once(samples: int, workers: int) -> None:
    parts = [evaluation_shard(samples, workers=workers, rank=rank) for rank in range(workers)]
    assert sorted(torch.cat(parts).tolist()) == list(range(samples))


def test_too_few_samples_name_the_numbers() -> None:
    with pytest.raises(UserError, match=r"24 samples \(2 workers x 4 .* x 3 .* only 23; lower"):
        steps_in_epoch(23, StepShape(2, 4, 3))
    assert steps_in_epoch(24, StepShape(2, 4, 3)) == 1
