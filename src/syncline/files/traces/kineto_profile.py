"""The gradients, the ``Profile`` and the measured ``Timeline`` of profiled steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from syncline.files.traces.kineto_cut import LATE_NS
from syncline.files.traces.kineto_steps import (
    Holds,
    ReadyPoint,
    StepTasks,
    TracedTask,
    element_dtype,
    message_parts,
)
from syncline.plan.profile import (
    NOT_COMPUTED,
    UNEXPLAINED,
    WAITS,
    Gradient,
    Operation,
    Phase,
    Profile,
    Resource,
)
from syncline.plan.quantities import NS_PER_S
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, SpanKind, Timeline

LISTED = 8  # gradients without a size that a note lists
LACKING: dict[Holds, str] = {
    "device": "no operators of the host are in the trace, and so no gradients: record it with "
    "ProfilerActivity.CPU as well",
    "forward": "the trace holds no backward pass, and so no gradients: record training iterations, "
    "with the backward pass in every profiler step",
    "backward": "a backward pass is in the trace, but no gradient became ready in it: record whole "
    "training iterations, up to the optimizer's step",
}
"""What to record, by what a step without gradients holds."""


class TracedExchange(NamedTuple):
    """What is exchanged in a step."""

    gradients: tuple[Gradient, ...]
    """In ready order; ``ready_after`` and ``needed_by`` are indices of tasks."""
    last_of_message: tuple[int, ...]
    """Index of the last gradient of each message; empty where nothing was exchanged."""


def exchange_of(step: StepTasks, notes: list[str]) -> TracedExchange | None:
    """Return the gradients of a step, or None with a note where the trace lacks their sizes.

    If the sizes of the gradient tensors are known and add up to the messages, each tensor is a
    gradient; otherwise each message is one. A tensor without a size gets the remainder of its
    message, or is left out.
    """
    # A shape of "[]" may be a scalar's, or mean that there is no tensor.
    parameters = [
        p._replace(elements=None) if p.elements == 1 and not element_dtype(p.dtype) else p
        for p in step.parameters
    ]
    if any(p.elements is not None for p in parameters):
        exchange = _of_gradients(step, parameters, notes)
        if exchange is not None:
            return exchange
    if not step.messages or any(m.elements is None for m in step.messages):
        notes.append(f"{_lacking(step)}, so it gives phases and timelines but no profile")
        return None
    notes.append(
        "the sizes of single gradients are not in the trace; each message (bucket) is taken as one "
        "gradient, so a planner can split the messages but not group them anew"
    )
    grouped: list[ReadyPoint] = []
    first = 0
    for message in step.messages:
        stop = first
        while stop < len(parameters) and parameters[stop].ready_after <= message.ready_after:
            stop += 1
        needs = [p.needed_by for p in parameters[first:stop]]
        earliest = min((n for n in needs if n is not None), default=None)
        grouped.append(message._replace(needed_by=None if None in needs else earliest))
        first = stop
    return _exchange("bucket", grouped, range(len(grouped)), notes)


def _of_gradients(
    step: StepTasks, parameters: Sequence[ReadyPoint], notes: list[str]
) -> TracedExchange | None:
    """Return the gradient tensors in their messages, or None if the sizes do not add up."""
    if not step.messages:
        sized = [p for p in parameters if p.elements is not None]
        _note_unsized(parameters, len(sized), notes)
        return _exchange("gradient", sized, (), notes)
    parts = message_parts(
        [p.elements for p in parameters],
        [m.elements for m in step.messages],
        [sum(p.ready_after < m.ready_after for p in parameters) for m in step.messages],
    )
    if parts is None:
        notes.append(
            "the gradients' sizes do not add up to the messages in the order in which they became "
            "ready; the messages are taken as gradients"
        )
        return None
    kept: list[ReadyPoint] = []
    last_of_message: list[int] = []
    left = iter(parameters)
    for message, sizes in zip(step.messages, parts, strict=True):
        # A communication hook may send another type than the gradients'; the type sent counts.
        own = [
            point._replace(elements=size, dtype=message.dtype or point.dtype)
            for size, point in zip(sizes, left, strict=False)
            if size is not None
        ]
        if not own:
            notes.append(f"no gradient of message {len(last_of_message)} has a size in the trace")
            return None
        kept += [*own[:-1], own[-1]._replace(ready_after=message.ready_after)]
        last_of_message.append(len(kept) - 1)
    _note_unsized(parameters, len(kept), notes)
    return _exchange("gradient", kept, last_of_message, notes)


def _note_unsized(parameters: Sequence[ReadyPoint], kept: int, notes: list[str]) -> None:
    unsized = [index for index, p in enumerate(parameters) if p.elements is None]
    left_out = len(parameters) - kept
    if unsized:
        listed = ", ".join(map(str, unsized[:LISTED])) + ", ..." * (len(unsized) > LISTED)
        notes.append(
            f"{len(unsized)} of {len(parameters)} gradients without a size in the trace (in ready "
            f"order: {listed}): {len(unsized) - left_out} take what is left of their message, "
            f"{left_out} are left out; give all sizes with --sizes"
        )


def _lacking(step: StepTasks) -> str:
    """Return what the trace lacks for a profile, and what to record."""
    if not step.parameters and not step.messages:
        return LACKING[step.holds]
    if any(p.elements is not None for p in step.parameters):  # but none has a tensor
        return (
            "the gradients that were accumulated hold no tensors, as those of parameters that the "
            "loss does not depend on: record a step in which the whole model is trained, or give "
            "the sizes with --sizes"
        )
    if step.messages:
        return (
            "the sizes of the messages are not in the trace: record it with record_shapes=True or "
            "a PyTorch from 2024 on, join the execution trace, or give the sizes with --sizes"
        )
    return (
        "the sizes of the gradients are not in the trace: record it with record_shapes=True, join "
        "the execution trace, or give the sizes with --sizes"
    )


def _exchange(
    kind: Literal["gradient", "bucket"],
    points: Sequence[ReadyPoint],
    last_of_message: Sequence[int],
    notes: list[str],
) -> TracedExchange:
    dtypes = [element_dtype(p.dtype) for p in points]
    if None in dtypes:
        notes.append("the trace does not say the gradients' type; float32 is assumed")
    if any(p.needed_by is None for p in points):
        notes.append(
            "the trace does not tell which forward operator reads the parameters of some "
            f"{kind}s; they are taken as needed at the start of the forward pass"
        )
    ready = itertools.accumulate((p.ready_after for p in points), max)
    gradients = (
        Gradient(
            name=p.name or f"{kind} {index}",
            elements=p.elements or 0,
            dtype=dtype or "float32",
            ready_after=after,
            needed_by=p.needed_by,
        )
        for index, (p, dtype, after) in enumerate(zip(points, dtypes, ready, strict=True))
    )
    return TracedExchange(tuple(gradients), tuple(last_of_message))


MOST_OPERATIONS = 4000
"""Most operations of a profile: neighbouring launches are merged until there are no more."""


def alike_steps(steps: Sequence[StepTasks]) -> list[StepTasks]:
    """Return the steps that have the same tasks as most steps that train."""
    training = [step for step in steps if step.parameters or step.messages] or steps
    shapes = [_shape(step) for step in training]
    common = statistics.mode(shapes)
    return [step for step, shape in zip(training, shapes, strict=True) if shape == common]


def _shape(step: StepTasks) -> tuple[object, ...]:
    # Names of host tasks vary: which operator runs at a cut depends on microseconds.
    return (
        tuple(
            (t.name if t.resource == "device" else "", t.phase, t.resource, t.after)
            for t in step.tasks
        ),
        tuple((p.elements, p.ready_after) for p in step.parameters),
        tuple((m.elements, m.ready_after) for m in step.messages),
    )


def make_profile(
    steps: Sequence[StepTasks],
    exchange: TracedExchange,
    *,
    model: str,
    device: str,
    workers: int,
    most_operations: int = MOST_OPERATIONS,
) -> Profile:
    """Return the profile of steps that consist of the same tasks.

    Every duration is the median over the steps, scaled for each phase and lane to the median of the
    steps' totals: medians of single tasks add up to less, since delays are rare and long. Waiting
    for other workers is not scaled. A gradient whose reader is not known counts as needed by the
    first task of the forward pass. Above ``most_operations``, neighbouring launches are merged.
    """
    columns = list(zip(*(step.tasks for step in steps), strict=True))
    medians = [statistics.median(task.duration_ns for task in column) for column in columns]
    held_by = [statistics.mode(task.held_by for task in column) for column in columns]
    waited = [statistics.median(task.waited_ns for task in column) for column in columns]
    waited_ns = statistics.median(sum(t.waited_ns for t in step.tasks) for step in steps)
    longer = waited_ns / (sum(waited) or 1)
    scale = _scales(steps, medians)
    tasks = [
        task._replace(
            duration_ns=round(median * scale[task.phase, task.resource]),
            after=task.after if held is None else tuple(sorted({*task.after, held})),
            joint=task.joint or held is not None,
            waited_ns=round(wait * longer),
        )
        for task, median, held, wait in zip(steps[0].tasks, medians, held_by, waited, strict=True)
    ]
    tasks, moved = _with_waits(tasks)
    kept = {moved[g.ready_after] for g in exchange.gradients}
    tasks, merged = _merge(tasks, kept, most_operations)
    place = [merged[at] for at in moved]
    forward = (i for i, t in enumerate(tasks) if (t.phase, t.resource) == ("forward", "device"))
    first = next(forward, None)
    return Profile(
        model=model,
        device=device,
        workers=workers,
        iterations=len(steps),
        operations=tuple(
            Operation(
                name=task.name,
                phase=task.phase,
                duration_s=task.duration_ns / NS_PER_S,
                after=task.after,
                resource=task.resource,
            )
            for task in tasks
        ),
        gradients=tuple(
            msgspec.structs.replace(
                g,
                ready_after=place[g.ready_after],
                needed_by=first if g.needed_by is None else place[g.needed_by],
            )
            for g in exchange.gradients
        ),
    )


def _scales(
    steps: Sequence[StepTasks], medians: Sequence[float]
) -> dict[tuple[Phase, Resource], float]:
    groups: dict[tuple[Phase, Resource], list[int]] = {}
    for index, task in enumerate(steps[0].tasks):
        groups.setdefault((task.phase, task.resource), []).append(index)
    scales: dict[tuple[Phase, Resource], float] = {}
    for group, inside in groups.items():
        spent = (math.fsum(step.tasks[i].duration_ns for i in inside) for step in steps)
        found = math.fsum(medians[i] for i in inside)
        # Waits differ between steps and overlap computing, so their sum means nothing.
        alone = group[1] in NOT_COMPUTED or found <= 0
        scales[group] = 1.0 if alone else statistics.median(spent) / found
    return scales


def _with_waits(tasks: Sequence[TracedTask]) -> tuple[list[TracedTask], list[int]]:
    """Return the tasks with their unexplained waits as further tasks, and the new index of each.

    A wait shorter than :data:`LATE_NS` is added to the next one of its lane.
    """
    found: list[TracedTask] = []
    place: list[int] = []
    left_ns: Counter[Resource] = Counter()
    latest: dict[Resource, int] = {}
    for task in tasks:
        task = task._replace(after=tuple(place[b] for b in task.after))
        left_ns[task.resource] += task.waited_ns
        if (waited_ns := left_ns[task.resource]) >= LATE_NS:
            left_ns[task.resource] = 0
            if task.resource not in latest:  # the wait follows this lane's previous step
                latest[task.resource] = len(found)
                found.append(task._replace(duration_ns=0))
            after = tuple(sorted({*task.after, latest[task.resource]}))
            name = f"{UNEXPLAINED} before {task.name}"
            found.append(TracedTask(name, task.phase, WAITS, waited_ns, after, 0, 0, joint=True))
            task = task._replace(after=(*task.after, len(found) - 1), joint=True)
        latest[task.resource] = len(found)
        place.append(len(found))
        found.append(task)
    return found, place


def _merge(
    tasks: Sequence[TracedTask], kept: set[int], most: int
) -> tuple[list[TracedTask], list[int]]:
    """Merge neighbouring launches until there are few enough tasks; return the new index of each.

    First launches of the same outermost operator are merged, then those of 2, 4, 8, ... operators.
    A merged host task launches all that its parts launched. A task that waits for the device, that
    the host waits for, or that ends a gradient is not merged with those after it.
    """
    merged, place = list(tasks), list(range(len(tasks)))
    width = 1
    while len(merged) > most and width <= 2 * len(tasks):
        merged, place = _merge_by(tasks, kept, width)
        width *= 2
    return merged, place


def _merge_by(
    tasks: Sequence[TracedTask], kept: set[int], width: int
) -> tuple[list[TracedTask], list[int]]:
    launching = any(t.resource == "host" and t.phase != "data" for t in tasks)
    leading = "host" if launching else "device"
    awaited = {before for task in tasks if task.joint for before in task.after}
    merged: list[TracedTask] = []
    place: list[int] = []
    growing: dict[str, int] = {}  # by resource, the merged task that takes in more
    operators = 0
    before: TracedTask | None = None
    for index, task in enumerate(tasks):
        alone = task.joint or index in awaited
        if task.resource == leading and (before is None or task.name != before.name):
            operators += 1
        if alone or operators > width or (before is not None and task.phase != before.phase):
            growing.clear()
            operators = 1
        after = {place[b] for b in task.after}
        at = growing.get(task.resource)
        if at is None:
            at = len(merged)
            merged.append(task._replace(after=tuple(sorted(after))))
        else:
            grown = merged[at]
            merged[at] = grown._replace(
                duration_ns=grown.duration_ns + task.duration_ns,
                after=tuple(sorted({*grown.after, *(b for b in after if b < at)})),
            )
        place.append(at)
        growing[task.resource] = at
        if alone or index in kept:
            growing.clear()
            operators = 0
        if task.resource == leading:
            before = task
    return merged, place


def make_timeline(step: StepTasks) -> Timeline:
    """Return the timeline of a step; its clock starts when the first rank began the step."""
    zero_ns = step.start_ns - step.shift_ns
    spans: list[Span] = []

    def add(lane: str, start: int, stop: int, label: str, kind: SpanKind, size: int | None) -> None:
        times = {"start_ns": max(start - zero_ns, 0), "stop_ns": max(stop - zero_ns, 0)}
        spans.append(Span(lane=lane, label=label, kind=kind, size_bytes=size, **times))

    for task in step.tasks:
        start = task.start_ns
        if task.resource == "host":
            start = task.stop_ns - task.duration_ns  # the time before that was waiting
        if start < task.stop_ns:
            kind: SpanKind = "wait" if task.resource in NOT_COMPUTED else task.phase
            lane = COMPUTE if task.resource == "device" else task.resource
            lane = {"data": "disk", "copy": "copy"}.get(task.phase, lane)
            add(lane, start, task.stop_ns, task.name, kind, None)
    for index, (message, sent) in enumerate(zip(step.messages, step.collectives, strict=True)):
        label, size = f"message {index}", message.size_bytes
        add(COMMUNICATION, sent.start_ns, sent.stop_ns, label, "message", size)
    return Timeline(
        name=f"rank {step.rank}, step {step.number}",
        source="measured",
        iteration_ns=step.duration_ns + step.shift_ns,
        spans=tuple(spans),
    )
