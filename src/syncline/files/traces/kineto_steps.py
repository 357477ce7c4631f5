"""The steps of a profiler trace, with their phases and their gradient messages.

A step is what the annotation ``ProfilerStep#N`` spans. Within it the host's threads take turns: the
main thread reads the batch and launches the forward pass and the update; autograd's thread launches
the backward pass while the main thread waits. So one lane holds the host's work, ordered by time.
``kineto_cut`` turns a step into :class:`StepTasks`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from syncline.files.traces.kineto_events import DeviceTask, HostOp, KinetoEvents, LaunchCall
from syncline.plan.profile import Phase, Resource
from syncline.plan.quantities import LARGEST_BYTES, NS_PER_S, bytes_per_element
from syncline.plan.timeline import Interval, merged

STEP = re.compile(r"ProfilerStep#(\d+)")
LOADER = re.compile(r"enumerate\(DataLoader\)#.*__next__")
WAITING_LOADER = re.compile(r"enumerate\(DataLoader\)#_MultiProcessing")
OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
Event = TypeVar("Event", HostOp, LaunchCall)
FINALIZE = "copy_bucket_to_grad"
BACKWARD = re.compile(r"autograd::engine::evaluate_function: |.*Backward\d*$")
EVALUATE = "autograd::engine::evaluate_function: "
ENCLOSING = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader|Optimizer\.|DistributedDataParallel\.|## |nn\.Module: "
)
"""Annotations around operators; early releases of torch list them among the operators."""


def is_accumulation(op: HostOp) -> bool:
    """Return whether the operator is the accumulation of a gradient, which makes it ready."""
    return op.name.endswith("AccumulateGrad") and not op.name.startswith(EVALUATE)


class Outline(NamedTuple):
    """A step before it is taken apart; times in nanoseconds on the trace's clock."""

    number: int
    start_ns: int
    stop_ns: int
    threads: frozenset[str]  # the main thread and those that ran backward operators
    ops: Sequence[HostOp]  # operators and annotations of those threads, by start
    others: Sequence[HostOp]  # those of other threads, by start
    calls: Sequence[LaunchCall]  # calls of all threads, by start
    outermost: Sequence[HostOp]  # operators that no other operator encloses, by start
    loading: Sequence[HostOp]
    backward_ns: float  # where the backward pass starts; infinite where there is none
    finalize_ns: float
    """Where unpacking exchanged gradients starts; the update's start where nothing is unpacked."""
    update_ns: float  # where the work after the backward pass starts
    optimizer_ns: float
    """Where the optimizer's step starts; the end of the step where there is none."""
    passes: int  # backward passes that accumulate gradients; only the last one makes them final

    @property
    def holds(self) -> Holds:
        """What was recorded of the step."""
        if math.isfinite(self.backward_ns):
            return "backward"
        return "forward" if self.outermost else "device"

    def phase(self, at_ns: int) -> Phase:
        """Return the phase that the host is in."""
        if at_ns < self.backward_ns:
            return "forward"
        if at_ns < self.finalize_ns:
            return "backward"
        return "finalize" if at_ns < self.update_ns else "update"

    def launches(self) -> dict[int, LaunchCall]:
        """Return each correlation id's first call, which launched its tasks; by start."""
        first: dict[int, LaunchCall] = {}
        for call in self.calls:
            if call.correlation is not None:
                first.setdefault(call.correlation, call)
        return first

    def all_ops(self) -> list[HostOp]:
        """Return the operators of all threads, by start."""
        return sorted((*self.ops, *self.others), key=lambda op: op.start_ns)

    def operator(self, at_ns: int) -> HostOp | None:
        """Return the outermost operator that is running, or the one that ran last."""
        return latest(self.outermost, at_ns)


def latest(ops: Sequence[HostOp], at_ns: int) -> HostOp | None:
    """Return the last of some operators, sorted by start, that began by ``at_ns``."""
    index = bisect.bisect_right(ops, at_ns, key=lambda op: op.start_ns) - 1
    return ops[index] if index >= 0 else None


def outline_steps(events: KinetoEvents, notes: list[str]) -> list[Outline]:
    """Return the steps of a trace in order, with notes on what was assumed.

    Without ``ProfilerStep`` annotations the steps are taken to end with the optimizer's; without
    those, the whole trace is one step. O(n log n) in the events.
    """
    ops = sorted(events.ops, key=lambda op: (op.start_ns, -op.stop_ns))
    calls = sorted(events.calls, key=lambda call: call.start_ns)
    outlines = [_outline(*window, ops, calls) for window in _windows(ops, calls, notes)]
    if any(WAITING_LOADER.match(op.name) for step in outlines for op in step.loading):
        notes.append(
            "the batches were read by loader processes: the reading time is how long the training "
            "process waited for them, not how long reading took"
        )
    if any(step.passes > 1 for step in outlines):
        notes.append(
            "gradients are accumulated over several backward passes: all but the last one count as "
            "part of the forward pass"
        )
    return outlines


def _begun(events: Sequence[Event], start: int, stop: int) -> Sequence[Event]:
    """Return the events, of some sorted by start, that began in ``[start, stop)``."""
    first, end = (bisect.bisect_left(events, at, key=lambda e: e.start_ns) for at in (start, stop))
    return events[first:end]


def _windows(
    ops: Sequence[HostOp], calls: Sequence[LaunchCall], notes: list[str]
) -> list[tuple[int, str, int, int]]:
    """Return (number, main thread, start, stop) of each step."""
    kept: list[tuple[int, str, int, int]] = []
    for op in ops:
        if match := STEP.fullmatch(op.name):
            number = int(match[1][-18:])
            if kept and op.start_ns < kept[-1][3]:
                notes.append(f"ProfilerStep#{number} begins inside the step before; left out")
            else:
                kept.append((number, op.thread, op.start_ns, op.stop_ns))
    if kept:
        return kept
    ends = [op for op in ops if OPTIMIZER_STEP.match(op.name)]
    if len(ends) >= 2:
        notes.append(
            "no ProfilerStep annotations: a step is taken from the end of one Optimizer.step to "
            "the end of the next (call profiler.step() after each iteration)"
        )
        return [
            (i, b.thread, a.stop_ns, b.stop_ns)
            for i, (a, b) in enumerate(itertools.pairwise(ends))
            if a.stop_ns < b.stop_ns
        ]
    notes.append(
        "no ProfilerStep annotations: the whole trace is taken for one step (call profiler.step() "
        "after each iteration)"
    )
    everything: list[HostOp | LaunchCall] = [*ops, *calls]
    if not everything:
        return []
    main = ends[0].thread if ends else Counter(e.thread for e in everything).most_common(1)[0][0]
    return [(0, main, min(e.start_ns for e in everything), max(e.stop_ns for e in everything))]


def _outline(
    number: int,
    main: str,
    start: int,
    stop: int,
    all_ops: Sequence[HostOp],
    all_calls: Sequence[LaunchCall],
) -> Outline:
    ops = _begun(all_ops, start, stop)
    backward = [op for op in ops if _is_backward(op)]
    threads = frozenset({main, *(op.thread for op in backward)})
    own = [op for op in ops if op.thread in threads]
    outermost = _outermost(own)
    backward, passes = _last_pass(outermost, backward)
    first: float = min((op.start_ns for op in backward), default=math.inf)
    last: float = max((op.stop_ns for op in backward), default=math.inf)
    steps = [op.start_ns for op in own if OPTIMIZER_STEP.match(op.name) and op.start_ns > first]
    unpacking = [op.start_ns for op in own if FINALIZE in op.name and op.start_ns > first]
    update = min(steps, default=last) if unpacking else min([last, *steps])
    finalize_ns = min(unpacking, default=update)
    return Outline(
        number=number,
        start_ns=start,
        stop_ns=stop,
        threads=threads,
        ops=own,
        others=[op for op in ops if op.thread not in threads],
        calls=_begun(all_calls, start, stop),
        outermost=outermost,
        loading=[op for op in own if LOADER.match(op.name) and op.thread == main],
        backward_ns=first,
        finalize_ns=finalize_ns,
        update_ns=max(update, finalize_ns),
        optimizer_ns=min(steps, default=stop),
        passes=passes,
    )


def _is_backward(op: HostOp) -> bool:
    return BACKWARD.match(op.name) is not None or is_accumulation(op)


def _last_pass(outermost: Sequence[HostOp], backward: Sequence[HostOp]) -> tuple[list[HostOp], int]:
    """Return the operators of the last backward pass, and the number of passes.

    A forward operator whose backward node comes later begins a new pass.
    """
    if not backward:
        return [], 0
    nodes = {op.sequence: op.start_ns for op in backward if op.sequence is not None}
    left = list(backward)
    passes = 1
    for op in outermost:
        if op.sequence is None or op.start_ns <= left[0].start_ns or _is_backward(op):
            continue
        if nodes.get(op.sequence, op.start_ns) > op.start_ns:
            after = [b for b in left if b.start_ns > op.start_ns]
            if after and len(after) < len(left):
                left = after
                passes += 1
    return left, passes


def _outermost(ops: Sequence[HostOp]) -> list[HostOp]:
    ends: dict[str, int] = {}
    found = []
    for op in ops:
        if op.annotation or ENCLOSING.match(op.name):
            continue
        if op.start_ns >= ends.get(op.thread, -(1 << 62)):
            found.append(op)
            ends[op.thread] = op.stop_ns
    return found


SUMS = re.compile(r"all_?reduce|reduce_?scatter", re.IGNORECASE)
"""Names of the collectives that sum over workers."""
COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|oneccl", re.IGNORECASE)
"""Kernels that exchange data with other workers."""
GENERIC = re.compile(r"Kernel_Generic", re.IGNORECASE)
"""ROCm's kernel for all collectives; which one it runs is known from what launched it."""
LAUNCHED_BY = re.compile(r"record_param_comms|(c10d::|nccl:)_?(all_?reduce|reduce_?scatter)")
ON_HOST = re.compile(r"(gloo|mpi|ucc):(all_?reduce|reduce_?scatter)")
LAUNCH_ON_HOST = re.compile(r"c10d::_?(all_?reduce|reduce_?scatter)")

LARGEST_ELEMENTS = LARGEST_BYTES >> 4
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "c10::half": "float16",
    "c10::bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "float16": "float16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}


class MeasuredCollective(NamedTuple):
    """One exchange of gradients."""

    launch_ns: int
    start_ns: int
    stop_ns: int
    """Both on the device, or on the exchanging host thread; including waits for other workers."""
    elements: int | None
    dtype: str | None
    group_size: int | None
    record_id: int | None
    kernel: DeviceTask | None = None


def element_dtype(name: str | None) -> str | None:
    """Return the gradient dtype that a trace calls ``name``; None if gradients cannot have it."""
    return DTYPES.get(name.lower()) if name else None


def elements_of(shapes: Sequence[Sequence[int]]) -> int | None:
    """Return how many elements tensors have together; None if impossibly many."""
    elements = sum(math.prod(shape) for shape in shapes)
    return elements if elements <= LARGEST_ELEMENTS else None


def find_collectives(
    step: Outline, launched: Mapping[int, Sequence[DeviceTask]]
) -> list[MeasuredCollective]:
    """Return the messages of a step in the order in which they were launched.

    Only messages launched between the start of the backward pass and the optimizer's step count.
    """
    if not math.isfinite(step.backward_ns):
        return []
    found: list[MeasuredCollective] = []
    around = [op for op in step.all_ops() if LAUNCHED_BY.match(op.name)]
    for correlation, call in step.launches().items():
        if step.backward_ns <= call.start_ns < step.optimizer_ns:
            ran = (t for t in launched.get(correlation, ()) if COLLECTIVE_KERNEL.search(t.name))
            found.extend(filter(None, (_of_kernel(call, task, around) for task in ran)))
    if not found and not launched:
        found = _on_host(step)
    return sorted(found, key=lambda c: c.launch_ns)


def _of_kernel(
    call: LaunchCall, task: DeviceTask, around: Sequence[HostOp]
) -> MeasuredCollective | None:
    """Return a message, or None if it does not sum gradients."""
    index = bisect.bisect_right(around, call.start_ns, key=lambda op: op.start_ns)
    enclosing = [
        op
        for op in reversed(around[max(index - 8, 0) : index])
        if op.thread == call.thread and op.stop_ns >= call.stop_ns
    ]
    name = task.name
    if GENERIC.search(name):
        payloads = [task.payload, *(op.payload for op in enclosing)]
        named = (payload.collective for payload in payloads if payload is not None)
        name = next(named, enclosing[0].name if enclosing else "")
    return _collective(call.stop_ns, task, enclosing) if SUMS.search(name) else None


def _collective(
    launch_ns: int, ran: DeviceTask | HostOp, launched_by: Sequence[HostOp]
) -> MeasuredCollective | None:
    """Return a message, or None if it does not hold gradients.

    ``ran`` is the kernel or host operator that exchanged it. Size and type are from its arguments
    or, if it has none, from the first of ``launched_by`` (innermost first) that has some.
    """
    elements = dtype = group = None
    recorded: Sequence[DeviceTask | HostOp] = (ran, *launched_by)
    payloads = [each.payload for each in recorded if each.payload is not None]
    shaped = (each for each in recorded if isinstance(each, HostOp) and each.shapes)
    if payloads:
        elements, dtype, group = payloads[0].elements, payloads[0].dtype, payloads[0].group_size
    elif (op := next(shaped, None)) is not None:
        elements = elements_of([shape for shape in op.shapes if shape])
        dtype = next(filter(None, op.types), None)
    if dtype and not element_dtype(dtype):
        return None
    return MeasuredCollective(
        launch_ns=launch_ns,
        start_ns=ran.start_ns,
        stop_ns=ran.stop_ns,
        elements=elements,
        dtype=element_dtype(dtype),
        group_size=group,
        record_id=launched_by[0].record_id if launched_by else None,
        kernel=ran if isinstance(ran, DeviceTask) else None,
    )


def _on_host(step: Outline) -> list[MeasuredCollective]:
    """Return messages exchanged by a host thread (Gloo): the n-th launch made the n-th exchange."""
    launches = [
        op
        for op in step.ops
        if LAUNCH_ON_HOST.match(op.name) and step.backward_ns <= op.start_ns < step.optimizer_ns
    ]
    spans = [
        op for op in step.all_ops() if ON_HOST.match(op.name) and op.start_ns >= step.backward_ns
    ]
    # The exchange may begin before the call that launches it returns.
    found = (
        _collective(min(launch.stop_ns, max(launch.start_ns, span.start_ns)), span, [launch])
        for launch, span in zip(launches, spans, strict=False)
    )
    return list(filter(None, found))


class TracedTask(NamedTuple):
    """A piece of work: the fields of an operation, and when it ran."""

    name: str
    phase: Phase
    resource: Resource
    duration_ns: int
    after: tuple[int, ...]
    start_ns: int
    stop_ns: int
    joint: bool = False
    """Whether it is never merged: it waits for the device, or a task waits for exactly this one."""
    held_by: int | None = None  # the task of another stream that it waited for in this step
    waited_ns: int = 0  # how much later it ended than the trace explains


class ReadyPoint(NamedTuple):
    """The point at which a gradient, or every gradient of a bucket, is ready."""

    elements: int | None
    dtype: str | None
    ready_after: int
    needed_by: int | None
    record_id: int | None  # record function id of the operator that made it ready
    name: str | None = None  # name of the parameter, if a file of sizes gives it

    @property
    def size_bytes(self) -> int | None:
        """Bytes of a message, where its elements and their type are known."""
        if self.elements is None or self.dtype is None:
            return None
        return self.elements * bytes_per_element(self.dtype)


def message_parts(
    sizes: Sequence[int | None], messages: Sequence[int | None], launched: Sequence[int]
) -> list[list[int | None]] | None:
    """Return the sizes of each message's gradients, in order; None if sizes conflict.

    A message holds gradients that became ready one after another. Of its gradients without a size,
    the last one gets the rest of the message; the others stay None.

    Args:
        sizes: elements of each gradient in ready order; None where they are not known.
        messages: elements of each message; None where they are not known.
        launched: how many gradients were ready when each message was launched.
    """
    parts: list[list[int | None]] = []
    first = 0
    for total, count in zip(messages, launched, strict=True):
        part: list[int | None] = []
        found = 0
        for index in range(first, len(sizes)):
            size = sizes[index] or 0
            by_count = total is None or None in part
            if index >= count if by_count else found >= (total or 0):
                break
            if by_count and total is not None and found + size > total:
                break
            part.append(sizes[index])
            found += size
        if not part:
            return None
        first += len(part)
        if total is not None and None in part and found < total:
            part[len(part) - 1 - part[::-1].index(None)] = total - found
        elif total is not None and found != total:
            return None
        parts.append(part)
    return parts if all(size is None for size in sizes[first:]) else None


Holds = Literal["device", "forward", "backward"]
"""What a step shows: only work of the device, operators of the host, or also a backward pass."""


class StepTasks(NamedTuple):
    """One step of one rank as tasks."""

    source: str
    number: int
    duration_ns: int
    start_ns: int
    tasks: list[TracedTask]
    parameters: list[ReadyPoint]
    """One for each gradient tensor, in the order in which they became final."""
    messages: list[ReadyPoint]
    """One for each exchanged bucket, in the order in which they were launched."""
    collectives: list[MeasuredCollective]  # when each message was in flight
    holds: Holds
    notes: list[str]
    ended_ns: int  # when its work was done: by the host, or later by the device
    begun_ns: int  # when the device had finished the work before it, or the host began it
    rank: int = 0
    shift_ns: int = 0  # how much later this step began than on the rank where it began first

    @property
    def measured_s(self) -> float:
        """The step's period: the host's, or the device's if the host never waits and runs ahead."""
        waits = any(task.resource == "host" and task.after for task in self.tasks)
        ahead = not waits and self.ended_ns > self.start_ns + self.duration_ns
        return (self.ended_ns - self.begun_ns if ahead else self.duration_ns) / NS_PER_S

    def waits_ns(self) -> list[Interval]:
        """Return the disjoint intervals of waiting that the trace does not explain."""
        begun = ((task.stop_ns - task.duration_ns, task.waited_ns) for task in self.tasks)
        return merged((at_ns - waited_ns, at_ns) for at_ns, waited_ns in begun)
