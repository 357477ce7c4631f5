"""PyTorch profiler traces (Kineto, Chrome trace events), read into profiles and timelines.

Reading has four stages, one file each: events of all schemas in one form (``kineto_events``), steps
with their phases and messages (``kineto_steps``), tasks without waiting (``kineto_cut``), and the
result (``kineto_profile``). This file aligns the clocks of the ranks and estimates what messages
cost without waiting. The notes say what a trace lacks.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.errors import MismatchError, UserError
from syncline.files.traces.execution_trace import ExecutionTrace
from syncline.files.traces.kineto_cut import take_apart
from syncline.files.traces.kineto_events import KinetoEvents, read_events
from syncline.files.traces.kineto_profile import (
    TracedExchange,
    alike_steps,
    exchange_of,
    make_profile,
    make_timeline,
)
from syncline.files.traces.kineto_steps import MeasuredCollective, StepTasks, outline_steps
from syncline.files.traces.reading import ReadProgress, in_file
from syncline.files.traces.sizes import GradientSizes
from syncline.files.traces.trace import Trace, model_of
from syncline.plan.fit import Fit, curve_through, fit_cost_curve
from syncline.plan.network import Measurement
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.timeline import Interval, active_ns


class KinetoTrace(NamedTuple):
    """The steps of a training job, of one rank or several."""

    model: str  # the file's name: a trace does not say which model it is of
    device: str  # ``"cuda"`` where work was launched on a device, else ``"cpu"``
    workers: int | None
    steps: tuple[StepTasks, ...]
    points: tuple[Measurement, ...]
    """Measured messages: bytes, and the shortest time of messages of this or any larger size."""
    notes: tuple[str, ...]

    def profile(self) -> Profile:
        """Return the medians over the steps that have the same tasks as most steps.

        Raise UserError if the trace lacks the sizes of the gradients, or device activities.
        """
        alike = alike_steps(self.steps)
        return make_profile(
            alike,
            _exchange(alike[0]),
            model=self.model,
            device=self.device,
            workers=self.workers or 1,
        )

    def plan(self) -> Plan | None:
        """Return the messages that were exchanged, if any; raises as :meth:`profile` does."""
        last = _exchange(alike_steps(self.steps)[0]).last_of_message
        if not last:
            return None
        return Plan.merging("as traced", self.profile(), self.workers or 1, last)

    def trace(self) -> Trace:
        """Return one iteration; its notes say what a profile lacks, if it has none."""
        alike = alike_steps(self.steps)
        known = exchange_of(alike[0], []) is not None
        return Trace(
            model=self.model,
            profile=self.profile() if known else None,
            points=self.points,
            fit=_message_costs(self.points),
            workers=self.workers,
            steps=len(alike),
            plan=self.plan() if known else None,
            timeline=make_timeline(alike[len(alike) // 2]),
            iteration_s=statistics.median(step.measured_s for step in alike),
            notes=self.notes,
        )


def _exchange(step: StepTasks) -> TracedExchange:
    notes: list[str] = []
    exchange = exchange_of(step, notes)
    if exchange is None:
        raise UserError(f"{step.source}: {notes[-1]}")
    return exchange


def read_kineto(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    step: int | None = None,
    execution_traces: Sequence[ExecutionTrace] = (),
    sizes: GradientSizes | None = None,
    progress: ReadProgress | None = None,
) -> KinetoTrace:
    """Read the profiler traces of one job.

    The clocks of the ranks are aligned so that messages end at the same time on all.

    Args:
        paths: a trace file, or one file for each rank of one job.
        step: the only ``ProfilerStep`` to read.
        execution_traces: one of the same job, or one for each profiler trace, with the sizes that
            the profiler left out. They are matched by process id, else by position.
        sizes: hand-written sizes of the gradients or messages.
        progress: called for each file separately.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    files: list[tuple[KinetoEvents, list[StepTasks]]] = []
    notes: list[str] = []
    for path in paths:
        source = os.fspath(path)
        events = read_events(source, progress=progress)
        with in_file(source):
            files.append((events, _steps_of(events, step, notes)))
    if execution_traces:
        partners = _partners([events for events, _ in files], execution_traces)
        for (_, steps), partner in zip(files, partners, strict=True):
            steps[:] = map(partner.join, steps)
    for _, steps in files:
        if sizes is not None:
            steps[:] = map(sizes.join, steps)
        steps[:] = map(_with_message_sizes, steps)
    notes += [note for _, steps in files for step in steps for note in step.notes]
    aligned = _aligned_steps(files, notes)
    stated = {events.workers for events, _ in files if events.workers}
    if len(stated) > 1:
        raise MismatchError(
            f"the traces are of jobs with {' and '.join(map(str, sorted(stated)))} workers; give "
            "traces of one job"
        )
    groups = {c.group_size for step in aligned for c in step.collectives if c.group_size}
    workers = next(iter(stated), None) or max(groups, default=None)
    points = _measured_messages(aligned, notes, ranks=len(files), workers=workers)
    aligned = with_waiting(aligned, points)
    alike = alike_steps(aligned)
    exchange_of(alike[0], notes)
    if len(alike) < len(aligned):
        notes.append(
            f"{len(aligned) - len(alike)} of {len(aligned)} steps consist of other tasks than the "
            "rest; they are left out of the medians"
        )
    _note_waits(alike, notes)
    return KinetoTrace(
        model=model_of(files[0][0].source) or "trace",
        device="cuda" if any(events.device for events, _ in files) else "cpu",
        workers=workers,
        steps=tuple(aligned),
        points=points,
        notes=tuple(dict.fromkeys(notes)),
    )


NOTED_SHARE = 0.005  # least share of a step for which unexplained waits are noted


def _note_waits(steps: Sequence[StepTasks], notes: list[str]) -> None:
    share = statistics.median(
        active_ns(step.waits_ns()) / max(step.ended_ns - step.start_ns, 1) for step in steps
    )
    if share >= NOTED_SHARE:
        longest = max((task for step in steps for task in step.tasks), key=lambda t: t.waited_ns)
        notes.append(
            f"{share * 100:.1f} % of a step is waiting that nothing in the trace explains, at most "
            f"{longest.waited_ns / 1e6:.3g} ms at once, before {longest.name}: predictions keep it "
            "as measured, for any network and device"
        )


def _steps_of(events: KinetoEvents, step: int | None, notes: list[str]) -> list[StepTasks]:
    notes += events.notes
    outlines = outline_steps(events, notes)
    if not outlines:
        raise UserError("no step in it; record whole training iterations")
    if step is not None:
        have = ", ".join(str(o.number) for o in outlines)
        outlines = [o for o in outlines if o.number == step]
        if not outlines:
            raise UserError(f"no step {step}; the trace has steps {have}")
    if not events.device and any(op.name.startswith("nccl:") for op in events.ops):
        notes.append(
            "no device activities were recorded, though NCCL was used: the times are those of the "
            "host, which launches, not of the device (record with ProfilerActivity.CUDA)"
        )
    launching = {c.correlation for c in events.calls}
    lost = sum(t.correlation is None or t.correlation not in launching for t in events.device)
    if lost:
        notes.append(
            f"{lost} of {len(events.device)} device tasks were launched by no recorded call; they "
            "are left out"
        )
    return take_apart(events, outlines)


def _partners(
    ranks: Sequence[KinetoEvents], traces: Sequence[ExecutionTrace]
) -> list[ExecutionTrace]:
    """Return the execution trace that belongs to each profiler trace."""
    if len(traces) == 1:
        return [traces[0]] * len(ranks)
    if len(traces) != len(ranks):
        raise MismatchError(
            f"{len(ranks)} profiler traces and {len(traces)} execution traces; give one execution "
            "trace for all, or one for each profiler trace"
        )
    of_process = {trace.process: trace for trace in traces}
    processes = {events.process for events in ranks}
    if None not in processes and len(processes) == len(ranks) and processes == of_process.keys():
        return [of_process[events.process] for events in ranks]
    return list(traces)


def _with_message_sizes(step: StepTasks) -> StepTasks:
    """Return the step; sizes of messages that the trace lacks are added up from its gradients."""
    if all(message.elements is not None for message in step.messages):
        return step
    exchange = exchange_of(step, [])
    if exchange is None:
        return step
    first, messages = 0, []
    for message, last in zip(step.messages, exchange.last_of_message, strict=True):
        own = exchange.gradients[first : last + 1]
        elements = sum(gradient.elements or 0 for gradient in own)
        messages.append(message._replace(elements=elements, dtype=own[-1].dtype))
        first = last + 1
    return step._replace(messages=messages)


def _aligned_steps(
    files: Sequence[tuple[KinetoEvents, list[StepTasks]]], notes: list[str]
) -> list[StepTasks]:
    """Return the steps of all ranks with their ``shift_ns``, on one clock for all ranks.

    A file that does not state its rank gets its index as the rank.
    """
    found: list[StepTasks] = []
    source_of: dict[int, str] = {}
    first = _ends(files[0][1])
    for place, (events, steps) in enumerate(files):
        rank = place if events.rank is None else events.rank
        if rank in source_of:
            raise MismatchError(
                f"{events.source}: rank {rank}, as {source_of[rank]}; give one trace for each rank"
            )
        source_of[rank] = events.source
        ends = _ends(steps)
        common = [ends[key] - first[key] for key in ends.keys() & first.keys()]
        if place and not common:
            notes.append(f"{events.source}: shares no message with the first; clocks not aligned")
        offset = round(statistics.median(common)) if common else 0
        found += [s._replace(rank=rank, shift_ns=s.start_ns - offset) for s in steps]
    begins: dict[int, int] = {}
    for step in found:
        begins[step.number] = min(step.shift_ns, begins.get(step.number, step.shift_ns))
    return [step._replace(shift_ns=step.shift_ns - begins[step.number]) for step in found]


def _ends(steps: Sequence[StepTasks]) -> dict[tuple[int, int], int]:
    """Return when each message ended, by the step's number and the message's index."""
    return {
        (step.number, index): collective.stop_ns
        for step in steps
        for index, collective in enumerate(step.collectives)
    }


def _measured_messages(
    steps: Sequence[StepTasks], notes: list[str], *, ranks: int, workers: int | None
) -> tuple[Measurement, ...]:
    """Return the cost of messages of each size; no message is faster than a smaller one.

    A measured duration includes waiting, but the last rank does not wait. So with all ranks traced,
    the cost is the median over messages of the shortest duration over ranks; otherwise the shortest
    duration of all.
    """
    shortest: dict[tuple[int, int], tuple[int, int]] = {}  # by message: bytes, ns over ranks
    for step in steps:
        spans = in_turn(step.collectives)
        for index, (message, (start, stop)) in enumerate(zip(step.messages, spans, strict=True)):
            size, spent = message.size_bytes, stop - start
            if size and spent > 0:
                _, before = shortest.get((step.number, index), (size, spent))
                shortest[step.number, index] = (size, min(before, spent))
    by_size: dict[int, list[int]] = {}
    for size, spent in shortest.values():
        by_size.setdefault(size, []).append(spent)
    if by_size and ranks == 1:
        notes.append(
            "the trace of one rank only: a message's duration includes waiting for the other "
            "ranks, so its cost is taken as the shortest over the steps; give the traces of all "
            "ranks for the true cost"
        )
    points: list[Measurement] = []
    least = math.inf
    for size, times in sorted(by_size.items(), reverse=True):
        least = min(least, statistics.median(times) if ranks == workers else min(times))
        points.append(Measurement(size_bytes=size, time_s=least / NS_PER_S, repetitions=len(times)))
    return tuple(reversed(points))


def _message_costs(points: Sequence[Measurement]) -> Fit | None:
    """Return the cost curve of messages; None for fewer than two sizes.

    A fitted line is some per cent off, so for few sizes the curve goes through every point.
    """
    sizes = {point.size_bytes for point in points}
    if len(sizes) < 2:
        return None
    return curve_through(points) if len(sizes) <= FEW_SIZES else fit_cost_curve(points)


def in_turn(sent: Sequence[MeasuredCollective]) -> list[Interval]:
    """Return the interval of each message as if they were sent one after another.

    Messages in flight at the same time share the network equally. An interval is as long as the sum
    of a message's shares, and begins with it or after the message before. O(n^2) for n messages.
    """
    spans: list[Interval] = []
    clock_ns = -(1 << 62)
    times = sorted({at for each in sent for at in (each.start_ns, each.stop_ns)})
    under_way = [
        (begin, end, sum(c.start_ns <= begin and end <= c.stop_ns for c in sent))
        for begin, end in itertools.pairwise(times)
    ]
    for each in sent:
        spent = math.fsum(
            (end - begin) / count
            for begin, end, count in under_way
            if each.start_ns <= begin and end <= each.stop_ns
        )
        start = max(each.start_ns, clock_ns)
        clock_ns = start + round(spent)
        spans.append((start, clock_ns))
    return spans


FEW_SIZES = 16
"""With at most this many sizes of messages, the cost curve goes through each measured one."""
WAITING_SHARE = 0.05
"""A message that takes longer than its cost by this share waited for other workers."""


def with_waiting(steps: Sequence[StepTasks], points: Sequence[Measurement]) -> list[StepTasks]:
    """Return the steps with waits for the other workers' gradients before each message.

    An all-reduce begins when the last worker has its gradients: at its end minus its cost without
    waiting, which ``points`` has for every size. If a message waited on one rank, all ranks wait
    until it begins, so that on average it begins when the last worker is ready.
    """
    cost_s = {point.size_bytes: point.time_s for point in points}
    if (fit := _message_costs(points)) is not None:  # as on the trace's own network
        cost_s = {size: fit.curve.seconds(size) for size in cost_s}
    begins = [_begins(step, cost_s) for step in steps]
    waited = {
        (step.number, index)
        for step, own in zip(steps, begins, strict=True)
        for index, (_, waits) in own.items()
        if waits
    }
    found = []
    for step, own in zip(steps, begins, strict=True):
        tasks = list(step.tasks)
        waited_until_ns = -(1 << 62)
        for index, (begin_ns, _) in own.items():
            if (step.number, index) not in waited:
                continue
            ready_after = step.messages[index].ready_after
            task = tasks[ready_after]
            begun = max(task.start_ns, waited_until_ns)
            waited_until_ns = max(begin_ns, begun)
            tasks[ready_after] = task._replace(
                duration_ns=waited_until_ns - begun, start_ns=begun, stop_ns=waited_until_ns
            )
        found.append(step._replace(tasks=tasks))
    return found


def _begins(step: StepTasks, cost_s: Mapping[int, float]) -> dict[int, tuple[int, bool]]:
    """Return when each message began on all ranks, and whether it had waited for other workers."""
    found: dict[int, tuple[int, bool]] = {}
    pairs = zip(step.messages, in_turn(step.collectives), strict=True)
    for index, (message, (start, stop)) in enumerate(pairs):
        if (seconds := cost_s.get(message.size_bytes or 0)) is not None:
            cost = round(seconds * NS_PER_S)
            found[index] = stop - cost, stop - start > (1 + WAITING_SHARE) * cost
    return found
