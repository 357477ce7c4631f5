"""Results are right in whatever order streams run, and every wait is needed for that."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.comm.devices import DeviceGroup, device_group, pipeline
from tests.comm.devices.fake_device import FakeDevice, FakeEvent, Ticket, World
from tests.comm.devices.fake_group import DeadlockError, FakeGroup, Turns
from tests.comm.devices.trials import Call, wrong_chain, wrong_results

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCTIONS = ["sum", "avg", "min", "max", "product"]
TRIALS = 60


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[Call]]:
    ranks = draw(st.integers(1, 6))
    call = st.builds(
        Call,
        collective=st.sampled_from(["all-reduce", "broadcast", "reduce"]),
        count=st.one_of(st.integers(0, 12), st.integers(0, 100)),
        dtype=st.sampled_from(DTYPES),
        reduction=st.sampled_from(REDUCTIONS),
        root=st.integers(0, ranks - 1),
        stream=st.integers(0, 1),
    )
    return ranks, draw(st.lists(call, min_size=1, max_size=4))


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    job=jobs(),
    block_bytes=st.sampled_from([16, 32, 48, 1024]),
    window=st.integers(1, 5),
)
@pytest.mark.slow
def test_results_are_right_in_any_order(
    seed: int, job: tuple[int, list[Call]], block_bytes: int, window: int
) -> None:
    ranks, calls = job
    assert wrong_results(seed, ranks, calls, block_bytes=block_bytes, window=window) == []


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_operations_on_a_block_keep_the_order_of_the_program(seed: int) -> None:
    assert wrong_chain(seed) == []


def waits() -> list[tuple[str, int]]:
    """Return the file and line of every wait of a stream in the source."""
    return [
        (path.name, node.lineno)
        for path in (Path(pipeline.__file__), Path(device_group.__file__))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait_event"
    ]


def test_the_waits_are_found() -> None:
    assert len(waits()) == 7


@pytest.mark.parametrize("wait", waits(), ids=lambda wait: f"{wait[0]}:{wait[1]}")
def test_every_wait_is_needed(wait: tuple[str, int]) -> None:
    calls = [
        Call(collective="all-reduce", count=40),
        Call(collective="reduce", count=40, root=1),
        Call(collective="broadcast", count=40, stream=1),
    ]
    assert any(
        wrong_results(seed, 3, calls, block_bytes=16, window=2, dropped=wait)
        or wrong_chain(seed, dropped=wait)
        for seed in range(TRIALS)
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_collectives_may_be_under_way_together(seed: int) -> None:
    """The second is waited for first, on another stream; each reuses its memory after its wait."""
    world, turns = World(seed), Turns(3, seed)
    found: list[list[torch.Tensor]] = [[] for _ in range(3)]

    def job(rank: int) -> None:
        device = FakeDevice(world)
        first, second = device.current, device.stream()
        fake: Any = FakeGroup(turns, rank)
        with DeviceGroup(fake, device, block_bytes=16, window=2) as group:
            tensors = [torch.full((11,), torch.nan) for _ in range(2)]
            works = []
            for number, tensor in enumerate(tensors):
                device.copy(first, torch.full_like(tensor, rank + 10.0 * number), tensor)
                works.append(group.begin("all-reduce", tensor))
            for number, stream in ((1, second), (0, first)):
                device.current = stream
                works[number].wait()
                result = torch.full_like(tensors[number], torch.nan)
                found[rank].append(result)
                device.copy(stream, tensors[number], result)
                device.copy(stream, torch.full_like(result, torch.nan), tensors[number])

    for outcome in turns.run(job):
        if outcome is not None:
            raise outcome
    world.finish()
    for results in found:
        assert [result.unique().tolist() for result in results] == [[33.0], [3.0]]


# ---------------------------------------------------------------------- the fakes themselves


def test_streams_that_wait_for_each_other_are_noticed() -> None:
    world = World(0)
    device = FakeDevice(world)
    one, other = device.stream(), device.stream()
    for stream in (one, other):
        event = FakeEvent(world)
        event.latest = Ticket()  # by a stream that never comes to it
        stream.wait_event(event)
    with pytest.raises(AssertionError, match="streams wait for each other"):
        world.finish()


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    turns = Turns(2, 0)
    found = turns.run(lambda rank: turns.until(rank, lambda: False))
    assert all(isinstance(error, DeadlockError) for error in found)
