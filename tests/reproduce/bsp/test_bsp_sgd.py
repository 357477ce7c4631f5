"""The three algorithms of BSP-SGD, over every family of collectives, beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import first_few
from tests.mortal import Mortals
from tests.reproduce.bsp import jobs
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    ("optimizer", "accumulate"), first_few([("momentum", 2), ("adam", 1), ("momentum", 1)], 2)
)
def test_two_ranks_end_with_the_bits_of_ddp(
    workers: WorkerPool, optimizer: str, accumulate: int
) -> None:
    ranks = workers.run(jobs.every_cell, 2, optimizer, torch.float32, accumulate)
    for rank, found in enumerate(ranks):
        expected = found.pop("ddp")
        for cell, result in found.items():
            for name, value in expected.items():
                assert torch.equal(result["state"][name], value), (rank, cell, name)
            check_facts(rank, cell, result)


def check_facts(rank: int, cell: str, result: dict[str, Any]) -> None:
    """Gradients and the optimizer's state are the root's alone, but for algorithm 3."""
    assert result["profiled"]
    if rank > 0 and not cell.startswith("3"):
        assert (result["optimizer states"], result["gradients"]) == (0, 0), cell
    else:
        assert result["optimizer states"] > 0, cell
        # Of 16 parameters that are trained, the two of "unused" have no gradient, ever; those of
        # the branch only where a rank has taken it.
        assert 10 <= result["gradients"] <= 14, cell
    algorithm, _, planner = cell.split(" ")
    if algorithm == "1":
        assert result["messages"] == 8  # layers; see below
    elif planner == "wfbp":
        assert result["messages"] >= 10
    elif planner == "None":
        assert result["messages"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_group_ends_with_the_same_bits(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    """On a device of the CPU's; what a GPU does is in tests/gpu."""
    for same in workers.run(jobs.between_devices, ranks, str(tmp_path)):
        assert same
        assert all(same.values()), same


def test_three_ranks_differ_by_rounding_alone(workers: WorkerPool) -> None:
    ranks = workers.run(jobs.every_cell, 3, "momentum", torch.float64, 1)
    expected = ranks[0]["ddp"]
    for found in ranks:
        del found["ddp"]
        for cell, result in found.items():
            for name, value in expected.items():
                assert torch.allclose(result["state"][name], value, rtol=1e-9, atol=1e-12), cell
                assert torch.equal(result["state"][name], ranks[0][cell]["state"][name]), cell


def test_algorithm_3_brings_weights_together_now_and_then(workers: WorkerPool) -> None:
    first, second = workers.run(jobs.weights_apart, 2, 3)
    assert first == [True] * 6
    assert second == [False, False, True, True, True, True]


def test_layers_are_what_is_read_together(workers: WorkerPool) -> None:
    (found,) = workers.run(jobs.layers, 1)
    assert found == [
        # Never seen to be read: before all others.
        ["sometimes.bias", "sometimes.weight", "unused.bias", "unused.weight"],
        # Read in the forward pass of the model itself, so needed when that begins.
        ["read_by_parent.bias", "read_by_parent.weight", "scale"],
        ["first.bias", "first.weight"],
        ["norm.bias", "norm.weight"],
        ["second.bias", "second.weight"],
        ["tied.bias"],
        ["head.0.bias", "head.0.weight"],
        ["head.2.bias", "head.2.weight"],
    ]


@pytest.mark.parametrize("algorithm", [1, 3])
def test_the_profile_tells_waiting_from_computing(workers: WorkerPool, algorithm: int) -> None:
    for waited_s, computed_s, waits in workers.run(jobs.clocked, 2, algorithm):
        assert computed_s == pytest.approx(0.02)
        assert waits > 0
        assert waited_s == pytest.approx(0.001 * waits)


def test_what_is_dropped_is_gone(workers: WorkerPool) -> None:
    assert workers.run(jobs.dropped, 1) == [[True, True, True]]


@pytest.mark.parametrize("job", [jobs.wrong_arguments, jobs.wrong_use])
def test_what_is_refused(workers: WorkerPool, job: Callable[[], None]) -> None:
    workers.run(job, 1)


@pytest.mark.parametrize("algorithm", first_few([2, 1, 3]))
@pytest.mark.parametrize("when", first_few(["backward", "forward"]))
def test_a_rank_that_dies_is_named(
    mortals: Mortals, tmp_path: Path, algorithm: int, when: str
) -> None:
    ended = mortals.run(jobs.dies, 3, algorithm, when, folder=tmp_path)
    assert [rank.code for rank in ended] == [0, 3, 0]
    for rank in (0, 2):
        assert ended[rank].out.startswith("PeerError"), ended[rank]
        assert "rank 1" in ended[rank].out
