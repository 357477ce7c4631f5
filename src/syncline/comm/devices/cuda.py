"""``CudaDevice``: CUDA through torch, shared between processes by CUDA's own handles (IPC).

It uses only torch's public API: streams and events of ``torch.cuda``, and the functions of
``torch.multiprocessing.reductions`` that send and rebuild tensors. Their values are sent field by
field; nothing is pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from syncline.comm.devices.control import decoded
from syncline.errors import UserError

Stream = torch.cuda.Stream
Event = torch.cuda.Event

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""Elementwise, into ``out=``; an average is a sum that is divided at the end."""


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What torch needs to open another process's memory."""

    gpu: str  # its UUID, since processes may number GPUs differently
    size_bytes: int  # of the tensor, which has dtype uint8 and one dimension
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class EventHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What torch needs to open another process's event."""

    gpu: str
    handle: bytes


TAKEN_OVER = tuple(
    name for name in MemoryHandle.__struct_fields__ if name not in ("gpu", "size_bytes")
)
"""Fields that have torch's own names."""
FIXED: dict[str, Any] = {
    "tensor_cls": Tensor,
    "tensor_stride": (1,),
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "requires_grad": False,
}
"""Arguments of torch that are the same for all staging buffers, so they are never sent."""
FIELDS = (
    *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"),
    *("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes"),
    *("requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle"),
    "event_sync_required",
)
"""All that torch is known to rebuild a tensor from, in its order."""


class CudaDevice:
    """A GPU of this process: the few calls that collectives need of it.

    All methods only enqueue work. The work of a stream runs in order; streams are not ordered among
    each other, except where one waits for an event that another records. A wait is for the event's
    last recording before it, so some process must have recorded the event by then. ``device`` is
    such as ``"cuda:1"``, or a number; without a number, torch's current device. Raise UserError if
    there is no such GPU, or it cannot be shared in this way.
    """

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type != "cuda":
            raise UserError(f"expected a CUDA device such as 'cuda:0', found {str(found)!r}")
        if not torch.cuda.is_available():
            raise UserError(
                f"{found} cannot be used: torch {torch.__version__} finds no GPU here; check "
                "'nvidia-smi', CUDA_VISIBLE_DEVICES, and that torch was built for CUDA"
            )
        index = torch.cuda.current_device() if found.index is None else found.index
        if index >= torch.cuda.device_count():
            raise UserError(f"expected one of {torch.cuda.device_count()} GPUs, found {found}")
        _require_known_torch()
        self.device = torch.device("cuda", index)
        self._gpu = _identity(index)

    def allocate(self, size_bytes: int, streams: Sequence[Stream]) -> Tensor:
        """Return memory, of shape ``(size_bytes,)`` and dtype uint8, for the given streams.

        Their further work runs after that of the current stream, which may have used the memory.
        """
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        for stream in streams:
            stream.wait_stream(self.current_stream())
            memory.record_stream(stream)
        return memory

    def share(self, memory: Tensor) -> bytes:
        """Return a handle of memory of :meth:`allocate`, which one other process may open."""
        with self._sharing("memory"):
            _, values = reduce_tensor(memory)
        sent = dict(zip(_fields(), values, strict=True))
        taken_over = {name: sent[name] for name in TAKEN_OVER}
        handle = MemoryHandle(gpu=self._gpu, size_bytes=memory.numel(), **taken_over)
        return msgspec.json.encode(handle)

    def open(self, handle: bytes) -> Tensor:
        """Return the memory that another process shares; it may be on another GPU than this one."""
        shared = decoded(handle, MemoryHandle)
        index = _number_of(shared.gpu)
        with self._sharing("memory"):
            opened: Tensor = rebuild_cuda_tensor(
                tensor_size=torch.Size([shared.size_bytes]),
                storage_device=index,
                **{name: getattr(shared, name) for name in TAKEN_OVER},
                **FIXED,
            )
        return opened

    def shared_event(self) -> Event:
        """Return an event that other processes can wait for, recorded by this one alone."""
        return torch.cuda.Event(interprocess=True)

    def share_event(self, event: Event) -> bytes:
        """Return a handle of an event of :meth:`shared_event`, for any number of processes."""
        with self._sharing("events"), torch.cuda.device(self.device):
            handle = event.ipc_handle()
        return msgspec.json.encode(EventHandle(gpu=self._gpu, handle=handle))

    def open_event(self, handle: bytes) -> Event:
        """Return the event that another process shares; streams of any GPU can wait for it."""
        shared = decoded(handle, EventHandle)
        device = torch.device("cuda", _number_of(shared.gpu))
        with self._sharing("events"):
            opened: Event = torch.cuda.Event.from_ipc_handle(device, shared.handle)
        return opened

    def stream(self) -> Stream:
        """Return a new stream, which does not wait for the default stream."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """Return the caller's current stream."""
        return torch.cuda.current_stream(self.device)

    def copy(self, stream: Stream, source: Tensor, into: Tensor) -> None:
        """Copy elements, from another GPU directly, where the two can reach each other.

        torch copies between GPUs on the current stream of the one it reads from; that stream and
        ``stream`` then wait for each other.
        """
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def combine(self, stream: Stream, reduction: str, given: Tensor, into: Tensor) -> None:
        """Reduce elements into others; float16 and bfloat16 in float32, rounded at the end."""
        with torch.cuda.stream(stream):
            REDUCTIONS[reduction](into, given, out=into)

    def divide(self, stream: Stream, into: Tensor, divisor: int) -> None:
        """Divide elements by a number."""
        with torch.cuda.stream(stream):
            # By a tensor: by a number, torch multiplies by the rounded reciprocal on a GPU.
            into.div_(into.new_full((), divisor))

    @contextmanager
    def _sharing(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UserError(
                f"{self.device}: {what} cannot be shared between processes: {error}; CUDA IPC "
                "needs Linux, one container for all ranks, and an allocator without "
                "expandable_segments (PYTORCH_CUDA_ALLOC_CONF); use NCCL where that is not possible"
            ) from error


def _identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _number_of(gpu: str) -> int:
    """Return the number that a GPU has in this process."""
    visible = [_identity(index) for index in range(torch.cuda.device_count())]
    if gpu not in visible:
        raise UserError(
            f"the GPU {gpu} of a neighbouring rank cannot be seen by this process, which sees "
            f"{', '.join(visible)}; let all ranks see all GPUs (CUDA_VISIBLE_DEVICES), and give "
            "each its own by CudaDevice(number)"
        )
    return visible.index(gpu)


def _fields() -> tuple[str, ...]:
    """Return the fields from which this torch rebuilds tensors, in its order."""
    parameters = inspect.signature(rebuild_cuda_tensor).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # A tracer may have put a function of its own in place of torch's, which hides them.
    hidden = any(parameter.kind in variadic for parameter in parameters.values())
    return FIELDS if hidden else tuple(parameters)


def _require_known_torch() -> None:
    """Check that this torch rebuilds tensors from the fields that are sent."""
    found, expected = set(_fields()), set(FIELDS)
    if found != expected:
        raise UserError(
            f"torch {torch.__version__} shares CUDA memory by other fields than Syncline expects "
            f"({', '.join(sorted(found ^ expected))}); use NCCL, or another release of torch"
        )
