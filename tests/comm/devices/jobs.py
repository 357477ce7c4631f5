"""What real processes run to test device groups; each makes sure of what is right there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from syncline.comm.devices import CudaDevice, DeviceGroup
from syncline.comm.groups import Group, Transport
from syncline.errors import MismatchError, PeerError, UserError
from tests.comm.devices.host_device import AtOnce, HostDevice
from tests.comm.devices.trials import Call, expected, given, start
from tests.comm.groups.jobs import joined as joined_group
from tests.comm.groups.jobs import require_same_bits, said
from tests.mortal import Place
from tests.timeouts import DEADLINE_S

COUNTS = (0, 1, 3, 1000, 100_003)
CALLS = [
    Call(collective=collective, count=count, dtype=dtype, reduction=reduction, root=root)
    for count in COUNTS
    for collective, dtype, reduction, root in (
        ("all-reduce", torch.float32, "sum", 0),
        ("all-reduce", torch.bfloat16, "avg", 0),
        ("all-reduce", torch.float64, "min", 0),
        ("reduce", torch.float16, "max", 1),
        ("reduce", torch.float32, "avg", 0),
        ("all-reduce", torch.float32, "product", 0),
        ("broadcast", torch.bfloat16, "sum", 1),
    )
]


@contextmanager
def joined(
    folder: str, name: str, device: Any, *, transport: Transport = "auto", **options: Any
) -> Iterator[DeviceGroup]:
    """Join a device group of all workers."""
    with (
        joined_group(folder, name, DEADLINE_S, transport) as group,
        DeviceGroup(group, device, **options) as devices,
    ):
        yield devices


def device_of(kind: str, folder: str) -> Any:
    """Return this rank's device; ranks share GPUs where there are fewer of them."""
    if kind == "cuda":
        return CudaDevice(dist.get_rank() % torch.cuda.device_count())
    return HostDevice(folder)


def results(folder: str, kind: str) -> None:
    """Run collectives one after the other, with right results."""
    device = device_of(kind, folder)
    with joined(folder, "results", device, block_bytes=4096, window=3) as group:
        for number, call in enumerate(CALLS):
            called = replace(call, root=call.root % group.ranks)
            tensor = given(group.rank, called, number).to(device.device)
            start(group, tensor, called)
            found = tensor.cpu()
            if called.collective != "reduce" or group.rank == called.root:
                assert torch.equal(found, expected(group.ranks, called, number)), called


def bits(folder: str, kind: str) -> None:
    """All-reduce random numbers, to the same bits on all ranks."""
    device = device_of(kind, folder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with joined(folder, "bits", device, block_bytes=4096) as group:
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in ("sum", "avg", "product"):
                tensor = torch.randn(50_001, generator=generator).to(device.device, dtype)
                group.all_reduce(tensor, reduction)
                require_same_bits(tensor)


def busy_streams(folder: str, kind: str) -> None:
    """Call from a stream with work on it that takes long, again and again, without waiting."""
    device = device_of(kind, folder)
    stream = torch.cuda.Stream(device.device)
    large = torch.ones(2048, 2048, device=device.device)
    with joined(folder, "busy", device, block_bytes=1 << 16) as group, torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 20, device=device.device)
        found = []
        for number in range(10):
            for _ in range(20 * (group.rank + 1)):
                large = large @ large / 2048
            tensor.fill_(float(number))
            group.all_reduce(tensor)
            found.append(tensor.clone())
            tensor.fill_(torch.nan)
        assert [each.unique().tolist() for each in found] == [[3.0 * n] for n in range(10)]


NINE, TEN = torch.ones(9), torch.ones(10)
OF_NINE = "all-reduce of 9 elements of"
MISMATCHES: dict[str, Callable[[DeviceGroup, bool], object]] = {
    f"{OF_NINE} float32 by 'sum'": lambda g, odd: g.all_reduce(NINE if odd else TEN),
    f"{OF_NINE} float64": lambda g, odd: g.all_reduce(NINE.double() if odd else NINE),
    f"{OF_NINE} float32 by 'max'": lambda g, odd: g.all_reduce(NINE, "max" if odd else "sum"),
    "broadcast of 9 elements of float32, root 1": lambda g, odd: g.broadcast(NINE, root=int(odd)),
    "reduce of 9 elements": lambda g, odd: g.reduce(NINE) if odd else g.all_reduce(NINE),
}  # by what rank 1 calls


def mismatches(folder: str) -> None:
    """Let rank 1 call something else, which every rank says, and all the same after that."""
    with joined(folder, "mismatches", HostDevice(folder)) as group:
        odd = group.rank == 1
        for theirs, call in MISMATCHES.items():
            words = "rank 0 calls " if odd else f"rank 1 calls {theirs}"
            with pytest.raises(MismatchError, match=f"^rank {group.rank} calls .*; {words}"):
                call(group, odd)
        tensor = torch.ones(9)
        group.all_reduce(tensor)
        assert tensor.unique().tolist() == [group.ranks]


def bad_input(folder: str) -> None:
    """Give what cannot be used; the group goes on."""
    ones = torch.ones(4, 4)
    contiguous = f"^rank {dist.get_rank()}: expected a contiguous tensor on cpu, found one "
    with joined(folder, "bad input", HostDevice(folder)) as group:
        calls: dict[str, Callable[[], object]] = {
            f"{contiguous}on meta; move it there": lambda: group.all_reduce(ones.to("meta")),
            rf"{contiguous}of shape \(2, 4\) that is not": lambda: group.all_reduce(ones.t()[:2]),
            rf"{contiguous}of shape \(4, 4\) that is": lambda: group.all_reduce(ones.to_sparse()),
            "elements of int32 cannot be reduced": lambda: group.all_reduce(ones.int()),
            "reduction 'som'; did you mean 'sum'": lambda: group.all_reduce(ones, "som"),
            "expected a rank from 0 to 1, found 2": lambda: group.broadcast(ones, root=2),
        }
        for words, call in calls.items():
            with pytest.raises(UserError, match=words):
                call()
        group.all_reduce(ones)
        assert ones.unique().tolist() == [group.ranks]
    with pytest.raises(UserError, match="was closed, or a call on it has failed"):
        group.all_reduce(ones)


def bad_groups(folder: str) -> None:
    """Make groups that cannot be."""
    rank = dist.get_rank()
    found: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (UserError, "a multiple of 16 above 0, found 24", {"block_bytes": 24}),
        (UserError, "the window must be at least 1 block, found 0", {"window": 0}),
        (UserError, r"on one host.* found \(\(0,\), \(1,\)\) on 2", {"transport": "tcp"}),
        (
            MismatchError,
            f"^rank {rank} has a window of 4 blocks of {(32, 64)[rank]} bytes",
            {"block_bytes": (32, 64)[rank]},
        ),
        (MismatchError, "has a window of", {"window": (3, 2)[rank]}),
    ]
    for number, (kind, words, options) in enumerate(found):
        group = joined(folder, f"bad {number}", HostDevice(folder), **options)
        with pytest.raises(kind, match=words):
            group.__enter__()


def leaves(folder: str, kind: str) -> None:
    """Let rank 1 leave by an error of its own, between two collectives; the others hear of it."""
    device = device_of(kind, folder)

    def call() -> None:
        with joined(folder, "leaves", device, block_bytes=4096) as group:
            group.all_reduce(torch.ones(10_000, device=device.device))
            if group.rank == 1:
                raise PeerError("an error of rank 1")
            group.all_reduce(torch.ones(10_000, device=device.device))

    words = "^an error of rank 1$" if dist.get_rank() == 1 else "rank 1"
    with pytest.raises(PeerError, match=words):
        call()
    if kind == "cuda":
        torch.cuda.synchronize(device.device)  # nothing is left that never ends


class Deadly(HostDevice):
    """Kills its process at the n-th copy."""

    def __init__(self, folder: str, copies: int) -> None:
        super().__init__(folder)
        self._left = copies

    def copy(self, stream: AtOnce, source: torch.Tensor, into: torch.Tensor) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        super().copy(stream, source, into)


def dies(place: Place, copies: int) -> None:
    """Kill rank 1 in the middle of a collective; the others say what they hear, and go on."""
    store = FileStore(str(place.folder / "notes"), place.ranks)
    group = Group(store, place.rank, place.ranks, timeout_s=DEADLINE_S)
    folder = str(place.folder)
    device: Any = Deadly(folder, copies) if place.rank == 1 else HostDevice(folder)
    devices = DeviceGroup(group, device, block_bytes=64, window=2)
    print(*said(lambda: devices.all_reduce(torch.ones(1000))))
    print(*said(lambda: devices.all_reduce(torch.ones(1000))))
    devices.close()


def on_the_cpu(folder: str, kind: str) -> None:
    """Give a tensor on the CPU to a group of GPUs."""
    words = "found one on cpu; move it there"
    with (
        joined(folder, "on the CPU", device_of(kind, folder)) as group,
        pytest.raises(UserError, match=words),
    ):
        group.all_reduce(torch.ones(4))
