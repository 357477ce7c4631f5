"""Networks of layers as dag-model has them, for tests of the simulator and of what is above it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Gradient, Operation, Phase, Profile, Resource
from syncline.plan.simulator.graph import TaskGraph
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.strategy import STRATEGIES, Strategy
from syncline.plan.simulator.workers import ALIKE, Workers

NS = 1e-9

Times = tuple[list[int], list[int], list[int]]
"""Forward times, backward times and sizes of layers 1 to L."""
Span = tuple[int, int] | tuple[int, int, str] | Message
"""Where a message starts and stops, and its collective."""


def op(
    phase: Phase, ns: int, *after: int, name: str | None = None, resource: Resource = "device"
) -> Operation:
    return Operation(
        name=name or phase, phase=phase, duration_s=ns * NS, after=after, resource=resource
    )


def gradient(elements: int, ready: int, needed_by: int | None = None, name: str = "g") -> Gradient:
    return Gradient(name=name, elements=elements, ready_after=ready, needed_by=needed_by)


def job(operations: Sequence[Operation], *gradients: Gradient) -> Profile:
    given: Any = {"model": "job", "device": "cuda", "workers": 1, "iterations": 1}
    return Profile(**given, operations=tuple(operations), gradients=gradients)


def chain(
    forward: Sequence[int],
    backward: Sequence[int],
    sizes: Sequence[int],
    *,
    io: int = 0,
    h2d: int = 0,
    update: int = 0,
) -> Profile:
    """Return dag-model's network: layer l has its l-th forward time, backward time and size.

    The operations are fetch, copy, forward 1 to L, backward L to 1, update; a gradient has
    as many elements as it is to take nanoseconds on a line of 1 ns an element.
    """
    count = len(forward)
    operations = [op("data", io), op("copy", h2d, 0)]
    operations += [op("forward", ns, i + 1, name=f"f{i + 1}") for i, ns in enumerate(forward)]
    for layer in reversed(range(count)):
        operations += [op("backward", backward[layer], len(operations) - 1, name=f"b{layer + 1}")]
    operations.append(op("update", update, len(operations) - 1))
    gradients = (
        gradient(sizes[layer], 1 + 2 * count - layer, 2 + layer, f"g{layer + 1}")
        for layer in reversed(range(count))
    )
    return job(operations, *gradients)


HALVES = chain([50, 50], [50, 50], [100, 100])
"""g2 is ready at 150, g1 at 200; each takes 100 to exchange."""
CUT = [(0, 50), (100, 200), (50, 100)]
"""Its elements as messages by need: half of g2 fills the line before g1, the rest after it."""


def line(a_ns: int, ns_per_element: int = 1, *, workers: int = 4) -> Network:
    return Network.line(workers=workers, a_s=a_ns * NS, b_s_per_byte=ns_per_element * NS / 4)


def add_task(graph: TaskGraph, lane: int, duration_ns: int, after: Sequence[int] = ()) -> int:
    """Add a task that waits for others, and return its index."""
    task = graph.add_tasks(lane, duration_ns)
    graph.add_edges(after, task)
    return task


def period_ns(
    profile: Profile,
    network: Network,
    plan: Plan | None = None,
    *,
    strategy: str | Strategy = "loop",
    workers: Workers = ALIKE,
) -> int:
    """Return the period under a plan, or else under wait-free backpropagation."""
    seconds = predict_iteration_s(
        profile,
        network,
        plan or Wfbp().plan(profile, network),
        strategy=STRATEGIES[strategy] if isinstance(strategy, str) else strategy,
        workers=workers,
    )
    return round(seconds / NS)


def plan_of(profile: Profile, spans: Sequence[Span], *, workers: int = 4, **fields: object) -> Plan:
    """Return a plan of messages over elements (one byte each) of the gradients in ready order."""
    keys = ("start", "stop", "collective")
    return Plan(
        planner="by hand",
        model=profile.model,
        workers=workers,
        tensors=profile.tensors,
        messages=tuple(
            span if isinstance(span, Message) else Message(**dict(zip(keys, span, strict=False)))
            for span in spans
        ),
        **fields,  # type: ignore[arg-type]
    )


layers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 3000), min_size=n, max_size=n)] * 3)
)


@st.composite
def pieces(draw: st.DrawFn, profile: Profile) -> list[tuple[int, int]]:
    """Draw where messages start and stop, which merge and split gradients in any order."""
    total = sum(g.elements for g in profile.gradients)
    cuts = draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=8))
    bounds = [0, *sorted(cut for cut in cuts if cut < total), total]
    return draw(st.permutations(list(itertools.pairwise(bounds))))
