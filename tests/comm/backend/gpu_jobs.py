"""CUDA tensors on the backend, without a GPU: tensors of the CPU that say they are on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from syncline.comm.backend import gpus
from syncline.comm.backend.process_group import Options
from syncline.errors import UserError
from tests.comm.backend.backend_jobs import group_of, numbers, operations, require_same
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


def like_gloo(folder: str, backend: str, transport: Any) -> list[str]:
    """Run operations on pretended CUDA tensors, and on the CPU over Gloo; return what was linear.

    The pretended GPU's memory is in the folder.
    """
    options = Options(transport=transport) if "gloo" not in backend else None
    linear: set[str] = set()
    begin = gpus.DeviceGroup.begin

    def noted(self: Any, collective: Any, *given: Any, **named: Any) -> Any:
        linear.add(collective)
        return begin(self, collective, *given, **named)

    with (
        group_of("gloo") as gloos,
        mock.patch.object(gpus, "CudaDevice", return_value=PretendedGpu(folder)),
        mock.patch.object(gpus.DeviceGroup, "begin", noted),
        group_of(backend, options) as ours,
    ):
        expected = operations(gloos)
        for name, found in operations(ours, lambda t: t.as_subclass(Pretended)).items():
            require_same(found, expected.pop(name), what=name)
        total, theirs = numbers(5), numbers(5)  # on the CPU, by the same group
        dist.all_reduce(total, group=ours)
        dist.all_reduce(theirs, group=gloos)
        require_same([total], [theirs])
        dist.barrier(group=ours)
    assert expected == {}
    return sorted(linear)


def without_a_backend() -> None:
    """Use a group that has no backend for CUDA."""
    words = (
        "this process group was made as 'cpu:syncline', with no backend for .*"
        "'cpu:syncline,cuda:nccl'"
    )
    with group_of("cpu:syncline") as group, pytest.raises(UserError, match=words):
        dist.all_reduce(torch.ones(3).as_subclass(Pretended), group=group)
