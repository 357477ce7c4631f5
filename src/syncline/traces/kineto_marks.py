"""Where the host's time of a step is cut, and why."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.traces.kineto_collectives import Collective
from syncline.traces.kineto_events import Call, DeviceTask, HostOp
from syncline.traces.kineto_steps import EVALUATE, Outline, is_accumulation

__all__ = ["Mark", "find_marks"]

SYNCHRONISING = re.compile(
    r"(cuda|hip|xpu)(Stream|Device|Event|Ctx)Synchronize$|cu(Stream|Ctx|Event)Synchronize$"
)


class Mark(NamedTuple):
    """A place at which the host's time is cut."""

    at_ns: int
    order: int
    """Among marks at the same time, the lowest first."""
    cause: Call | HostOp | Collective | None
    """What the host did until there; None where only the phase or the operator changes."""
    launched: tuple[DeviceTask, ...] = ()
    """What the call put on the device."""


def find_marks(
    step: Outline,
    launched: Mapping[int, Sequence[DeviceTask]],
    collectives: Sequence[Collective],
    notes: list[str],
) -> list[Mark]:
    """Return the marks of a step in order.

    Phases begin, a batch has been read, a gradient is final, a message or other work has been
    launched, the host waits for the device; and without a device, an operator ends.

    Args:
        step: the step.
        launched: device tasks by correlation; empty where nothing ran on a device.
        collectives: the messages, by launch.
        notes: gets what was assumed.
    """
    marks = [
        Mark(int(at), 3, None)
        for at in (step.backward_ns, step.finalize_ns, step.update_ns)
        if step.start_ns < at < step.stop_ns
    ]
    marks += [Mark(c.launch_ns, 2, c) for c in collectives]
    marks += [Mark(op.stop_ns, 1, op) for op in step.loading if op.stop_ns <= step.stop_ns]
    accumulations = _accumulations(step, collectives)
    marks += accumulations
    marks += _calls(step, launched, collectives, notes)
    if not launched:
        cut = {mark.at_ns for mark in accumulations}
        ends = (op.stop_ns for op in step.outermost)
        marks += [Mark(at, 0, None) for at in ends if at <= step.stop_ns and at not in cut]
    return sorted(_out_of_loading(step, marks), key=lambda mark: (mark.at_ns, mark.order))


def _calls(
    step: Outline,
    launched: Mapping[int, Sequence[DeviceTask]],
    collectives: Sequence[Collective],
    notes: list[str],
) -> list[Mark]:
    messages = {id(c.kernel) for c in collectives if c.kernel is not None}
    marks = []
    seen: set[int] = set()
    foreign = 0
    for call in step.calls:
        tasks: tuple[DeviceTask, ...] = ()
        if call.correlation is not None and call.correlation not in seen:
            seen.add(call.correlation)
            own = launched.get(call.correlation, ())
            tasks = tuple(task for task in own if id(task) not in messages)
        if tasks or (call.thread in step.threads and SYNCHRONISING.match(call.name)):
            foreign += call.thread not in step.threads
            marks.append(Mark(min(call.stop_ns, step.stop_ns), 1, call, tasks))
    if foreign:
        notes.append(
            "some device tasks were launched by threads that neither call the model nor run its "
            "backward pass; they are taken as launched by the training thread"
        )
    return marks


def _accumulations(step: Outline, collectives: Sequence[Collective]) -> list[Mark]:
    """Return where each gradient is final: with what the engine runs around accumulating."""
    around = [op for op in step.ops if op.name.startswith(EVALUATE)]
    launches = [c.launch_ns for c in collectives]
    marks = []
    for op in step.ops:
        if not is_accumulation(op) or op.start_ns < step.backward_ns:
            continue
        index = bisect.bisect_right(around, op.start_ns, key=lambda o: o.start_ns) - 1
        outer = around[index] if index >= 0 else op
        stop = outer.stop_ns if outer.thread == op.thread else op.stop_ns
        stop = min(max(stop, op.stop_ns), step.stop_ns)
        # What surrounds the last one of a message launches it, and that of the very last one
        # unpacks all of them.
        launch = bisect.bisect_left(launches, op.stop_ns)
        if launch < len(launches):
            stop = min(stop, launches[launch])
        if op.stop_ns <= step.finalize_ns < stop:
            stop = int(step.finalize_ns)
        marks.append(Mark(stop, -1, op))
    return marks


def _out_of_loading(step: Outline, marks: Sequence[Mark]) -> list[Mark]:
    """Move what happens while a batch is read to its end: reading is one task."""
    moved = []
    for mark in marks:
        inside = [op for op in step.loading if op.start_ns < mark.at_ns < op.stop_ns]
        if not inside:
            moved.append(mark)
        elif mark.cause is not None:
            moved.append(mark._replace(at_ns=inside[0].stop_ns, order=mark.order + 2))
    return moved
