"""``Gpus``: what a process group does with tensors on GPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.comm.backend.tensors import copying
from syncline.comm.devices import CudaDevice, DeviceGroup
from syncline.comm.devices.cuda import REDUCTIONS
from syncline.comm.devices.device_group import DTYPES, DeviceWork, Kind
from syncline.comm.groups import Group
from syncline.errors import PeerError, UserError
from syncline.torch_entry import NAME
from syncline.torch_private import known_groups


class Linear(NamedTuple):
    """A collective that a linear pipeline can run."""

    collective: Kind
    reduction: str = "sum"
    root: int = 0


class Gpus:
    """Device groups of a process group's ranks, and groups of other backends.

    Ranks of one host run all-reduce, broadcast and reduce as linear pipelines between their GPUs.
    All ranks must decide alike, so the decision depends only on the call, its dtype and the hosts.
    Everything else passes through host memory. ``owner`` refers to the process group, which must
    not be kept alive.

    Tested so far on one GPU that several ranks share, never on several GPUs.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self._owner = owner
        self._groups: dict[str, DeviceGroup | None] = {}
        """By name; None where the ranks are not all on one host."""
        self._others: dict[str, Any] = {}  # by kind of device; None where it is this group's own

    def other(self, device: torch.device) -> Any:
        """Return the process group of another backend for a device, or None if it is this one's.

        All ranks must make the first call together. Raise UserError if there is no backend.
        """
        kind = device.type
        if kind not in self._others:
            self._others[kind] = self._made(kind)
        return self._others[kind]

    def _made(self, kind: str) -> Any:
        owner: Any = self._owner()
        if owner not in known_groups():
            backends = {"cuda": NAME}
        else:
            config = dist.get_backend_config(owner)
            backends = dict(pair.split(":") for pair in config.split(","))
        if kind not in backends:
            made = ",".join(f"{device}:{name}" for device, name in backends.items())
            raise UserError(
                f"this process group was made as {made!r}, with no backend for tensors on {kind}; "
                f"make it as {NAME!r} for the CPU and CUDA, or name one for {kind}, as in "
                "'cpu:syncline,cuda:nccl'"
            )
        if backends[kind] == NAME:
            return None
        return dist.new_group(
            dist.get_process_group_ranks(owner),
            timeout=owner.timeout,
            backend=backends[kind],
            use_local_synchronization=True,
        )

    def begin(
        self, call: Linear, tensor: Tensor, name: str
    ) -> tuple[DeviceWork, list[Callable[[], None]]] | None:
        """Begin a collective between the GPUs of a host, in place; None if it must be staged.

        Calls of different threads use device groups of different names. Also return functions to
        call after the wait.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        reduces = call.collective != "broadcast"
        if reduces and (dtype not in DTYPES or call.reduction not in REDUCTIONS):
            return None
        group = self._group(name, tensor.device)
        if group is None:
            return None
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        keeps = call.collective == "reduce" and group.rank != call.root
        if keeps and dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()  # a pipeline leaves partial results
        work = group.begin(call.collective, dense, call.reduction, root=call.root)
        if keeps or dense.data_ptr() == tensor.data_ptr():
            return work, []
        return work, [copying(tensor, dense)]

    def _group(self, name: str, device: torch.device) -> DeviceGroup | None:
        if name not in self._groups:
            owner: Any = self._owner()
            group: Group = owner.joined(name)
            if len(group.hosts) == 1:
                self._groups[name] = DeviceGroup(group, CudaDevice(device))
            else:
                group.close()
                self._groups[name] = None
        return self._groups[name]

    def close(self) -> None:
        """Wait for the GPUs of all ranks, and stop sharing memory; all ranks must call it."""
        for group in filter(None, self._groups.values()):
            with contextlib.suppress(PeerError):  # it has failed: whoever waited got the error
                group.close()

    def leave(self) -> None:
        """Close without waiting."""
        for group in filter(None, self._groups.values()):
            group.leave()
