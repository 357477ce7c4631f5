"""CUDA tensors on the backend, without a GPU: tensors of the CPU that say they are on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from syncline.comm.backend import gpus
from syncline.comm.backend.process_group import Options
from syncline.errors import UserError
from syncline.torch_private import all_gather_base
from tests.comm.backend.backend_jobs import TIMEOUT, numbers
from tests.comm.devices.host_device import HostDevice

GPU = torch.device("cuda", 0)


class Pretended(torch.Tensor):
    """A tensor on the CPU whose Python says that it is on a GPU."""

    device = property(lambda _: GPU)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    # torch.distributed is to have it as it is.
    __torch_function__ = torch._C._disabled_torch_function_impl


def _pretending(name: str) -> Callable[[Pretended], torch.Tensor]:
    """Return a method of tensors whose result is on the pretended GPU, too."""
    of_torch = getattr(torch.Tensor, name)
    return lambda self: of_torch(self).as_subclass(Pretended)


for _name in ("clone", "contiguous", "detach", "resolve_conj", "resolve_neg"):
    setattr(Pretended, _name, _pretending(_name))


class PretendedGpu(HostDevice):
    """Its streams are done at once; its memory is a file."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.device = GPU


Place = Callable[[torch.Tensor], torch.Tensor]


def _operations(group: Any, on: Place) -> dict[str, torch.Tensor]:
    """Run every kind of operation; return what it leaves."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            if dtype.is_complex and op == dist.ReduceOp.MAX:
                continue
            tensor = found[f"all_reduce, {dtype}, {op}"] = on(numbers(7, dtype=dtype))
            dist.all_reduce(tensor, op, group=group)
        tensor = found[f"broadcast, {dtype}"] = on(numbers(7, dtype=dtype))
        dist.broadcast(tensor, src=ranks - 1, group=group)
        tensor = on(numbers(7, dtype=dtype))
        dist.reduce(tensor, dst=0, group=group)
        if rank == 0:
            found[f"reduce, {dtype}"] = tensor
    across = on(numbers(4, 6)).t()
    dist.all_reduce(across, group=group)
    found["all_reduce, across"] = across
    tensor = found["all_reduce, asynchronous"] = on(numbers(9))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    parts = [on(torch.zeros(3)) for _ in range(ranks)]
    dist.all_gather(parts, on(numbers(3)), group=group)
    found |= {f"all_gather, {number}": part for number, part in enumerate(parts)}
    whole = found["all_gather into one"] = on(torch.zeros(3 * ranks))
    all_gather_base(group, whole, on(numbers(3))).wait()
    piece = found["reduce_scatter"] = on(torch.zeros(3))
    dist.reduce_scatter(piece, [on(numbers(3, salt=r)) for r in range(ranks)], group=group)
    swapped = found["all_to_all"] = on(torch.zeros(2 * ranks))
    dist.all_to_all_single(swapped, on(numbers(2 * ranks)), group=group)
    one = found["scatter"] = on(torch.zeros(3))
    dist.scatter(
        one, [on(numbers(3, salt=r)) for r in range(ranks)] if rank == 0 else None, 0, group
    )
    if ranks > 1 and rank < 2:
        message = found["recv"] = on(torch.zeros(3))
        if rank == 0:
            dist.send(on(numbers(3)), 1, group)
        else:
            dist.recv(message, 0, group)
    return found


def operations(folder: str, backend: str, transport: Any) -> dict[str, Any]:
    """Compare operations on pretended CUDA tensors with those on the CPU; say which way they went.

    Args:
        folder: for the pretended GPU's memory.
        backend: of the group.
        transport: of it.
    """
    options = Options(transport=transport) if "gloo" not in backend else None
    linear: list[str] = []
    begin = gpus.DeviceGroup.begin

    def noted(self: Any, collective: Any, *given: Any, **named: Any) -> Any:
        linear.append(collective)
        return begin(self, collective, *given, **named)

    with (
        mock.patch.object(gpus, "CudaDevice", return_value=PretendedGpu(folder)),
        mock.patch.object(gpus.DeviceGroup, "begin", noted),
    ):
        ours = dist.new_group(backend=backend, timeout=TIMEOUT, pg_options=options)
        found = _operations(ours, lambda tensor: tensor.as_subclass(Pretended))
        own = {name: tensor.as_subclass(torch.Tensor) for name, tensor in found.items()}
        on_the_cpu = numbers(5)
        dist.all_reduce(on_the_cpu, group=ours)
        dist.barrier(group=ours)
        dist.destroy_process_group(ours)
    theirs = dist.new_group(backend="gloo", timeout=TIMEOUT)
    expected = _operations(theirs, torch.Tensor.clone)
    expected["on the CPU"] = numbers(5)
    dist.all_reduce(expected["on the CPU"], group=theirs)
    own["on the CPU"] = on_the_cpu
    return {
        "differences": [n for n, tensor in expected.items() if not torch.equal(own[n], tensor)],
        "linear": sorted(set(linear)),
    }


def without_a_backend() -> str:
    """Say what a group says that has none for CUDA."""
    group = dist.new_group(backend="cpu:syncline", timeout=TIMEOUT)
    try:
        dist.all_reduce(torch.ones(3).as_subclass(Pretended), group=group)
    except UserError as error:
        return str(error)
    return "nothing"
