"""Which span of a timeline caused which: arrows to and from its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from syncline.model.plan import Message, Plan
from syncline.model.profile import Profile
from syncline.model.timeline import NOT_COMPUTING, Span, Timeline

__all__ = ["Flow", "flows"]


class Flow(NamedTuple):
    """An arrow from one span to another, which began when the first was over, or later."""

    source: Span
    target: Span


class _Runs:
    """The spans that are runs of one thing, which other things may share its label with."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_label: dict[str, dict[str, list[Span]]] = {}
        for span in sorted(spans, key=lambda s: (s.start_ns, s.stop_ns)):
            self._by_label.setdefault(span.label, {}).setdefault(span.lane, []).append(span)

    def of(self, label: str, ordinal: int, count: int) -> list[Span]:
        """Return the runs of the ``ordinal``-th of ``count`` things with this label, by start.

        A lane runs things in their order, iteration after iteration. Where its spans are no whole
        number of iterations, which is which is not known, and there are none.
        """
        found = [
            span
            for spans in self._by_label.get(label, {}).values()
            if len(spans) % count == 0
            for span in spans[ordinal::count]
        ]
        return sorted(found, key=lambda span: span.start_ns)


def flows(timeline: Timeline, profile: Profile, plan: Plan) -> list[Flow]:
    """Return what each message waited for and what waited for it, as far as spans can be told.

    Into a message: from the operation that made its last gradient ready, or, for an all-gather,
    from the reduce-scatters that it completes. Out of it: to the first unpacking or update after
    it, or, where the plan's operations wait by need, to those of the next iteration that read its
    parameters.

    Args:
        timeline: predicted or measured; its spans are matched by label and order.
        profile: the operations that ran.
        plan: the messages that were sent.
    """
    sending = [span for span in timeline.spans if span.kind == "message"]
    computing = [span for span in timeline.spans if span.kind not in NOT_COMPUTING]
    operation_runs = _matched([operation.name for operation in profile.operations], computing)
    message_runs = _message_runs(plan, sending)
    gradients = {gradient.name: gradient for gradient in profile.gradients}
    needs = dict(zip(gradients, profile.need_operations(), strict=True))
    exchanged = _exchanged(computing)
    found: list[Flow] = []
    for index, (message, tensors) in enumerate(
        zip(plan.messages, plan.message_tensors(), strict=True)
    ):
        names = [plan.tensors[t].name for t in tensors if plan.tensors[t].name in gradients]
        for span in message_runs[index]:
            if message.collective == "all-gather":
                sources = [message_runs[i] for i in _scattered(plan.messages, message)]
            elif names:
                ready = max(gradients[name].ready_after for name in names)
                sources = [_runs_until(ready, profile, operation_runs)]
            else:
                sources = []
            found += [Flow(s, span) for runs in sources if (s := _last_before(runs, span))]
            if message.collective == "reduce-scatter":
                continue
            if plan.wait == "need":
                readers = [operation_runs[i] for i in sorted({needs[name] for name in names})]
            else:
                readers = [exchanged]
            found += [Flow(span, t) for runs in readers if (t := _first_after(runs, span))]
    return found


def _message_runs(plan: Plan, spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of each message: by its label, or by order where no label is known."""
    labels = [plan.label(tensors) for tensors in plan.message_tensors()]
    if not {span.label for span in spans}.isdisjoint(labels):
        return _matched(labels, spans)
    alike = [msgspec.structs.replace(span, label="") for span in spans]
    original = dict(zip(map(id, alike), spans, strict=True))
    return [[original[id(run)] for run in runs] for runs in _matched([""] * len(labels), alike)]


def _exchanged(spans: Sequence[Span]) -> list[Span]:
    """Return what needs exchanged gradients: on the device, where the host only launches it."""
    found = [span for span in spans if span.kind in ("finalize", "update")]
    on_device = [span for span in found if span.lane != "host"]
    return sorted(on_device or found, key=lambda span: span.start_ns)


def _runs_until(operation: int, profile: Profile, runs: Sequence[list[Span]]) -> list[Span]:
    """Return the runs of an operation, or of the one before it on its lane where it has no span."""
    lane = profile.operations[operation].lane
    while operation and not (runs[operation] and profile.operations[operation].lane == lane):
        operation -= 1
    return runs[operation]


def _matched(labels: Sequence[str], spans: Sequence[Span]) -> list[list[Span]]:
    runs = _Runs(spans)
    counts: dict[str, int] = {}
    ordinals = []
    for label in labels:
        ordinals.append(counts.get(label, 0))
        counts[label] = ordinals[-1] + 1
    return [
        runs.of(label, ordinal, counts[label])
        for label, ordinal in zip(labels, ordinals, strict=True)
    ]


def _scattered(messages: Sequence[Message], gather: Message) -> list[int]:
    return [
        index
        for index, message in enumerate(messages)
        if message.collective == "reduce-scatter"
        and message.start < gather.stop
        and gather.start < message.stop
    ]


def _last_before(runs: Sequence[Span], span: Span) -> Span | None:
    """Return the run that ended last before ``span`` began."""
    return next((run for run in reversed(runs) if run.stop_ns <= span.start_ns), None)


def _first_after(runs: Sequence[Span], span: Span) -> Span | None:
    """Return the run that began first after ``span`` was over."""
    return next((run for run in runs if run.start_ns >= span.stop_ns), None)
