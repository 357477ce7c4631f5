"""Device groups on fakes: right in any order of streams, every wait needed, and what fails."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.comm.devices import DeviceGroup, device_group, pipeline
from syncline.comm.devices.pipeline import Pipeline
from syncline.errors import PeerError, UserError
from tests.comm.devices.fake_device import (
    DeadlockError,
    FakeDevice,
    FakeEvent,
    FakeGroup,
    Ticket,
    Turns,
    World,
)
from tests.comm.devices.trials import Call, run, wrong_chain, wrong_results

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


@settings(max_examples=60)
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
    found: list[list[torch.Tensor]] = [[] for _ in range(3)]

    def job(fake: Any, device: Any) -> None:
        first, second = device.current, device.stream()
        with DeviceGroup(fake, device, block_bytes=16, window=2) as group:
            tensors = [torch.full((11,), torch.nan) for _ in range(2)]
            works = []
            for number, tensor in enumerate(tensors):
                device.copy(first, torch.full_like(tensor, fake.rank + 10.0 * number), tensor)
                works.append(group.begin("all-reduce", tensor))
            for number, stream in ((1, second), (0, first)):
                device.current = stream
                works[number].wait()
                result = torch.full_like(tensors[number], torch.nan)
                found[fake.rank].append(result)
                device.copy(stream, tensors[number], result)
                device.copy(stream, torch.full_like(result, torch.nan), tensors[number])

    run(seed, 3, job)
    for results in found:
        assert [result.unique().tolist() for result in results] == [[33.0], [3.0]]


# ---------------------------------------------------------------------- the fakes themselves


def test_a_stream_that_waits_for_ever_is_noticed() -> None:
    world = World(0)
    device = FakeDevice(world)
    event = FakeEvent(world)
    event.latest = Ticket()  # by a stream that never comes to it
    device.stream().wait_event(event)
    with pytest.raises(AssertionError, match="streams wait for each other"):
        world.finish()


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    turns = Turns(2, 0)
    found = turns.run(lambda rank: turns.until(rank, lambda: False))
    assert all(isinstance(error, DeadlockError) for error in found)


class Broken(FakeDevice):
    def copy(self, *_given: object) -> None:
        raise RuntimeError("out of order")


def test_closing_does_not_wait_for_ever_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda _: False)
    turns = Turns(1, 0)
    fake: Any = FakeGroup(turns, 0)
    fake.timeout_s = 0.0
    [outcome] = turns.run(lambda _: DeviceGroup(fake, FakeDevice(World(0))).close())
    assert isinstance(outcome, PeerError)
    assert "rank 0: cpu did not end its work within 0 s" in str(outcome)
    assert fake.closed


def test_an_error_of_the_device_ends_the_group() -> None:
    turns, world = Turns(2, 0), World(0)
    groups: list[Any] = [FakeGroup(turns, rank) for rank in range(2)]

    def job(rank: int) -> None:
        device: Any = (Broken, FakeDevice)[rank](world)
        devices = DeviceGroup(groups[rank], device, block_bytes=16)
        with pytest.raises(RuntimeError, match="out of order"):
            devices.broadcast(torch.ones(4))
        with pytest.raises(UserError, match="rank 0: this device group was closed, or a call on"):
            devices.broadcast(torch.ones(4))
        devices.close()

    broken, waiting = turns.run(job)
    assert broken is None
    assert groups[0].closed
    assert isinstance(waiting, DeadlockError)  # these groups do not say who has left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ready": ["MQ=="]}, "rank 0: rank 1 shares 1 and 4 events for 4 slots; run one release"),
        ({"ready": "1"}, "sent no valid LinkCard: .*; run one release"),
    ],
)
def test_a_neighbour_of_another_kind_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(_: object, note: bytes) -> list[bytes]:
        return [note, msgspec.json.encode(msgspec.json.decode(note) | changes)]

    monkeypatch.setattr(pipeline, "gather", gather)
    device, group = cast(Any, FakeDevice(World(0))), cast(Any, FakeGroup(Turns(2, 0), 0))
    with pytest.raises(PeerError, match=message):
        Pipeline(group, device, block_bytes=16, window=4)
