"""What real processes run to test device groups; each returns what the tests compare."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from syncline.comm.devices import CudaDevice, DeviceGroup
from syncline.comm.groups import Group, Transport
from syncline.errors import PeerError
from tests.comm.devices.host_device import AtOnce, HostDevice
from tests.comm.devices.trials import Call, expected, given, start
from tests.comm.groups.jobs import said
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
    store = FileStore(f"{folder}/notes of {name}", dist.get_world_size())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = Group(store, rank, ranks, name=name, timeout_s=DEADLINE_S, transport=transport)
    with DeviceGroup(group, device, **options) as devices:
        yield devices


def device_of(kind: str, folder: str) -> Any:
    """Return this rank's device; ranks share GPUs where there are fewer of them."""
    if kind == "cuda":
        return CudaDevice(dist.get_rank() % torch.cuda.device_count())
    return HostDevice(folder)


def results(folder: str, kind: str) -> list[str]:
    """Run collectives one after the other; return which results are wrong."""
    wrong = []
    device = device_of(kind, folder)
    with joined(folder, "results", device, block_bytes=4096, window=3) as group:
        for number, call in enumerate(CALLS):
            root = call.root % group.ranks
            called = Call(**{**vars(call), "root": root})
            tensor = given(group.rank, called, number).to(device.device)
            start(group, tensor, called)
            found = tensor.cpu()
            if called.collective == "reduce" and group.rank != root:
                continue
            if not torch.equal(found, expected(group.ranks, called, number)):
                wrong.append(f"rank {group.rank}, {called}")
    return wrong


def bits(folder: str, kind: str) -> list[str]:
    """All-reduce random numbers; return digests of the results."""
    found = []
    device = device_of(kind, folder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with joined(folder, "bits", device, block_bytes=4096) as group:
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in ("sum", "avg", "product"):
                tensor = torch.randn(50_001, generator=generator).to(device.device, dtype)
                group.all_reduce(tensor, reduction)
                raw = tensor.cpu().view(torch.uint8).numpy().tobytes()
                found.append(hashlib.sha256(raw).hexdigest())
    return found


def busy_streams(folder: str) -> list[float]:
    """Call from a stream with work on it that takes long, again and again, without waiting."""
    device = device_of("cuda", folder)
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
        return [float(each.unique().item()) for each in found]


# ---------------------------------------------------------------------- what goes wrong


MISMATCHES: dict[str, Callable[[DeviceGroup, bool], object]] = {
    "count": lambda group, odd: group.all_reduce(torch.ones(9 if odd else 10)),
    "dtype": lambda group, odd: group.all_reduce(torch.ones(9).double() if odd else torch.ones(9)),
    "reduction": lambda group, odd: group.all_reduce(torch.ones(9), "max" if odd else "sum"),
    "root": lambda group, odd: group.broadcast(torch.ones(9), root=1 if odd else 0),
    "collective": lambda group, odd: (
        group.reduce(torch.ones(9)) if odd else group.all_reduce(torch.ones(9))
    ),
}


def mismatches(folder: str) -> dict[str, tuple[str, str]]:
    """Let rank 1 call something else, and all the same after that."""
    found = {}
    with joined(folder, "mismatches", HostDevice(folder)) as group:
        for name, call in MISMATCHES.items():
            found[name] = said(lambda call=call: call(group, group.rank == 1))  # type: ignore[misc]
        tensor = torch.ones(9)
        group.all_reduce(tensor)
        assert tensor.unique().tolist() == [group.ranks]
    return found


def bad_input(folder: str) -> dict[str, tuple[str, str]]:
    """Return what is said to input that cannot be used; the group must go on."""
    found = {}
    with joined(folder, "bad input", HostDevice(folder)) as group:
        ones = torch.ones(4, 4)
        calls: dict[str, Callable[[], object]] = {
            "device": lambda: group.all_reduce(torch.ones(4, device="meta")),
            "strided": lambda: group.all_reduce(ones.t()[:2]),
            "sparse": lambda: group.all_reduce(ones.to_sparse()),
            "dtype": lambda: group.all_reduce(ones.int()),
            "reduction": lambda: group.all_reduce(ones, "som"),
            "root": lambda: group.broadcast(ones, root=group.ranks),
        }
        found = {name: said(call) for name, call in calls.items()}
        group.all_reduce(ones)
        assert ones.unique().tolist() == [group.ranks]
    found["closed"] = said(lambda: group.all_reduce(ones))
    return found


def bad_groups(folder: str) -> dict[str, tuple[str, str]]:
    """Return what is said to groups that cannot be made."""
    device = HostDevice(folder)
    odd = dist.get_rank() == 1
    options: dict[str, dict[str, Any]] = {
        "block": {"block_bytes": 24},
        "window": {"window": 0},
        "hosts": {"transport": "tcp"},
        "blocks": {"block_bytes": 64 if odd else 32},
        "windows": {"window": 2 if odd else 3},
    }
    return {
        name: said(lambda name=name, o=o: joined(folder, name, device, **o).__enter__())  # type: ignore[misc]
        for name, o in options.items()
    }


def an_error_of_its_own(folder: str) -> tuple[str, str]:
    """Let rank 1 leave by an error of its own; return what the others hear."""

    def call() -> None:
        with joined(folder, "error", HostDevice(folder)) as group:
            if group.rank == 1:
                raise PeerError("an error of rank 1")
            group.all_reduce(torch.ones(9))

    return said(call)


class Deadly(HostDevice):
    """Kills its process at the n-th copy."""

    def __init__(self, folder: str, copies: int) -> None:
        super().__init__(folder)
        self._left = copies

    def copy(self, _stream: AtOnce, source: torch.Tensor, into: torch.Tensor) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        super().copy(_stream, source, into)


def leaves_on_a_gpu(folder: str) -> tuple[str, str]:
    """Let rank 1 leave between two collectives; return what the others hear."""
    device = device_of("cuda", folder)

    def call() -> None:
        with joined(folder, "leaves", device, block_bytes=4096) as group:
            group.all_reduce(torch.ones(10_000, device=device.device))
            if group.rank == 1:
                raise PeerError("an error of rank 1")
            group.all_reduce(torch.ones(10_000, device=device.device))

    found = said(call)
    torch.cuda.synchronize(device.device)  # nothing is left that never ends
    return found


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


def on_the_cpu(folder: str) -> tuple[str, str]:
    """Return what is said to a tensor on the CPU in a group of GPUs."""
    with joined(folder, "on the CPU", device_of("cuda", folder)) as group:
        return said(lambda: group.all_reduce(torch.ones(4)))
