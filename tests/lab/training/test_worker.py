"""What torch says of lost peers is recognised, whichever way it says it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from syncline.train.measure.exchange import is_lost_peer
from tests.timeouts import group_that_gives_up
from tests.workers import WorkerError, WorkerPool


def wait_for_a_silent_peer() -> bool:
    group = group_that_gives_up(1.0)
    if dist.get_rank() == 1:
        return True  # and does not take part
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    return is_lost_peer(caught.value)


def test_a_silent_peer(workers: WorkerPool) -> None:
    assert workers.run(wait_for_a_silent_peer, 2) == [True, True]


def lose_a_peer() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    raise ValueError(f"recognised: {is_lost_peer(caught.value)}")


def test_a_dead_peer(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="ValueError: recognised: True"):
        workers.run(lose_a_peer, 2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error in: x"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA out of memory."), False),
    ],
)
def test_other_errors_are_not_taken_for_lost_peers(error: RuntimeError, expected: bool) -> None:
    assert is_lost_peer(error) is expected
