"""The events of a PyTorch profiler trace (Kineto), validated and in one form for all schemas.

This file hides the differences between the releases of PyTorch from 2021 to 2026: the names of
categories ("Operator" or "cpu_op", "Kernel" or "kernel", "Runtime" or "cuda_runtime" and
"cuda_driver"), of arguments ("external id" or "External id"), thread ids as text or as numbers, and
microseconds that count from 1970 or from ``baseTimeNanoseconds``. ``ts`` and ``dur`` are
microseconds in every release; ``displayTimeUnit`` only says how a viewer prints them.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any, Literal, NamedTuple

import msgspec

from syncline.errors import FileError, quoted
from syncline.model.quantities import LARGEST_WORKERS, LONGEST_NS
from syncline.traces.reading import ReadProgress, json_elements, open_trace

__all__ = ["CollectivePayload", "DeviceTask", "HostOp", "KinetoEvents", "LaunchCall", "read_events"]

HOST_OPS = frozenset({"cpu_op", "operator"})
ANNOTATIONS = frozenset({"user_annotation"})
CALLS = frozenset({"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime"})
DEVICE_KINDS: dict[str, Literal["kernel", "copy", "set"]] = {
    "kernel": "kernel",
    "concurrent_kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "set",
    "memset": "set",
}
COLLECTIVE_KEYS = ("Collective name", "In msg nelems", "dtype")
SHAPED = ("AccumulateGrad", "c10d::", "nccl:", "gloo:", "mpi:", "ucc:", "record_param_comms")
"""Parts of names of the operations whose shapes are kept."""


class CollectivePayload(msgspec.Struct, frozen=True, gc=False):
    """The arguments that a collective was recorded with."""

    collective: str
    """Lower-case name, such as ``"allreduce"``."""
    elements: int
    dtype: str
    group_size: int | None


class HostOp(msgspec.Struct, frozen=True, gc=False):
    """An operator or annotation on a thread of the host."""

    thread: str
    start_ns: int
    stop_ns: int
    name: str
    annotation: bool
    sequence: int | None
    """Number that a forward operation shares with its backward node."""
    record_id: int | None
    """Record function id, by which an execution trace names the same operation."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the inputs, for the operations that need them."""
    types: tuple[str, ...]
    payload: CollectivePayload | None


class LaunchCall(msgspec.Struct, frozen=True, gc=False):
    """A call of the device's runtime or driver by a thread of the host."""

    thread: str
    start_ns: int
    stop_ns: int
    name: str
    correlation: int | None


class DeviceTask(msgspec.Struct, frozen=True, gc=False):
    """A kernel, copy or memset on a stream of the device."""

    stream: str
    start_ns: int
    stop_ns: int
    name: str
    kind: Literal["kernel", "copy", "set"]
    correlation: int | None
    payload: CollectivePayload | None


class KinetoEvents(NamedTuple):
    """What a trace of one process holds; times in nanoseconds since its first event."""

    source: str
    rank: int | None
    workers: int | None
    backend: str | None
    device_name: str | None
    ops: list[HostOp]
    calls: list[LaunchCall]
    device: list[DeviceTask]
    notes: list[str]


def read_events(path: str, *, progress: ReadProgress | None = None) -> KinetoEvents:
    """Read a profiler trace.

    Args:
        path: the file, JSON, packed with gzip or not.
        progress: called with how far the reading is.

    Raises:
        FileError: the file cannot be read, is no profiler trace, or an event that is needed has a
            time that is no number, negative or absurd; the message names the event.

    Linear in the file; holds the operators, calls and device tasks in a compact form, but neither
    stacks nor Python functions nor flows.
    """
    reader = _Reader(path)
    with open_trace(path, progress=progress) as stream:
        for key, place, value in json_elements(stream, path, ("traceEvents",)):
            if place is not None:
                reader.event(place, value)
            else:
                reader.member(key, value)
    return reader.finish()


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._origin_us: float | None = None
        self._members: dict[str, Any] = {}
        self._seen = 0
        self._skipped: Counter[str] = Counter()
        self._ops: list[HostOp] = []
        self._calls: list[LaunchCall] = []
        self._device: list[DeviceTask] = []

    def member(self, key: str, value: Any) -> None:
        """Keep a member of the top-level object."""
        if key == "traceEvents":
            raise FileError(
                f"{self._source}: expected an array of events in 'traceEvents', found "
                f"{type(value).__name__}; is this a profiler trace?"
            )
        if key in ("schemaVersion", "distributedInfo", "deviceProperties"):
            self._members[key] = value
        else:
            self._members[key] = None

    def event(self, place: int, event: Any) -> None:
        """Store one event if its kind is needed."""
        self._seen += 1
        if not isinstance(event, dict):
            raise FileError(
                f"{self._source}: traceEvents[{place}]: expected an object, found "
                f"{type(event).__name__}; is this a profiler trace?"
            )
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        category = category.lower()
        if category in HOST_OPS:
            self._host(place, event, annotation=False)
        elif category in ANNOTATIONS:
            self._host(place, event, annotation=True)
        elif category in CALLS:
            self._call(place, event)
        elif category in DEVICE_KINDS:
            self._task(place, event, DEVICE_KINDS[category])
        else:
            self._skipped[category] += 1

    def finish(self) -> KinetoEvents:
        """Return what was read, after checking that it is a profiler trace."""
        if not self._seen and self._members and "" not in self._members:
            raise FileError(
                f"{self._source}: no events in it (no 'traceEvents'); found members "
                f"{', '.join(map(quoted, list(self._members)[:8]))}; is this a profiler trace?"
            )
        if not (self._ops or self._calls or self._device):
            found = (
                ", ".join(f"{quoted(name)}" for name, _ in self._skipped.most_common(6)) or "none"
            )
            raise FileError(
                f"{self._source}: none of its {self._seen} events is an operator, a runtime call "
                f"or a kernel of the PyTorch profiler (categories with spans: {found}); record the "
                "trace with torch.profiler and activities CPU (and CUDA)"
            )
        notes: list[str] = []
        version = self._members.get("schemaVersion", 1)
        if version != 1:
            notes.append(f"schemaVersion {quoted(version)} is not known here; read as version 1")
        rank, workers, backend = self._distributed(notes)
        return KinetoEvents(
            source=self._source,
            rank=rank,
            workers=workers,
            backend=backend,
            device_name=self._device_name(),
            ops=self._ops,
            calls=self._calls,
            device=self._device,
            notes=notes,
        )

    def _distributed(self, notes: list[str]) -> tuple[int | None, int | None, str | None]:
        info = self._members.get("distributedInfo")
        if info is None:
            notes.append("no distributedInfo: the trace does not say its rank and worker count")
            return None, None, None
        if not isinstance(info, dict):
            raise FileError(
                f"{self._source}: expected an object in 'distributedInfo', found "
                f"{type(info).__name__}; correct it or take it out"
            )
        workers = self._count(info, "world_size", 1, LARGEST_WORKERS)
        rank = self._count(info, "rank", 0, (workers or LARGEST_WORKERS) - 1)
        for name, value in (("rank", rank), ("world_size", workers)):
            if value is None:
                notes.append(f"distributedInfo does not hold {quoted(name)}")
        backend = info.get("backend")
        return rank, workers, backend if isinstance(backend, str) else None

    def _count(self, info: dict[str, Any], key: str, least: int, most: int) -> int | None:
        value = info.get(key)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise FileError(
                f"{self._source}: distributedInfo: {key} must be a whole number from {least} to "
                f"{most}, found {quoted(value)}"
            )
        return value

    def _device_name(self) -> str | None:
        devices = self._members.get("deviceProperties")
        if isinstance(devices, list) and devices and isinstance(devices[0], dict):
            name = devices[0].get("name")
            return name if isinstance(name, str) else None
        return None

    def _span(self, place: int, event: dict[str, Any]) -> tuple[str, str, int, int]:
        """Return the name, the thread or stream, the start and the stop of an event."""
        name = event.get("name")
        if not isinstance(name, str):
            raise FileError(
                f"{self._source}: traceEvents[{place}]: expected a text in 'name', found "
                f"{quoted(name)}"
            )
        where = f"traceEvents[{place}] {name[:80]!r}"
        start_us = self._time(where, event, "ts")
        duration_us = self._time(where, event, "dur")
        if duration_us < 0:
            raise FileError(
                f"{self._source}: {where}: dur is negative ({duration_us} us): the event ends "
                "before it starts; record the trace again, or take the event out"
            )
        if self._origin_us is None:
            self._origin_us = start_us
        start = (start_us - self._origin_us) * 1000
        if abs(start) > LONGEST_NS or duration_us * 1000 > LONGEST_NS:
            raise FileError(
                f"{self._source}: {where}: ts {start_us} us, dur {duration_us} us is further than "
                f"{LONGEST_NS / 1e9:.0f} s from the first event; times are in microseconds"
            )
        return (
            sys.intern(name),
            self._lane(where, event),
            round(start),
            round(start + duration_us * 1000),
        )

    def _time(self, where: str, event: dict[str, Any], key: str) -> float | int:
        value = event.get(key)
        if type(value) is int or (type(value) is float and math.isfinite(value)):
            return value if abs(value) < 1e30 else 1e30
        raise FileError(
            f"{self._source}: {where}: expected a number of microseconds in {quoted(key)}, found "
            f"{quoted(value)}"
        )

    def _lane(self, where: str, event: dict[str, Any]) -> str:
        lane = event.get("tid")
        if type(lane) is int or isinstance(lane, str):
            return sys.intern(str(lane))
        raise FileError(
            f"{self._source}: {where}: expected a number or a text in 'tid', found {quoted(lane)}"
        )

    def _arguments(self, event: dict[str, Any]) -> dict[str, Any]:
        arguments = event.get("args")
        return arguments if isinstance(arguments, dict) else {}

    def _host(self, place: int, event: dict[str, Any], *, annotation: bool) -> None:
        name, thread, start, stop = self._span(place, event)
        arguments = self._arguments(event)
        shapes: tuple[tuple[int, ...], ...] = ()
        types: tuple[str, ...] = ()
        payload = None
        if any(part in name for part in SHAPED):
            shapes = _shapes(arguments.get("Input Dims"))
            types = _types(arguments.get("Input type"))
            payload = self._payload(place, name, arguments)
        self._ops.append(
            HostOp(
                thread=thread,
                start_ns=start,
                stop_ns=stop,
                name=name,
                annotation=annotation,
                sequence=_whole(arguments.get("Sequence number")),
                record_id=_whole(arguments.get("Record function id")),
                shapes=shapes,
                types=types,
                payload=payload,
            )
        )

    def _call(self, place: int, event: dict[str, Any]) -> None:
        name, thread, start, stop = self._span(place, event)
        correlation = _whole(self._arguments(event).get("correlation"))
        self._calls.append(
            LaunchCall(
                thread=thread, start_ns=start, stop_ns=stop, name=name, correlation=correlation
            )
        )

    def _task(
        self, place: int, event: dict[str, Any], kind: Literal["kernel", "copy", "set"]
    ) -> None:
        name, stream, start, stop = self._span(place, event)
        arguments = self._arguments(event)
        self._device.append(
            DeviceTask(
                stream=stream,
                start_ns=start,
                stop_ns=stop,
                name=name,
                kind=kind,
                correlation=_whole(arguments.get("correlation")),
                payload=self._payload(place, name, arguments),
            )
        )

    def _payload(
        self, place: int, name: str, arguments: dict[str, Any]
    ) -> CollectivePayload | None:
        if not all(key in arguments for key in COLLECTIVE_KEYS):
            return None
        collective, elements, dtype = (arguments[key] for key in COLLECTIVE_KEYS)
        if not (isinstance(collective, str) and isinstance(dtype, str)):
            return None
        if type(elements) is not int or not 0 <= elements <= 1 << 58:
            raise FileError(
                f"{self._source}: traceEvents[{place}] {name[:80]!r}: expected a number of "
                f"elements in 'In msg nelems', found {quoted(elements)}"
            )
        return CollectivePayload(
            collective=collective.lower().strip("_"),
            elements=elements,
            dtype=dtype,
            group_size=_whole(arguments.get("Group size"), least=1, most=LARGEST_WORKERS),
        )


def _whole(value: Any, *, least: int = -(1 << 63), most: int = 1 << 64) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def _shapes(value: Any, *, within: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of plain tensor inputs; an input that is a list of tensors gives theirs."""
    if not isinstance(value, list):
        return ()
    shapes: list[tuple[int, ...]] = []
    for item in value[:16]:
        if not isinstance(item, list):
            continue
        if item and all(isinstance(inner, list) for inner in item):
            if not within:
                shapes.extend(_shapes(item, within=True))
        elif all(type(size) is int and 0 <= size < 1 << 58 for size in item):
            shapes.append(tuple(item[:32]))
    return tuple(shapes)


def _types(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(item if isinstance(item, str) else "" for item in value[:16])
