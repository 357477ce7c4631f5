"""One step of a profiler trace taken apart into tasks, with waiting taken out.

The page "Algorithms and costs" says how ("Profiler traces"). If nothing was recorded on a device,
the operators of the host are the computation. To detect waits that a trace does not explain, a step
is simulated while it is taken apart, just as its profile will be.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from syncline.files.traces.kineto_events import DeviceTask, HostOp, KinetoEvents, LaunchCall
from syncline.files.traces.kineto_steps import (
    COLLECTIVE_KERNEL,
    EVALUATE,
    MeasuredCollective,
    Outline,
    ReadyPoint,
    StepTasks,
    TracedTask,
    elements_of,
    find_collectives,
    is_accumulation,
    latest,
)
from syncline.plan.profile import PEERS, STREAMS, WAITS, Resource
from syncline.plan.timeline import difference, merged

HOST_COPY = re.compile(r"HtoD|DtoH|Host -> Device|Device -> Host", re.IGNORECASE)
EXCHANGED_ON_HOST = re.compile(r"(gloo|mpi|ucc):")
LATE_NS = 10_000
"""A task that begins later than this after its launch, and after the task before it on its stream,
waited for another stream: a launch takes about 5 us to reach an idle device."""
TO_DEVICE = re.compile(r"HtoD|Host -> Device", re.IGNORECASE)
SYNCHRONISING = re.compile(
    r"(cuda|hip|xpu)(Stream|Device|Event|Ctx)Synchronize$|cu(Stream|Ctx|Event)Synchronize$"
)


class CutMark(NamedTuple):
    """A place at which the host's time is cut."""

    at_ns: int
    order: int  # of marks at the same time, the one with the lowest order comes first
    cause: LaunchCall | HostOp | MeasuredCollective | None
    """What the host did until then; None if only the phase or the operator changes."""
    launched: tuple[DeviceTask, ...] = ()  # what the call put on the device


def take_apart(events: KinetoEvents, outlines: Sequence[Outline]) -> list[StepTasks]:
    """Return the tasks of each step. O(n log n) in the events."""
    launched: dict[int, list[DeviceTask]] = {}
    started = attrgetter("start_ns")
    for task in sorted(events.device, key=started):
        if task.correlation is not None:
            launched.setdefault(task.correlation, []).append(task)
    lanes = _stream_lanes(events.device)
    begun_ns = {c.correlation: c.start_ns for c in sorted(events.calls, key=started, reverse=True)}
    steps = []
    for outline in outlines:
        # Tasks that no recorded call launched were launched before the trace began.
        earlier = [
            task
            for task in events.device
            if task.stop_ns > outline.start_ns
            and begun_ns.get(task.correlation, task.start_ns) < outline.start_ns
        ]
        collectives = find_collectives(outline, launched)
        if collectives:
            # The device unpacks when all messages are launched, the host when all have arrived.
            exchanged = max(
                c.launch_ns if launched else min(c.stop_ns, outline.stop_ns) for c in collectives
            )
            finalize = max(outline.finalize_ns, exchanged)
            outline = outline._replace(
                finalize_ns=finalize, update_ns=max(outline.update_ns, finalize)
            )
        steps.append(_Cutter(outline, launched, lanes, collectives, earlier).cut(events.source))
    return steps


def _stream_lanes(tasks: Sequence[DeviceTask]) -> dict[str, Resource]:
    """Return each stream's lane; streams with the fewest kernels share the last lane."""
    kernels = Counter({task.stream: 0 for task in tasks})
    for task in tasks:
        kernels[task.stream] += task.kind == "kernel" and not COLLECTIVE_KERNEL.search(task.name)
    ordered = sorted(kernels, key=lambda stream: (-kernels[stream], stream))
    return {stream: STREAMS[min(i, len(STREAMS) - 1)] for i, stream in enumerate(ordered)}


class _Cutter:
    """Goes through the host's time of one step and collects its tasks."""

    def __init__(
        self,
        outline: Outline,
        launched: Mapping[int, list[DeviceTask]],
        lanes: Mapping[str, Resource],
        collectives: list[MeasuredCollective],
        earlier: Sequence[DeviceTask],
    ) -> None:
        self._step = outline
        self._launched = launched
        self._on_device = bool(launched)
        self._work: Resource = "host" if self._on_device else "device"
        self._cursor_ns = outline.start_ns
        self._tasks: list[TracedTask] = []
        self._parameters: list[ReadyPoint] = []
        self._messages: list[ReadyPoint] = []
        self._notes: list[str] = []
        self._collectives = collectives
        self._exchanged = {id(c.kernel) for c in collectives if c.kernel is not None}
        self._launches = outline.launches()
        own = [task for number in self._launches for task in launched.get(number, ())]
        self._lane_of: dict[int, Resource] = {id(t): self._lane(t, lanes) for t in own}
        self._share: dict[int, int] = {}
        """How long each task kept its lane busy; overlapping streams of a lane count once."""
        busy_until: dict[Resource, int] = {}
        for task in sorted(own, key=lambda t: (t.start_ns, t.stop_ns)):
            if id(task) not in self._exchanged:
                lane = self._lane_of[id(task)]
                begun = max(task.start_ns, busy_until.get(lane, task.start_ns))
                self._share[id(task)] = max(task.stop_ns - begun, 0)
                busy_until[lane] = max(task.stop_ns, begun)
        self._arrived_ns = max((c.stop_ns for c in collectives), default=outline.start_ns)
        # When each lane is free in a simulation of the step; when the work before the step ended.
        self._simulated_ns, self._begun_ns = self._before(own, earlier, lanes)
        self._batch_ns = outline.start_ns
        self._ends_ns: list[int] = []  # when each task ends in the simulation
        self._free_ns: dict[Resource, int] = {}
        """When the work launched so far on each lane ends in the trace."""
        self._done = sorted(own, key=attrgetter("stop_ns"))
        self._index_of: dict[int, int] = {}
        self._last_host = -1  # index of a task; -1: none yet
        self._last_device = -1
        self._waited: tuple[int, ...] = ()
        """Tasks that the host's next work waits for, besides the work before it."""
        self._queued_until_ns = outline.start_ns
        self._first_kernel = False
        self._forward: list[tuple[int, int]] = []  # (end or launch, task)
        # When messages were in flight and no operator ran.
        self._gaps = difference(
            merged((c.start_ns, c.stop_ns) for c in collectives),
            merged((op.start_ns, op.stop_ns) for op in outline.outermost),
        )
        numbered = [op for op in outline.ops if op.sequence is not None]
        in_backward = [op for op in numbered if op.start_ns >= outline.backward_ns]
        self._producers = [op for op in in_backward if not op.name.endswith("AccumulateGrad")]
        in_forward = [op for op in numbered if op.start_ns < outline.backward_ns]
        # The last forward operator with a sequence number made the backward node of that number.
        self._sources = {op.sequence: op.start_ns for op in in_forward}

    def cut(self, source: str) -> StepTasks:
        for at_ns, _, cause, launched in self._marks():
            if cause is None:
                self._work_until(at_ns)
            elif isinstance(cause, MeasuredCollective):
                self._message(at_ns, cause)
            elif isinstance(cause, LaunchCall):
                self._call(cause, launched)
            elif is_accumulation(cause):
                self._parameter(at_ns, cause)
            elif EXCHANGED_ON_HOST.match(cause.name):
                self._wait(cause)
            else:
                self._load(cause)
        self._work_until(self._step.stop_ns)
        names = [t.name for t in self._tasks if t.resource == PEERS and t.stop_ns > t.start_ns]
        if names:
            self._notes.append(
                f"{len(names)} communication operations of a step are not gradient messages "
                f"({', '.join(sorted(set(names))[:4])}): predictions keep their time as measured, "
                "with the waiting for other workers, for any network and device"
            )
        return StepTasks(
            source=source,
            number=self._step.number,
            duration_ns=self._step.stop_ns - self._step.start_ns,
            start_ns=self._step.start_ns,
            tasks=self._tasks,
            parameters=self._parameters,
            messages=self._messages,
            collectives=self._collectives,
            holds=self._step.holds,
            notes=self._notes,
            ended_ns=max(self._step.stop_ns, self._done[-1].stop_ns if self._done else 0),
            begun_ns=self._begun_ns,
        )

    def _before(
        self,
        own: Sequence[DeviceTask],
        earlier: Sequence[DeviceTask],
        lanes: Mapping[str, Resource],
    ) -> tuple[dict[Resource, int], int]:
        """Return until when ``earlier`` tasks keep each lane busy, and the whole device.

        A lane is busy with the previous step as long as in the trace, but no longer than with this
        step's own work after its end: in the steady state every step leaves equally much.
        """
        start_ns, length_ns = self._step.start_ns, self._step.stop_ns - self._step.start_ns
        busy: dict[Resource, int] = {}
        for task in earlier:
            lane = self._lane(task, lanes)
            busy[lane] = max(busy.get(lane, 0), task.stop_ns)
        free: dict[Resource, int] = {}
        for lane in set(self._lane_of.values()):
            tasks = [t for t in own if self._lane_of[id(t)] == lane]
            until_ns = busy.get(lane, min(t.start_ns for t in tasks))
            free[lane] = min(until_ns, max(t.stop_ns for t in tasks) - length_ns)
        first = min((task.start_ns for task in own), default=start_ns)
        last = max((task.stop_ns for task in own), default=start_ns + length_ns)
        # Without a previous step, the step takes at least the host's time.
        return free, max(busy.values(), default=min(first, last - length_ns))

    @staticmethod
    def _lane(task: DeviceTask, lanes: Mapping[str, Resource]) -> Resource:
        return PEERS if COLLECTIVE_KERNEL.search(task.name) else lanes[task.stream]

    # Where the host's time is cut

    def _marks(self) -> list[CutMark]:
        """Return the cuts in order; without a device, there is also one where an operator ends."""
        step = self._step
        marks = [
            CutMark(int(at), 3, None)
            for at in (step.backward_ns, step.finalize_ns, step.update_ns)
            if step.start_ns < at < step.stop_ns
        ]
        marks += [CutMark(c.launch_ns, 2, c) for c in self._collectives]
        marks += [CutMark(op.stop_ns, 1, op) for op in step.loading if op.stop_ns <= step.stop_ns]
        accumulations = self._accumulations()
        marks += [*accumulations, *self._calls()]
        if not self._on_device:
            cut = {mark.at_ns for mark in accumulations}
            ends = (op.stop_ns for op in step.outermost)
            marks += [CutMark(at, 0, None) for at in ends if at <= step.stop_ns and at not in cut]
            sent = {(c.start_ns, c.stop_ns) for c in self._collectives}
            marks += [
                CutMark(op.stop_ns, 1, op)
                for op in step.others
                if EXCHANGED_ON_HOST.match(op.name)
                and (op.start_ns, op.stop_ns) not in sent
                and op.stop_ns <= step.stop_ns
            ]
        return sorted(_out_of_loading(step, marks), key=lambda mark: (mark.at_ns, mark.order))

    def _calls(self) -> list[CutMark]:
        marks = []
        foreign = 0
        for call in self._step.calls:
            tasks: tuple[DeviceTask, ...] = ()
            if call.correlation is not None and self._launches[call.correlation] is call:
                own = self._launched.get(call.correlation, ())
                tasks = tuple(task for task in own if id(task) not in self._exchanged)
            trains = call.thread in self._step.threads
            if tasks or (trains and SYNCHRONISING.match(call.name)):
                foreign += not trains
                marks.append(CutMark(min(call.stop_ns, self._step.stop_ns), 1, call, tasks))
        if foreign:
            self._notes.append(
                "some device tasks were launched by threads that neither call the model nor run "
                "its backward pass; they are taken as launched by the training thread"
            )
        return marks

    def _accumulations(self) -> list[CutMark]:
        """Return when each gradient is ready: when autograd's work around its accumulation ends."""
        step = self._step
        around = [op for op in step.ops if op.name.startswith(EVALUATE)]
        launches = [c.launch_ns for c in self._collectives]
        marks = []
        for op in step.ops:
            if not is_accumulation(op) or op.start_ns < step.backward_ns:
                continue
            outer = latest(around, op.start_ns) or op
            stop = outer.stop_ns if outer.thread == op.thread else op.stop_ns
            stop = min(max(stop, op.stop_ns), step.stop_ns)
            # Autograd's work around a message's last gradient launches the message; around the
            # step's last gradient it also unpacks all messages.
            launch = bisect.bisect_left(launches, op.stop_ns)
            if launch < len(launches):
                stop = min(stop, launches[launch])
            if op.stop_ns <= step.finalize_ns < stop:
                stop = int(step.finalize_ns)
            marks.append(CutMark(stop, -1, op))
        return marks

    # What the host does

    def _work_until(
        self, at_ns: int, *, after: tuple[int, ...] = (), spent_ns: int | None = None
    ) -> None:
        """Add the host's work from the last cut to ``at_ns``.

        ``after`` are device tasks that the host waited for; ``spent_ns`` is how much of the time
        was work, if not all.
        """
        start = self._cursor_ns
        # A task of zero duration is added, too: steps then have the same tasks even if two events
        # fall on one tick of the clock.
        at_ns = max(at_ns, start)
        # The wait for a blocking copy to begin is explained by the copy's stream.
        late_ns = LATE_NS if after or spent_ns is None else None
        if spent_ns is None:
            spent_ns = at_ns - start - self._waited_for_peers(start, at_ns)
        self._cursor_ns = at_ns
        if not self._on_device:
            after += (*self._after_host(), *self._waited)
            self._waited = ()
        operator = self._step.operator(max(at_ns - 1, start))
        name = "between operators" if operator is None else operator.name.removeprefix(EVALUATE)
        phase = self._step.phase(min(start, at_ns - 1))
        joint = self._on_device and bool(after)
        task = TracedTask(name, phase, self._work, spent_ns, after, start, at_ns, joint)
        self._last_host = self._add(task, late_ns=late_ns)
        if not self._on_device:
            self._last_device = self._last_host
            self._note_forward(at_ns)

    def _waited_for_peers(self, start: int, stop: int) -> int:
        """Return how long no operator ran while messages were in flight; 0 with a device."""
        if self._on_device or not self._gaps or start < self._step.backward_ns:
            return 0
        if stop <= max(c.launch_ns for c in self._collectives):
            return 0
        first = bisect.bisect_right(self._gaps, start, key=lambda gap: gap[1])
        end = bisect.bisect_left(self._gaps, stop, key=lambda gap: gap[0])
        return sum(min(b, stop) - max(a, start) for a, b in self._gaps[first:end])

    def _load(self, op: HostOp) -> None:
        """Add the reading of a batch."""
        self._work_until(op.start_ns)
        start = self._cursor_ns
        stop = self._cursor_ns = max(op.stop_ns, start)
        self._add(
            TracedTask("data loading", "data", "host", stop - start, (), start, stop, joint=True)
        )

    def _wait(self, op: HostOp) -> None:
        """Add the wait, without an operator, until the end of another thread's exchange ``op``."""
        operator = self._step.operator(op.stop_ns - 1)
        ran = op.start_ns if operator is None else operator.stop_ns
        begun = min(max(ran, op.start_ns, self._cursor_ns), op.stop_ns)
        self._work_until(begun)
        start = self._cursor_ns
        stop = self._cursor_ns = max(op.stop_ns, start)
        phase, after = self._step.phase(max(stop - 1, 0)), self._after_host()
        waited = stop - start - self._waited_for_peers(start, stop)
        span = (waited, after, start, stop)
        self._waited = (self._add(TracedTask(op.name, phase, PEERS, *span, joint=True)),)

    # What the device does

    def _call(self, call: LaunchCall, tasks: tuple[DeviceTask, ...]) -> None:
        """Add the tasks that a call launched, and the host's wait for the device if it waited."""
        if not tasks:
            self._synchronise(call)
            return
        copy = tasks[0]
        together_ns = min(call.stop_ns, copy.stop_ns) - max(call.start_ns, copy.start_ns)
        blocked = together_ns > 0.5 * (copy.stop_ns - copy.start_ns)
        if copy.kind == "copy" and HOST_COPY.search(copy.name) and blocked:
            # The call's own work before the transfer begins, once the stream is free.
            self._work_until(call.start_ns)
            before = (t.stop_ns for t in self._done_by(copy.start_ns) if t.stream == copy.stream)
            free = max(call.start_ns, min(next(before, call.start_ns), call.stop_ns))
            begun = min(max(copy.start_ns, free), call.stop_ns)
            self._work_until(begun, spent_ns=max(begun - max(free, self._cursor_ns), 0))
            self._end_wait(call, copy, self._launch(copy))
            return
        self._work_until(min(call.stop_ns, self._step.stop_ns))
        for task in tasks:
            self._launch(task)

    def _synchronise(self, call: LaunchCall) -> None:
        """Let the host wait for the device task that ended last before the call did."""
        waited = self._last_done(call.stop_ns)
        idle = self._queued_until_ns <= call.stop_ns
        if waited is None or (waited.stop_ns <= call.start_ns and not idle):
            return  # nothing was waited for: the call is work like any other
        self._work_until(call.start_ns)
        awaited = self._index_of.get(id(waited))
        if awaited is None:
            awaited = self._point("messages arrived", call.start_ns)
        self._end_wait(call, waited, awaited)

    def _done_by(self, at_ns: int) -> Iterator[DeviceTask]:
        """Yield the step's device tasks that have ended by then, the latest first."""
        ended = bisect.bisect_right(self._done, at_ns, key=attrgetter("stop_ns"))
        for index in reversed(range(ended)):
            yield self._done[index]

    def _last_done(self, at_ns: int) -> DeviceTask | None:
        """Return the task that ended last by then, of those that have been launched so far."""
        for task in self._done_by(at_ns):
            if id(task) in self._index_of or id(task) in self._exchanged:
                return task
        return None

    def _end_wait(self, call: LaunchCall, waited: DeviceTask, index: int) -> None:
        """Add the rest of a call that waited for a device task; after that task the host worked."""
        spent_ns = max(call.stop_ns - max(waited.stop_ns, self._cursor_ns), 0)
        self._work_until(call.stop_ns, after=(index,), spent_ns=spent_ns)

    def _launch(self, task: DeviceTask) -> int:
        """Add a device task that follows the host's work so far."""
        phase = self._step.phase(self._cursor_ns - 1)
        lane = self._lane_of[id(task)]
        to_device = task.kind == "copy" and TO_DEVICE.search(task.name)
        if to_device and lane == STREAMS[0] and not self._first_kernel:
            # A copy of the batch. Copies after the first kernel are part of their pass. Those on
            # another stream may be of the next batch; waits for them are found as for other tasks.
            phase = "copy"
        elif task.kind == "kernel":
            self._first_kernel = True
        work = (self._share[id(task)], self._after_host(), task.start_ns, task.stop_ns)
        held = self._held_up_by(task, lane)
        traced = TracedTask(_short(task.name), phase, lane, *work, phase == "copy", held)
        # A launch takes time to reach an idle stream; on a busy one the next kernel begins at once.
        launched_ns = self._ends_ns[self._last_host] if self._last_host >= 0 else 0
        busy = self._simulated_ns.get(lane, 0) >= launched_ns
        index = self._add(traced, late_ns=0 if busy else LATE_NS)
        self._index_of[id(task)] = index
        self._free_ns[lane] = max(self._free_ns.get(lane, 0), task.stop_ns)
        self._queued_until_ns = max(self._queued_until_ns, task.stop_ns)
        if phase != "copy" and lane == STREAMS[0]:
            self._last_device = index
            self._note_forward(self._cursor_ns)
        return index

    def _held_up_by(self, task: DeviceTask, lane: Resource) -> int | None:
        """Return the task of another stream that this one waited for, if any."""
        free = max(self._cursor_ns, self._free_ns.get(lane, 0))
        if task.start_ns <= free + LATE_NS:
            return None
        before = self._last_done(task.start_ns)
        if before is None or before.stop_ns <= free:
            return None
        # A gradient message has no task: the simulator lets the update wait for it.
        return self._index_of.get(id(before))

    def _note_forward(self, at_ns: int) -> None:
        if at_ns <= self._step.backward_ns:
            self._forward.append((at_ns, len(self._tasks) - 1))

    def _add(self, task: TracedTask, *, late_ns: int | None = None) -> int:
        """Add a task; simulate when it ends, as :mod:`syncline.plan.simulator` will.

        If it ended more than ``late_ns`` later in the trace, the difference is a wait.
        """
        needed = [self._step.start_ns, *(self._ends_ns[b] for b in task.after)]
        if task.held_by is not None:
            needed.append(self._ends_ns[task.held_by])
        lane = task.resource
        if lane != "host":
            needed.append(self._batch_ns)
        if task.phase in ("finalize", "update") and task.resource != "host":
            needed.append(self._arrived_ns)
        free_ns = 0 if lane == WAITS else self._simulated_ns.get(lane, 0)
        end_ns = max([free_ns, *needed]) + task.duration_ns
        if late_ns is not None and task.stop_ns > end_ns + late_ns:
            task = task._replace(waited_ns=task.stop_ns - end_ns)
            end_ns = task.stop_ns
        self._simulated_ns[lane] = end_ns
        if task.phase in ("data", "copy"):
            self._batch_ns = max(self._batch_ns, end_ns)
        self._ends_ns.append(end_ns)
        self._tasks.append(task)
        return len(self._tasks) - 1

    def _after_host(self) -> tuple[int, ...]:
        return (self._last_host,) if self._last_host >= 0 else ()

    def _point(self, name: str, at_ns: int) -> int:
        """Add an empty device task after the work launched so far, for others to wait for."""
        phase, after = self._step.phase(at_ns - 1), self._after_host()
        return self._add(TracedTask(name, phase, "device", 0, after, at_ns, at_ns, joint=True))

    # Gradients

    def _parameter(self, at_ns: int, op: HostOp) -> None:
        self._work_until(at_ns)
        elements = elements_of(op.shapes[:1]) if op.shapes else None
        dtype = op.types[0] if op.types and op.types[0] else None
        ready = self._last_device if self._last_device >= 0 else self._last_host
        self._parameters.append(
            ReadyPoint(elements, dtype, ready, self._needed_by(op), op.record_id)
        )

    def _needed_by(self, op: HostOp) -> int | None:
        """Return the first task of the forward operator whose backward made this gradient."""
        producer = latest(self._producers, op.start_ns)
        source = None if producer is None else self._sources.get(producer.sequence)
        if source is None:
            return None
        operator = self._step.operator(source)
        begin = source if operator is None else operator.start_ns
        place = bisect.bisect_right(self._forward, begin, key=lambda f: f[0])
        return self._forward[place][1] if place < len(self._forward) else None

    def _message(self, at_ns: int, collective: MeasuredCollective) -> None:
        """Add the points at which a message is ready on this worker, and on all workers.

        :func:`syncline.files.traces.kineto.with_waiting` moves the second point to its time.
        """
        self._work_until(at_ns)
        self._queued_until_ns = max(self._queued_until_ns, collective.stop_ns)
        launched = self._last_host
        if self._on_device:
            launched = self._last_device = self._point(
                f"message {len(self._messages)} launched", at_ns
            )
        free = max(at_ns, self._free_ns.get(STREAMS[0], 0))
        wait = (f"other workers, message {len(self._messages)}", self._tasks[launched].phase, WAITS)
        after = (launched, *(message.ready_after for message in self._messages[-1:]))
        ready = self._add(TracedTask(*wait, 0, after, free, free, joint=True))
        self._messages.append(
            ReadyPoint(collective.elements, collective.dtype, ready, None, collective.record_id)
        )


def _short(name: str) -> str:
    """Return a kernel's name without template arguments and parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = min((i for i in (plain.find("<"), plain.find("(")) if i > 0), default=len(plain))
    return plain[:cut][:80] or name[:80]


def _out_of_loading(step: Outline, marks: Sequence[CutMark]) -> list[CutMark]:
    """Move marks that fall into the reading of a batch to its end, so that reading is one task."""
    moved = []
    for mark in marks:
        inside = [op for op in step.loading if op.start_ns < mark.at_ns < op.stop_ns]
        if not inside:
            moved.append(mark)
        elif mark.cause is not None:
            moved.append(mark._replace(at_ns=inside[0].stop_ns, order=mark.order + 2))
    return moved
