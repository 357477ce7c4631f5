"""Timelines in the Chrome trace event format, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.timeline import NOT_COMPUTING, Row, Span, Timeline, rows

NS_PER_US = 1000


class Flow(NamedTuple):
    """An arrow from one span to another that began after it ended."""

    source: Span
    target: Span


def flows(timeline: Timeline, profile: Profile, plan: Plan) -> list[Flow]:
    """Return the arrows into and out of each message.

    An arrow into a message comes from the operation that made its last gradient ready or, for an
    all-gather, from the reduce-scatters that it completes. An arrow out of it goes to the first
    unpacking or update after it or, if the plan waits on need, to the operations of the next
    iteration that read its parameters. Spans are matched by label and order.
    """
    sending = [span for span in timeline.spans if span.kind == "message"]
    computing = [span for span in timeline.spans if span.kind not in NOT_COMPUTING]
    operation_runs = _matched([o.name for o in profile.operations], computing)
    labels = [plan.label(tensors) for tensors in plan.message_tensors()]
    # By label, or by order if no label is known.
    known = not {span.label for span in sending}.isdisjoint(labels)
    message_runs = _matched(labels if known else [""] * len(labels), sending, by_label=known)
    gradients = {gradient.name: gradient for gradient in profile.gradients}
    needs = dict(zip(gradients, profile.need_operations(), strict=True))
    updates = [span for span in computing if span.kind in ("finalize", "update")]
    on_device = [span for span in updates if span.lane != "host"]  # the host only launches them
    updates = sorted(on_device or updates, key=lambda span: span.start_ns)
    found: list[Flow] = []
    for message, tensors, sent in zip(
        plan.messages, plan.message_tensors(), message_runs, strict=True
    ):
        names = [plan.tensors[t].name for t in tensors if plan.tensors[t].name in gradients]
        for span in sent:
            if message.collective == "all-gather":
                sources = [
                    runs
                    for runs, part in zip(message_runs, plan.messages, strict=True)
                    if part.collective == "reduce-scatter"
                    and part.start < message.stop
                    and message.start < part.stop
                ]
            elif names:
                ready = max(gradients[name].ready_after for name in names)
                sources = [_runs_until(ready, profile, operation_runs)]
            else:
                sources = []
            before = ([s for s in runs if s.stop_ns <= span.start_ns] for runs in sources)
            found += [Flow(runs[-1], span) for runs in before if runs]
            if message.collective == "reduce-scatter":
                continue
            if plan.wait == "need":
                readers = [operation_runs[i] for i in sorted({needs[name] for name in names})]
            else:
                readers = [updates]
            after = ([t for t in runs if t.start_ns >= span.stop_ns] for runs in readers)
            found += [Flow(span, runs[0]) for runs in after if runs]
    return found


def _runs_until(operation: int, profile: Profile, runs: Sequence[list[Span]]) -> list[Span]:
    """Return an operation's runs or, if it has no span, those of the one before it on its lane."""
    lane = profile.operations[operation].lane
    while operation and not (runs[operation] and profile.operations[operation].lane == lane):
        operation -= 1
    return runs[operation]


def _matched(
    labels: Sequence[str], spans: Sequence[Span], *, by_label: bool = True
) -> list[list[Span]]:
    """Return the spans of each label, by start; a label may come several times.

    A lane runs the labels of an iteration in their order, iteration after iteration. If the spans
    on a lane are not a whole number of iterations, they cannot be matched and are left out.
    """
    lanes: dict[str, dict[str, list[Span]]] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, s.stop_ns)):
        lanes.setdefault(span.label if by_label else "", {}).setdefault(span.lane, []).append(span)
    counts, seen = Counter(labels), Counter[str]()
    matched = []
    for label in labels:
        found = [
            span
            for runs in lanes.get(label, {}).values()
            if len(runs) % counts[label] == 0
            for span in runs[seen[label] :: counts[label]]
        ]
        matched.append(sorted(found, key=lambda span: span.start_ns))
        seen[label] += 1
    return matched


def to_chrome_trace(
    timelines: Iterable[Timeline], *, profile: Profile | None = None, plan: Plan | None = None
) -> str:
    """Return the timelines as one trace: one process per timeline, one thread per row of spans.

    Overlapping spans of a lane are put on several threads: the format takes overlapping events of
    one thread for nested calls, and Perfetto drops those that overlap in part. If it is known when
    messages were ready, a counter shows how many are ready and have not been sent.

    Each timeline starts at time 0. A profile and a plan together add the arrows of :func:`flows`;
    in timelines of other plans no message is matched. Times are microseconds with three decimals.
    """
    events: list[dict[str, Any]] = []
    arrows = 0
    for pid, timeline in enumerate(timelines, start=1):
        threads = rows(timeline)
        events += _metadata("process", pid, 0, f"{timeline.source}: {timeline.name}", pid)
        for tid, row in enumerate(threads, start=1):
            events += _metadata("thread", pid, tid, row.name, tid)
            events += [_complete(span, pid, tid) for span in row.spans]
        events += _queue(timeline, pid)
        if profile is not None and plan is not None:
            found = flows(timeline, profile, plan)
            events += _arrows(found, threads, pid, first_id=arrows)
            arrows += len(found)
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return msgspec.json.encode(trace).decode() + "\n"


def _metadata(of: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, Any]]:
    at = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**at, "name": f"{of}_name", "args": {"name": name}},
        {**at, "name": f"{of}_sort_index", "args": {"sort_index": place}},
    ]


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"kind": span.kind}
    if span.size_bytes is not None:
        args["bytes"] = span.size_bytes
    if span.ready_ns is not None:
        args["ready_us"] = span.ready_ns / NS_PER_US
        args["issued_us"] = span.start_ns / NS_PER_US
        args["finished_us"] = span.stop_ns / NS_PER_US
    event = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": span.label,
        "cat": span.kind,
        "ts": span.start_ns / NS_PER_US,
        "dur": (span.stop_ns - span.start_ns) / NS_PER_US,
        "args": args,
    }
    if span.kind == "wait":
        # The name distinguishes it from the operation that waits; chrome://tracing draws it in red.
        event |= {"name": f"wait: {span.label}", "cname": "terrible"}
    return event


def _queue(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    """Return a counter of the messages that are ready and have not been sent."""
    changes = Counter[int]()
    for span in timeline.spans:
        if span.ready_ns is not None:
            changes[span.ready_ns] += 1
            changes[span.start_ns] -= 1
    queued, events = 0, []
    for at_ns, change in sorted(changes.items()):
        queued += change
        at = {"ph": "C", "pid": pid, "tid": 0, "name": "ready and not sent"}
        events.append({**at, "ts": at_ns / NS_PER_US, "args": {"messages": queued}})
    return events


def _arrows(
    found: Iterable[Flow], threads: Sequence[Row], pid: int, *, first_id: int
) -> list[dict[str, Any]]:
    thread = {id(span): tid for tid, row in enumerate(threads, start=1) for span in row.spans}
    events: list[dict[str, Any]] = []
    for number, (source, target) in enumerate(found, start=first_id):
        # An arrow binds to the span that is open at its time: here, in the last nanosecond.
        leaves_ns = max(source.stop_ns - 1, source.start_ns)
        for phase, span, at_ns in (("s", source, leaves_ns), ("f", target, target.start_ns)):
            event = {
                "ph": phase,
                "id": number,
                "pid": pid,
                "tid": thread[id(span)],
                "name": "gradient",
                "cat": "flow",
                "ts": at_ns / NS_PER_US,
            }
            events.append(event if phase == "s" else event | {"bp": "e"})
    return events
