"""``DeviceGroup``: ranks of one host that broadcast and reduce what is on their accelerators."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Self

import msgspec
import torch
from torch import Tensor

from syncline.comm.collectives import program
from syncline.comm.collectives.schedule import Schedule, Step
from syncline.comm.devices.control import decoded, gather
from syncline.comm.devices.cuda import REDUCTIONS, CudaDevice, Event
from syncline.comm.devices.pipeline import Pipeline
from syncline.comm.groups import Group
from syncline.errors import MismatchError, PeerError, UserError, require_known

DEFAULT_BLOCK_BYTES = 4 << 20
"""The paper takes 64 KiB (section 3.2). Here a block also costs both hosts some microseconds of
Python, so the copy engines should take at least as long for it; not measured yet."""
DEFAULT_WINDOW = 4
ALIGNMENT_BYTES = 16
DTYPES = ("float32", "float64", "float16", "bfloat16")
POLL_S = 1e-3

Kind = Literal["all-reduce", "broadcast", "reduce"]


class DeviceCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all ranks must call alike."""

    collective: Kind
    reduction: str
    dtype: str
    elements: int
    root: int

    def __str__(self) -> str:
        what = f"{self.collective} of {self.elements} elements of {self.dtype}"
        by = "" if self.collective == "broadcast" else f" by {self.reduction!r}"
        return what + by + ("" if self.collective == "all-reduce" else f", root {self.root}")


class DeviceWork:
    """A collective that is enqueued: its result is in place after the events."""

    task = peer = None  # other collectives in flight have these

    def __init__(self, device: CudaDevice, events: Sequence[Event], tensor: Tensor) -> None:
        self._device = device
        self._events = events
        self._tensor: Tensor | None = tensor

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - it blocks no host
        """Make the current stream's further work come after the result."""
        stream = self._device.current_stream()
        for event in self._events:
            stream.wait_event(event)
        self._tensor = None

    @property
    def done(self) -> bool:
        """Whether the result is in place."""
        return all(event.query() for event in self._events)

    ended = done


class DeviceGroup:
    """Ranks of one host that run linear-pipeline collectives between their accelerators.

    As with NCCL, a call enqueues work and returns: the collective runs after the work on the
    caller's current stream, and further work there runs after the collective. All ranks must call
    the same, in the same order. The hosts of all ranks synchronize in each call; the devices do
    not. Several ranks may share one device.

    Tested so far on one GPU that several ranks share, never on several GPUs.

    Nothing else may run on ``group``. It is closed with this one, and also when a call fails, so
    that the other ranks notice. ``block_bytes`` is a multiple of 16. ``window`` blocks may be in
    flight to the next rank; twice as many are allocated on the device. Both are the same on all
    ranks.

    Raises:
        UserError: ranks are on several hosts; the block or window is out of range; the device's
            memory cannot be shared.
        MismatchError: another rank has another block or window.
        PeerError: a rank has ended, or did not join in time.
    """

    def __init__(
        self,
        group: Group,
        device: CudaDevice,
        *,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self.rank = group.rank
        self.ranks = group.ranks
        if len(group.hosts) != 1:
            raise UserError(
                f"rank {self.rank}: expected all ranks on one host, joined by shared memory, found "
                f"{group.hosts} on {len(group.hosts)}; use NCCL between hosts, and leave out "
                "transport='tcp' inside one"
            )
        if block_bytes < ALIGNMENT_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise UserError(
                f"block_bytes must be a multiple of {ALIGNMENT_BYTES} above 0, found {block_bytes}"
            )
        if window < 1:
            raise UserError(f"the window must be at least 1 block, found {window}")
        self._device = device
        self._block_bytes = block_bytes
        self._group = group
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._pipeline = Pipeline(group, device, block_bytes=block_bytes, window=window)
        except BaseException:
            group.close()
            raise

    @property
    def device(self) -> torch.device:
        """Where the tensors of its collectives are."""
        return self._device.device

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> None:
        """Reduce a tensor over all ranks, in place; every rank gets the same bits.

        Elements are added up in the order of ranks. The tensor is contiguous, on this group's
        device, of dtype float32, float64, or of float16 or bfloat16, which are rounded after each
        addition. The reduction is sum, avg, min, max or product.

        Raises:
            UserError: the tensor or the reduction cannot be used; nothing was done.
            MismatchError: another rank calls something else; nothing was done.
            PeerError: a rank has ended, or did not answer in time; the group is of no use any more.
        """
        self.begin("all-reduce", tensor, reduction).wait()

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        """Copy the root's tensor, of any dtype, to all ranks, in place; see :meth:`all_reduce`."""
        self.begin("broadcast", tensor, root=root).wait()

    def reduce(self, tensor: Tensor, reduction: str = "sum", *, root: int = 0) -> None:
        """Reduce to the root, in place; the others' tensors then hold partial results."""
        self.begin("reduce", tensor, reduction, root=root).wait()

    def begin(
        self, collective: Kind, tensor: Tensor, reduction: str = "sum", *, root: int = 0
    ) -> DeviceWork:
        """Enqueue a collective that may overlap with further work on the current stream.

        No work may use the tensor until its stream has waited for the result; see
        :meth:`all_reduce` for the rest.
        """
        self._require_usable(collective, tensor, reduction, root)
        dtype = _name(tensor.dtype)
        call = DeviceCall(collective, reduction, dtype, tensor.numel(), root)
        events: list[Event] = []
        with self._lock:
            if self._ended:
                raise UserError(
                    f"rank {self.rank}: this device group was closed, or a call on it has failed; "
                    "make another"
                )
            try:
                notes = gather(self._group, msgspec.json.encode(call))
                calls = [decoded(note, DeviceCall) for note in notes]
                if calls.count(call) == self.ranks:
                    events = self._pipeline.run(
                        tensor.detach().view(-1),
                        *self._program(call, tensor.element_size()),
                        reduction=reduction,
                        divisor=self._divisor(call),
                    )
            except BaseException:
                # What was enqueued may still use the memory.
                DeviceWork(self._device, self._pipeline.quiet(), tensor).wait()
                self._give_up()
                raise
        for other, theirs in enumerate(calls):
            if theirs != call:
                raise MismatchError(
                    f"rank {self.rank} calls {call}; rank {other} calls {theirs}; all ranks must "
                    "call the same, in the same order"
                )
        return DeviceWork(self._device, events, tensor)

    def close(self) -> None:
        """Wait until all ranks' work is done, and stop sharing memory; all ranks must call it.

        Raise PeerError, and close, if a rank does not. After a failed call nothing is waited for.
        """
        with self._lock:
            if self._ended:
                return
            try:
                self._quiesce()
                gather(self._group, b"quiet")
                # CUDA: peers must close opened memory before its owner frees it.
                self._pipeline.close_peer_memory()
                gather(self._group, b"closed")
                # Only here: if a rank has failed, others may still use the memory.
                del self._pipeline
            finally:
                self._give_up()

    def leave(self) -> None:
        """Close on this rank alone, without waiting; the other ranks get a PeerError."""
        with self._lock:
            if not self._ended:
                self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never close theirs: tell them instead
            self.leave()

    def _program(self, call: DeviceCall, element_bytes: int) -> tuple[tuple[Step, ...], list[int]]:
        """Return this rank's steps, and where blocks begin and end."""
        blocks = max(-(-call.elements // (self._block_bytes // element_bytes)), 1)
        schedule, steps = _compiled(call.collective, self.ranks, blocks, call.root, self.rank)
        return steps, schedule.block_offsets(call.elements).tolist()

    def _divisor(self, call: DeviceCall) -> int:
        """Return what this rank divides sums by: the rank that completes them divides."""
        last = self.ranks - 1 if call.collective == "all-reduce" else call.root
        return self.ranks if call.reduction == "avg" and self.rank == last else 1

    def _require_usable(self, collective: Kind, tensor: Tensor, reduction: str, root: int) -> None:
        expected = f"rank {self.rank}: expected a contiguous tensor on {self._device.device}"
        if tensor.device != self._device.device:
            raise UserError(f"{expected}, found one on {tensor.device}; move it there")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise UserError(
                f"{expected}, found one of shape {tuple(tensor.shape)} that is not; give "
                "tensor.contiguous()"
            )
        if collective != "broadcast" and _name(tensor.dtype) not in DTYPES:
            raise UserError(
                f"rank {self.rank}: elements of {_name(tensor.dtype)} cannot be reduced between "
                f"devices; convert them to one of {', '.join(DTYPES)}"
            )
        require_known("reduction", reduction, REDUCTIONS)
        if not 0 <= root < self.ranks:
            raise UserError(f"expected a rank from 0 to {self.ranks - 1}, found {root}")

    def _quiesce(self) -> None:
        """Wait for this rank's streams, since torch's own waits have no deadline."""
        events = self._pipeline.quiet()
        deadline_s = time.monotonic() + self._group.timeout_s
        while not all(event.query() for event in events):
            if time.monotonic() > deadline_s:
                raise PeerError(
                    f"rank {self.rank}: {self._device.device} did not end its work within "
                    f"{self._group.timeout_s:g} s; see the other ranks' output"
                )
            time.sleep(POLL_S)

    def _give_up(self) -> None:
        """End, and let the other ranks know."""
        self._ended = True
        self._group.close()


@lru_cache(maxsize=32)
def _compiled(
    collective: Kind, ranks: int, blocks: int, root: int, rank: int
) -> tuple[Schedule, tuple[Step, ...]]:
    schedule = program(collective, "linear-pipeline", ranks, blocks=blocks, root=root)
    return schedule, tuple(schedule.program(rank))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
