"""The events of a PyTorch profiler trace (Kineto), validated and in one form for all schemas.

This file hides the differences between the releases of PyTorch from 2021 to 2026: the names of
categories ("Operator" or "cpu_op", "Kernel" or "kernel", "Runtime" or "cuda_runtime" and
"cuda_driver"), of arguments ("external id" or "External id"), thread ids as text or as numbers, and
microseconds that count from 1970 or from ``baseTimeNanoseconds``. ``ts`` and ``dur`` are
microseconds in every release; ``displayTimeUnit`` only says how a viewer prints them.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from typing import Any, Literal, NamedTuple

import msgspec

from syncline.errors import UserError, quoted
from syncline.files.traces.reading import ReadProgress, json_elements, open_trace
from syncline.plan.quantities import LARGEST_WORKERS, LONGEST_NS

ANNOTATION = "user_annotation"
HOST_OPS = frozenset({"cpu_op", "operator", ANNOTATION})
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
SHAPED = re.compile("AccumulateGrad|c10d::|nccl:|gloo:|mpi:|ucc:|record_param_comms")
"""Parts of the names of operators whose shapes are kept."""
MOST_EVENTS = 2_000_000
"""Most operators, calls and device tasks that are kept: more take minutes to analyse."""


class CollectivePayload(msgspec.Struct, frozen=True, gc=False):
    """The arguments that a collective was recorded with."""

    collective: str
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
    sequence: int | None  # number that a forward operator shares with its backward node
    record_id: int | None
    """Record function id, by which an execution trace names the same operation."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the inputs, for operators that match :data:`SHAPED`."""
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
    process: int | None
    ops: list[HostOp]
    calls: list[LaunchCall]
    device: list[DeviceTask]
    notes: list[str]


def read_events(path: str, *, progress: ReadProgress | None = None) -> KinetoEvents:
    """Read a profiler trace, JSON, packed with gzip or not. Linear in the file."""
    reader = _Reader()
    with open_trace(path, progress=progress) as stream:
        for key, place, value in json_elements(stream, ("traceEvents",)):
            if place is not None:
                reader.event(place, value)
            else:
                reader.member(key, value)
        return reader.finish(path)


class _Reader:
    def __init__(self) -> None:
        self._origin_us: float | None = None
        self._members: dict[str, Any] = {}
        self._process: int | None = None
        self._seen = 0
        self._skipped: Counter[str] = Counter()
        self._ops: list[HostOp] = []
        self._calls: list[LaunchCall] = []
        self._device: list[DeviceTask] = []

    def member(self, key: str, value: Any) -> None:
        if key == "traceEvents":
            raise UserError(
                "expected an array of events in 'traceEvents', found "
                f"{type(value).__name__}; is this a profiler trace?"
            )
        self._members[key] = value if key in ("schemaVersion", "distributedInfo") else None

    def event(self, place: int, event: Any) -> None:
        self._seen += 1
        if len(self._ops) + len(self._calls) + len(self._device) > MOST_EVENTS:
            raise UserError(
                f"holds more than {MOST_EVENTS} operators, calls and device tasks, the most that "
                "is read of a trace; record fewer steps"
            )
        where = f"traceEvents[{place}]"
        if not isinstance(event, dict):
            raise UserError(
                f"{where}: expected an object, found {type(event).__name__}; is this a profiler "
                "trace?"
            )
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        category = category.lower()
        if category in HOST_OPS:
            self._host(where, event, annotation=category == ANNOTATION)
        elif category in CALLS:
            span = self._span(where, event)
            self._calls.append(LaunchCall(*span, _whole(_arguments(event).get("correlation"))))
        elif category in DEVICE_KINDS:
            span, arguments = self._span(where, event), _arguments(event)
            correlation = _whole(arguments.get("correlation"))
            payload = _payload(where, span[-1], arguments)
            self._device.append(DeviceTask(*span, DEVICE_KINDS[category], correlation, payload))
        else:
            self._skipped[category] += 1

    def finish(self, source: str) -> KinetoEvents:
        """Return what was read, after checking that it is a profiler trace."""
        if not self._seen and self._members and "" not in self._members:
            raise UserError(
                "no events in it (no 'traceEvents'); found members "
                f"{', '.join(map(quoted, list(self._members)[:8]))}; is this a profiler trace?"
            )
        if not (self._ops or self._calls or self._device):
            found = ", ".join(quoted(name) for name, _ in self._skipped.most_common(6)) or "none"
            raise UserError(
                f"none of its {self._seen} events is an operator, a runtime call or a kernel of "
                f"the PyTorch profiler (categories with spans: {found}); record the trace with "
                "torch.profiler and activities CPU (and CUDA)"
            )
        notes: list[str] = []
        version = self._members.get("schemaVersion", 1)
        if version != 1:
            notes.append(f"schemaVersion {quoted(version)} is not known here; read as version 1")
        rank, workers = self._distributed(notes)
        return KinetoEvents(
            source, rank, workers, self._process, self._ops, self._calls, self._device, notes
        )

    def _distributed(self, notes: list[str]) -> tuple[int | None, int | None]:
        info = self._members.get("distributedInfo")
        if info is None:
            notes.append("no distributedInfo: the trace does not say its rank and worker count")
            return None, None
        if not isinstance(info, dict):
            raise UserError(
                "expected an object in 'distributedInfo', found "
                f"{type(info).__name__}; correct it or take it out"
            )
        workers = _count(info, "world_size", 1, LARGEST_WORKERS)
        rank = _count(info, "rank", 0, (workers or LARGEST_WORKERS) - 1)
        for name, value in (("rank", rank), ("world_size", workers)):
            if value is None:
                notes.append(f"distributedInfo does not hold {quoted(name)}")
        return rank, workers

    def _span(self, where: str, event: dict[str, Any]) -> tuple[str, int, int, str]:
        """Return the thread or stream, the start, the stop and the name of an event."""
        name = event.get("name")
        if not isinstance(name, str):
            raise UserError(f"{where}: expected a text in 'name', found {quoted(name)}")
        where = f"{where} {name[:80]!r}"
        start_us, duration_us = _time_us(where, event, "ts"), _time_us(where, event, "dur")
        if duration_us < 0:
            raise UserError(
                f"{where}: dur is negative ({duration_us} us): the event ends before it starts; "
                "record the trace again, or take the event out"
            )
        if self._origin_us is None:
            self._origin_us = start_us
        start = (start_us - self._origin_us) * 1000
        if abs(start) > LONGEST_NS or duration_us * 1000 > LONGEST_NS:
            raise UserError(
                f"{where}: ts {start_us} us, dur {duration_us} us is further than "
                f"{LONGEST_NS / 1e9:.0f} s from the first event; times are in microseconds"
            )
        lane = event.get("tid")
        if type(lane) is not int and not isinstance(lane, str):
            raise UserError(f"{where}: expected a number or a text in 'tid', found {quoted(lane)}")
        lane = sys.intern(str(lane))
        return lane, round(start), round(start + duration_us * 1000), sys.intern(name)

    def _host(self, where: str, event: dict[str, Any], *, annotation: bool) -> None:
        span = self._span(where, event)
        if self._process is None:
            self._process = _whole(event.get("pid"))
        arguments = _arguments(event)
        shapes: tuple[tuple[int, ...], ...] = ()
        types: tuple[str, ...] = ()
        payload = None
        if SHAPED.search(span[-1]):
            shapes = _shapes(arguments.get("Input Dims"))
            if isinstance(named := arguments.get("Input type"), list):
                types = tuple(item if isinstance(item, str) else "" for item in named[:16])
            payload = _payload(where, span[-1], arguments)
        sequence = _whole(arguments.get("Sequence number"))
        record_id = _whole(arguments.get("Record function id"))
        self._ops.append(HostOp(*span, annotation, sequence, record_id, shapes, types, payload))


def _count(info: dict[str, Any], key: str, least: int, most: int) -> int | None:
    value = info.get(key)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise UserError(
            f"distributedInfo: {key} must be a whole number from {least} to {most}, found "
            f"{quoted(value)}"
        )
    return value


def _time_us(where: str, event: dict[str, Any], key: str) -> float | int:
    value = event.get(key)
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return value if abs(value) < 1e30 else 1e30
    raise UserError(
        f"{where}: expected a number of microseconds in {quoted(key)}, found {quoted(value)}"
    )


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _payload(where: str, name: str, arguments: dict[str, Any]) -> CollectivePayload | None:
    if not all(key in arguments for key in COLLECTIVE_KEYS):
        return None
    collective, elements, dtype = (arguments[key] for key in COLLECTIVE_KEYS)
    if not (isinstance(collective, str) and isinstance(dtype, str)):
        return None
    if type(elements) is not int or not 0 <= elements <= 1 << 58:
        raise UserError(
            f"{where} {name[:80]!r}: expected a number of elements in 'In msg nelems', found "
            f"{quoted(elements)}"
        )
    group_size = _whole(arguments.get("Group size"), least=1, most=LARGEST_WORKERS)
    return CollectivePayload(collective, elements, dtype, group_size)


def _whole(value: Any, *, least: int = -(1 << 63), most: int = 1 << 64) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def _shapes(value: Any, *, within: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the inputs: of tensors, and of the tensors in lists of tensors."""
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
