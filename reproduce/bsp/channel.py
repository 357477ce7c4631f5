"""Collectives of tensors by one family of algorithms, and tensors packed into buffers for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from syncline.comm.backend.tensors import elements_of
from syncline.comm.collectives.table import PROGRAMS, Pipelined
from syncline.comm.devices import DeviceGroup
from syncline.comm.devices.device_group import DeviceWork, Kind
from syncline.comm.groups import Choice, Elements, Group, Pending
from syncline.errors import UserError, require_known

ROOT = 0
"""The rank that owns the weights in Algorithms 1 and 2."""

BLOCK_BYTES = 64 * 1024
"""The block of a pipeline. Source: linear-pipeline, section 3.2 ("around 64 KB")."""

BETWEEN_DEVICES = "linear-pipeline"
"""The family that runs between devices."""

Started = Pending | DeviceWork
"""A collective under way."""

FAMILIES = tuple(
    name
    for name in PROGRAMS["broadcast"]
    if name in PROGRAMS["reduce"] and name in PROGRAMS["all-reduce"]
)
"""Algorithms that have all three collectives."""


class Channel:
    """Starts collectives, and adds up the time that computation waits for them.

    Args:
        group: the ranks; a device group for tensors on its device.
        family: one of :data:`FAMILIES`; None: the fastest for each size. Between devices it is the
            linear pipeline.

    Raises:
        UserError: there is no such family, or not between devices.
    """

    def __init__(self, group: Group | DeviceGroup, family: str | None) -> None:
        if family is not None:
            require_known("collectives", family, FAMILIES)
        if isinstance(group, DeviceGroup) and family not in (None, BETWEEN_DEVICES):
            raise UserError(
                f"collectives {family!r} do not run between GPUs; take {BETWEEN_DEVICES!r}, or a "
                "model on the CPU and a syncline.comm.groups.Group"
            )
        self.device = group.device if isinstance(group, DeviceGroup) else torch.device("cpu")
        self.group = group
        self.family = family
        self.waited_s = 0.0
        """Seconds in :meth:`waiting` so far."""

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.group.rank == ROOT

    def start(self, collective: Kind, buffer: Tensor, *, blocking: bool = False) -> Started:
        """Start to copy the root's elements to all ranks, or to add those of all ranks.

        A reduce replaces the root's elements by the sums and leaves the other ranks' undefined; an
        all-reduce replaces those of every rank. If ``blocking``, the caller will wait at once, and
        then does the work itself.
        """
        if isinstance(self.group, DeviceGroup):
            return self.group.begin(collective, buffer, root=ROOT)
        elements = elements_of(buffer, copies=collective == "broadcast")
        choice = self._choice(collective, elements)
        if collective == "broadcast":
            return self.group.broadcast(elements, root=ROOT, choice=choice, blocking=blocking)
        if collective == "reduce":
            to = elements  # in place on every rank: no other memory is needed
            return self.group.reduce(elements, to, root=ROOT, choice=choice, blocking=blocking)
        return self.group.all_reduce(elements, choice=choice, blocking=blocking)

    def _choice(self, collective: Kind, elements: Elements) -> Choice | None:
        if self.family is None:
            return None
        if isinstance(PROGRAMS[collective][self.family], Pipelined):
            return Choice(self.family, max(-(-elements.size_bytes // BLOCK_BYTES), 1))
        return Choice(self.family)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as time that computation waits for communication."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start_s


class _Packed:
    """Tensors packed into a buffer for each dtype, which are exchanged together.

    ``places`` are the tensors' parts of the buffers, of their shapes. If ``marked``, each tensor
    has one more element, its mark.
    """

    def __init__(
        self, tensors: Sequence[Tensor], channel: Channel, *, marked: bool = False
    ) -> None:
        self._channel = channel
        self._pending: list[Started] = []
        self._buffers: list[Tensor] = []
        self._places: list[Tensor] = [torch.empty(0)] * len(tensors)
        self._marks: list[Tensor] = [torch.empty(0)] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sizes = [tensors[i].numel() for i in indices]
            elements = sum(sizes) + marked * len(indices)
            buffer = torch.zeros(elements, dtype=dtype, device=tensors[indices[0]].device)
            *places, marks = buffer.split([*sizes, marked * len(indices)])
            for number, i in enumerate(indices):
                self._places[i] = places[number].view(tensors[i].shape)
                self._marks[i] = marks[number : number + 1]
            self._buffers.append(buffer)

    def _start(self, collective: Kind, *, blocking: bool) -> None:
        self._pending = [
            self._channel.start(collective, buffer, blocking=blocking) for buffer in self._buffers
        ]

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop(0).wait()


class Values(_Packed):
    """Weights or buffers that are broadcast together."""

    def __init__(self, tensors: Sequence[Tensor], channel: Channel) -> None:
        super().__init__(tensors, channel)
        self._tensors = tensors

    @torch.no_grad()
    def start_broadcast(self, *, blocking: bool = False) -> None:
        """Start to broadcast the root's values."""
        if self._channel.is_root:
            for place, tensor in zip(self._places, self._tensors, strict=True):
                place.copy_(tensor)
        self._start("broadcast", blocking=blocking)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and copy what has arrived to its place."""
        self._wait()
        if not self._channel.is_root:
            for place, tensor in zip(self._places, self._tensors, strict=True):
                tensor.copy_(place)

    def broadcast(self) -> None:
        """Replace every rank's values by the root's."""
        self.start_broadcast(blocking=True)
        self.finish()


class Gradients(_Packed):
    """Gradients that are averaged together.

    Each is sent with a mark of how many ranks have it: a parameter that no rank has used gets no
    gradient, so that its optimizer does not change it. Each gradient is multiplied by 1 / P before
    it is added, as DDP does, so that the same numbers are added.

    The parameters are given by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], channel: Channel) -> None:
        super().__init__([*parameters.values()], channel, marked=True)
        self._parameters = parameters
        self._averages: list[Tensor] = []
        """Gradients that hold averages, until the update."""

    def start_reduce(self, *, blocking: bool = False) -> None:
        """Start to reduce this rank's gradients to the root.

        Raises:
            UserError: on the root, if it has added a gradient to an average.
        """
        for name, parameter in self._parameters.items():
            if any(parameter.grad is average for average in self._averages):
                raise UserError(
                    f"a second backward pass has added to the average gradient of {name!r} before "
                    "the update; run all but the last pass under no_sync(), or call zero_grad()"
                )
        self._pack()
        self._start("reduce", blocking=blocking)

    def finish_reduce(self) -> None:
        """Wait; the root gets the averages, and the other ranks have no gradients.

        So a step of the optimizer updates only the root's weights.
        """
        self._wait()
        if self._channel.is_root:
            self._unpack()
            self._averages = [p.grad for p in self._parameters.values() if p.grad is not None]
        else:
            for parameter in self._parameters.values():
                parameter.grad = None

    def forget(self) -> None:
        """Note that the averages have been used."""
        self._averages.clear()

    def all_reduce(self) -> None:
        """Replace every rank's gradients by the averages."""
        self._pack()
        self._start("all-reduce", blocking=True)
        self._wait()
        self._unpack()

    @torch.no_grad()
    def _pack(self) -> None:
        share = 1.0 / self._channel.group.ranks
        for (name, parameter), place, mark in zip(
            self._parameters.items(), self._places, self._marks, strict=True
        ):
            mark.fill_(parameter.grad is not None)
            if parameter.grad is None:
                place.zero_()
            elif parameter.grad.layout is not torch.strided:
                raise UserError(
                    f"the gradient of {name!r} is {parameter.grad.layout}, and "
                    "BSP-SGD exchanges dense ones; make its module with sparse=False"
                )
            else:
                torch.mul(parameter.grad, share, out=place)

    @torch.no_grad()
    def _unpack(self) -> None:
        for parameter, place, mark in zip(
            self._parameters.values(), self._places, self._marks, strict=True
        ):
            if not mark.item():
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(place)
