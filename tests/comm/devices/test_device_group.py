"""What becomes of a device group whose device, or whose neighbour, is not as it should be."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import torch

from syncline.comm.devices import DeviceGroup, pipeline
from syncline.comm.devices.pipeline import Pipeline
from syncline.errors import PeerError, UserError
from tests.comm.devices.fake_device import FakeDevice, FakeEvent, World
from tests.comm.devices.fake_group import DeadlockError, FakeGroup, Turns


class Broken(FakeDevice):
    """A device that fails when it is to copy."""

    def copy(self, *_given: object) -> None:
        raise RuntimeError("out of order")


def alone(device: FakeDevice, job: Any, timeout_s: float = 60.0) -> tuple[FakeGroup, Any]:
    """Run a job on a group of one rank; return its group and what came of it."""
    turns = Turns(1, 0)
    fake: Any = FakeGroup(turns, 0)
    fake.timeout_s = timeout_s
    [outcome] = turns.run(lambda _: job(DeviceGroup(fake, device, block_bytes=16)))
    return fake, outcome


def test_closing_does_not_wait_for_ever_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda _: False)
    group, outcome = alone(FakeDevice(World(0)), DeviceGroup.close, timeout_s=0.0)
    assert isinstance(outcome, PeerError)
    assert str(outcome) == (
        "rank 0: cpu did not end its work within 0 s; see the other ranks' output"
    )
    assert group.closed


def test_an_error_of_the_device_ends_the_group() -> None:
    turns, world = Turns(2, 0), World(0)
    groups: list[Any] = [FakeGroup(turns, rank) for rank in range(2)]

    def job(rank: int) -> list[str]:
        device = Broken(world) if rank == 0 else FakeDevice(world)
        devices = DeviceGroup(groups[rank], device, block_bytes=16)
        said = []
        for _ in range(2):
            with pytest.raises((RuntimeError, UserError)) as caught:
                devices.broadcast(torch.ones(4))
            said.append(str(caught.value))
        devices.close()
        return said

    broken, waiting = turns.run(job)
    assert broken == [
        "out of order",
        "rank 0: this device group was closed, or a call on it has failed; make another",
    ]
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
