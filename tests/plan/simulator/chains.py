"""Networks of layers as dag-model has them, for tests of the simulator and of what is above it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.profile import Gradient, Operation, Phase, Profile, Resource
from syncline.plan.simulator.graph import TaskGraph
from syncline.plan.simulator.predict import predict_iteration_s

NS = 1e-9


def op(
    phase: Phase,
    ns: int,
    *after: int,
    name: str | None = None,
    resource: Resource = "device",
) -> Operation:
    return Operation(
        name=name or phase, phase=phase, duration_s=ns * NS, after=after, resource=resource
    )


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
        operations.append(
            op("backward", backward[layer], len(operations) - 1, name=f"b{layer + 1}")
        )
    operations.append(op("update", update, len(operations) - 1))
    gradients = tuple(
        Gradient(
            name=f"g{layer + 1}",
            elements=sizes[layer],
            ready_after=2 + count + (count - 1 - layer),
            needed_by=2 + layer,
        )
        for layer in reversed(range(count))
    )
    return Profile(
        model="chain",
        device="cuda",
        workers=1,
        iterations=1,
        operations=tuple(operations),
        gradients=gradients,
    )


def line(a_ns: int, ns_per_element: int = 1, *, workers: int = 4) -> Network:
    return Network.line(workers=workers, a_s=a_ns * NS, b_s_per_byte=ns_per_element * NS / 4)


def add_task(graph: TaskGraph, lane: int, duration_ns: int, after: Sequence[int] = ()) -> int:
    """Add a task that waits for others, and return its index."""
    task = graph.add_tasks(lane, duration_ns)
    graph.add_edges(after, task)
    return task


def period_ns(profile: Profile, network: Network, plan: Plan, **options: object) -> int:
    seconds = predict_iteration_s(profile, network, plan, **options)  # type: ignore[arg-type]
    return round(seconds / NS)


def plan_of(profile: Profile, spans: Sequence[tuple[int, int] | Message], **fields: object) -> Plan:
    """Return a plan of messages over elements (one byte each) of the gradients in ready order."""
    return Plan(
        planner="by hand",
        model=profile.model,
        workers=4,
        tensors=tuple(
            Tensor(name=g.name, elements=g.elements, dtype=g.dtype) for g in profile.gradients
        ),
        messages=tuple(
            s if isinstance(s, Message) else Message(start=s[0], stop=s[1]) for s in spans
        ),
        **fields,  # type: ignore[arg-type]
    )


layers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 3000), min_size=n, max_size=n)] * 3)
)
