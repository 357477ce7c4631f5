"""A stand-in for CUDA's streams and events that records who reads and writes what, and after what.

Work is done at once, on the CPU, but each stream and each thread of the host has a vector clock,
which only the recorded events carry from one to the other. An access that no event orders after an
earlier one of the same bytes, where either writes, is a race: on a GPU it may come first. So is
memory that goes back to torch's allocator, which reuses it on the stream that it was made on, while
another stream may be using it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode

import syncline
from syncline.torch_private import without_torch_function

Clock = dict[str, int]  # how far each stream and thread has come, by name
Place = tuple[str, int]  # file and line
SOURCES = Path(syncline.__file__).parent
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Access:
    start: int
    stop: int  # bytes of a storage
    by: str
    time: int
    writes: bool
    what: str


@dataclass
class Memory:
    """A storage."""

    storage: StorageWeakRef
    made_on: FakeStream
    pinned: bool = False
    accesses: list[Access] = field(default_factory=list)
    handed: set[str] = field(default_factory=set)  # streams of ``record_stream``


class FakeStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name
        self.clock: Clock = {}

    def wait_event(self, event: FakeEvent) -> None:
        self.recorder.order(self.clock, event.clock)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.recorder)
        event.record(self)
        return event

    def wait_stream(self, stream: FakeStream) -> None:
        self.recorder.order(self.clock, stream.clock)

    def synchronize(self) -> None:
        self.recorder.order(self.recorder.host()[1], self.clock)


class FakeEvent:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or self.recorder.current()).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.recorder.current()).wait_event(self)

    def synchronize(self) -> None:
        self.recorder.order(self.recorder.host()[1], self.clock)


class Recorder:
    """The streams of one process.

    Args:
        dropped: a place in the sources whose waits are left out.
    """

    def __init__(self, dropped: Place | None = None) -> None:
        self.dropped = dropped
        self.waits: set[Place] = set()  # where the sources wait for an event or a stream
        self.races: list[str] = []
        self.default = FakeStream(self, "default stream")
        self._lock = threading.RLock()
        self._streams = 0
        self._memories: dict[int, Memory] = {}
        self._here = threading.local()

    # ------------------------------------------------------------------ what torch.cuda has

    def stream(self, *_: Any) -> FakeStream:
        with self._lock:
            self._streams += 1
            return FakeStream(self, f"stream {self._streams}")

    def event(self, **_: Any) -> FakeEvent:
        return FakeEvent(self)

    def current(self, *_: Any) -> FakeStream:
        return getattr(self._here, "stream", None) or self.default

    @contextmanager
    def _having(self, name: str, value: Any) -> Iterator[None]:
        """Let something be so for the present thread."""
        before = getattr(self._here, name, None)
        setattr(self._here, name, value)
        try:
            yield
        finally:
            setattr(self._here, name, before)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        with self._having("stream", stream), self.watching():
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what the present thread does."""
        if getattr(self._here, "watched", False):
            yield
        else:
            with self._having("watched", True), _Pinning(self), _Watching(self):
                yield

    def unwatched(self) -> AbstractContextManager[None]:
        """Record nothing of what the present thread does."""
        return self._having("apart", True)

    # ------------------------------------------------------------------ order

    def host(self) -> tuple[str, Clock]:
        """Return the present thread's name and clock."""
        if not hasattr(self._here, "clock"):
            self._here.clock = {}
        thread = threading.current_thread()
        return f"thread {thread.name!r} {thread.ident}", self._here.clock

    def order(self, later: Clock, earlier: Clock) -> None:
        with self._lock:
            place = _place()
            if place is not None:
                self.waits.add(place)
                if place == self.dropped:
                    return
            _merge(later, earlier)

    # ------------------------------------------------------------------ accesses

    def saw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation on the current stream."""
        if getattr(self._here, "apart", False):
            return
        schema = func._schema
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a, _ in given)
        if not writes and any(r.alias_info is not None for r in schema.returns):
            return  # a view
        stream, name = self.current(), schema.name.removeprefix("aten::")
        # A pending tensor must not synchronize because it is looked at here.
        with without_torch_function(), self._lock:
            self._collect()
            inputs = set()
            for argument, value in given:
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors(value):
                    inputs.add(tensor.untyped_storage()._cdata)
                    if not name.startswith("new_") and "_like" not in name:  # of its shape alone
                        self.use(tensor, stream, written, name)
            for tensor in _tensors(result):
                if tensor.untyped_storage()._cdata not in inputs:
                    self._memory(tensor, stream)
                    if "empty" not in name:
                        self.use(tensor, stream, True, name)
            if name == "_local_scalar_dense":  # the host waits for the number
                _merge(self.host()[1], stream.clock)

    def use(self, tensor: Tensor, stream: FakeStream, writes: bool, what: str) -> None:
        """Note that a stream uses a tensor."""
        with self._lock:
            _merge(stream.clock, self.host()[1])  # it was launched after what the host has seen
            self._use(tensor, stream.name, stream.clock, writes, what)

    def read_by_host(self, tensor: Tensor) -> None:
        """Note that the host reads values: memory of the host as it is, of the device in order."""
        name, clock = self.host()
        with self._lock:
            if self._memory(tensor, self.current()).pinned:
                self._use(tensor, name, clock, False, "read of the host")
            else:
                self.use(tensor, self.current(), False, "tolist")
                _merge(clock, self.current().clock)

    def pin(self, tensor: Tensor) -> None:
        with self._lock:
            self._memory(tensor, self.current()).pinned = True

    def hand(self, tensor: Tensor, stream: FakeStream) -> None:
        """Do what ``record_stream`` does."""
        with self._lock:
            self._memory(tensor, self.current()).handed.add(stream.name)

    def _use(self, tensor: Tensor, by: str, clock: Clock, writes: bool, what: str) -> None:
        if not tensor.numel():
            return
        memory = self._memory(tensor, self.current())
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (sum((n - 1) * stride for n, stride in steps) + 1) * size
        clock[by] = clock.get(by, 0) + 1
        now = Access(start, stop, by, clock[by], writes, f"{what} at {_place()}")
        kept = []
        for old in memory.accesses:
            ordered = clock.get(old.by, 0) >= old.time
            overlap = old.start < stop and start < old.stop
            if overlap and not ordered and (writes or old.writes):
                self.races.append(f"{by}: {now.what} races with {old.by}: {old.what}")
            within = start <= old.start and old.stop <= stop
            if not (within and ordered and (writes or (old.by == by and not old.writes))):
                kept.append(old)
        memory.accesses = [*kept, now]

    def _memory(self, tensor: Tensor, stream: FakeStream) -> Memory:
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = Memory(StorageWeakRef(storage), stream)
        return found

    def _collect(self) -> None:
        """Let the allocator have what is freed."""
        for key in [key for key, each in self._memories.items() if each.storage.expired()]:
            memory = self._memories.pop(key)
            maker = memory.made_on
            for old in memory.accesses:
                late = maker.clock.get(old.by, 0) < old.time and old.by != maker.name
                if late and old.by not in memory.handed and not memory.pinned:
                    self.races.append(
                        f"{maker.name} may reuse memory that {old.by} uses: {old.what}"
                    )


class _Watching(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.recorder.saw(func, args, kwargs or {}, result)
        return result


class _Pinning(TorchFunctionMode):
    """Makes memory that is to be pinned as any other: that needs a GPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        pinned = given.pop("pin_memory", False)
        result = func(*args, **given)
        if pinned:
            self.recorder.pin(result)
        return result


class FakeNccl:
    """A process group on which collectives run as NCCL's do: on a stream of the group's own.

    It waits for the caller's current stream; ``wait`` makes the stream wait that is current then.

    Args:
        group: what exchanges the numbers, such as one of Gloo.
    """

    def __init__(self, group: Any, recorder: Recorder) -> None:
        self._group, self._recorder = group, recorder
        self._stream = recorder.stream()

    def size(self) -> int:
        return int(self._group.size())

    def rank(self) -> int:
        return int(self._group.rank())

    def allreduce(self, tensors: list[Tensor]) -> Collective:
        return self._run("allreduce", tensors, tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Collective:
        written = [tensor for row in outputs for tensor in row]
        return self._run("allgather", inputs, written, outputs, inputs)

    def _allgather_base(self, output: Tensor, given: Tensor) -> Collective:
        return self._run("_allgather_base", [given], [output], output, given)

    def alltoall_base(self, output: Tensor, given: Tensor, *sizes: list[int]) -> Collective:
        return self._run("alltoall_base", [given], [output], output, given, *sizes)

    def _run(
        self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], *arguments: Any
    ) -> Collective:
        recorder = self._recorder
        _merge(self._stream.clock, recorder.current().clock)
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                recorder.use(tensor, self._stream, writes, name)
        with recorder.unwatched():
            getattr(self._group, name)(*arguments).wait()
        # NCCL's groups keep what they use until the stream that waits has waited.
        return Collective(recorder, dict(self._stream.clock), [*read, *written])


@dataclass
class Collective:
    recorder: Recorder
    clock: Clock
    kept: list[Tensor]

    def wait(self) -> bool:
        self.recorder.order(self.recorder.current().clock, self.clock)
        self.kept.clear()
        return True


@contextmanager
def recorded_streams(dropped: Place | None = None) -> Iterator[Recorder]:
    """Put the stand-in in CUDA's place, and record what the present thread does.

    Threads are recorded while they are in ``torch.cuda.stream``.
    """
    recorder = Recorder(dropped)
    tolist = Tensor.tolist

    def noted_tolist(self: Tensor) -> Any:
        if has_torch_function_unary(self):  # a pending tensor synchronizes first, as for torch's
            return handle_torch_function(noted_tolist, (self,), self)
        recorder.read_by_host(self)
        return tolist(self)

    def handed(self: Tensor, stream: FakeStream) -> None:
        recorder.hand(self, stream)

    with ExitStack() as stack:
        for name, value in (
            ("Stream", recorder.stream),
            ("Event", recorder.event),
            ("stream", recorder.on),
            ("current_stream", recorder.current),
            ("default_stream", lambda *_: recorder.default),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Tensor, "tolist", noted_tolist))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", handed))
        stack.enter_context(recorder.watching())
        yield recorder
        recorder._collect()


def _merge(later: Clock, earlier: Clock) -> None:
    for name, time in earlier.items():
        later[name] = max(later.get(name, 0), time)


def _place() -> Place | None:
    """Return the line of Syncline's that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            return path.name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
