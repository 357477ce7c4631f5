"""What planner tests share: an evaluator that knows nothing of the product's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.bound import terms
from syncline.plan.simulator.predict import predict

Cost = Callable[[int], float]


def finish(
    ready: Sequence[float], sizes: Sequence[int], last_tensors: Sequence[int], cost: Cost
) -> float:
    """Return when the last message ends: MG-WFBP, Eq. 7, message by message.

    A tensor without elements is in the message of the element before it, whatever the cuts say;
    leading ones are in the first message.
    """
    ends = set(last_tensors)
    clock: float = 0
    held, wait, cut = 0, 0.0, False  # the bytes of the message and when its last tensor is ready
    for index, size in enumerate(sizes):
        if size:
            if cut and held:
                clock = max(clock, wait) + cost(held)
                held = 0
            cut = False
        held += size
        wait = ready[index]
        cut = cut or index in ends
    return max(clock, wait) + cost(held)


def partitions(count: int) -> Iterator[list[int]]:
    """Yield every way to cut ``count`` tensors into messages: 2^(count - 1)."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        yield [i for i, cut in enumerate(cuts) if cut] + [count - 1]


def ready_ns(profile: Profile) -> list[int]:
    """Return when each gradient is ready: the sum of what runs until then."""
    return [
        sum(round(o.duration_s * 1e9) for o in profile.operations[: g.ready_after + 1])
        for g in profile.gradients
    ]


def iteration_s(profile: Profile, network: Network, planner: object) -> float:
    """Return the predicted iteration time of a planner's plan."""
    plan = planner.plan(profile, network)  # type: ignore[attr-defined]
    return predict(profile, network, plan).prediction.iteration_s


def chain(
    *,
    backward_s: Sequence[float],
    elements: Sequence[int],
    forward_s: Sequence[float],
    dtypes: Sequence[str] = (),
) -> Profile:
    """Return a chain of layers, one gradient each.

    Args:
        backward_s: of each layer, in the order of the backward pass: the last layer first.
        elements: of each gradient, in the same order.
        forward_s: of each layer, in the order of the forward pass: the first layer first.
        dtypes: of each gradient; float32 if not given.
    """
    layers = len(forward_s)
    last = layers - 1
    forward = [
        Operation(name=f"f{i}", phase="forward", duration_s=s, after=(i - 1,) if i else ())
        for i, s in enumerate(forward_s)
    ]
    backward = [
        Operation(
            name=f"b{layers - 1 - i}", phase="backward", duration_s=s, after=(layers + i - 1,)
        )
        for i, s in enumerate(backward_s)
    ]
    return Profile(
        model="chain",
        device="cpu",
        workers=2,
        iterations=1,
        operations=(*forward, *backward),
        gradients=tuple(
            Gradient(
                name=f"g{last - i}",
                elements=count,
                dtype=dtypes[i] if dtypes else "float32",
                ready_after=layers + i,
                needed_by=last - i,
            )
            for i, count in enumerate(elements)
        ),
    )


@st.composite
def chains(draw: st.DrawFn, *, max_layers: int = 8, min_elements: int = 1) -> Profile:
    """Draw a :func:`chain`; equal ready times and short forward passes are common."""
    layers = draw(st.integers(1, max_layers))

    def values(*kinds: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(st.one_of(*kinds), min_size=layers, max_size=layers))

    times = (st.just(0), st.integers(0, 50), st.integers(0, 5000))
    return chain(
        backward_s=[ns / 1e9 for ns in values(*times)],
        elements=values(st.integers(min_elements, 3), st.integers(min_elements, 1500)),
        forward_s=[ns / 1e9 for ns in values(*times)],
    )


def period_ns(profile: Profile, plan: Plan, cost: Cost) -> float:
    """Return the period of a plan of all-reduces that waits on need, one message at a time.

    The messages of a round are sent in order from the start of the backward pass on; the next
    backward pass begins when each gradient has arrived and what it holds up has been computed.
    """
    ready_ns, size_bytes, tail_ns, base_ns = terms(profile)
    clock, end = 0.0, float(base_ns)
    starts = list(itertools.accumulate((g.elements for g in profile.gradients), initial=0))
    for message in plan.messages:
        held = [
            i
            for i in range(len(size_bytes))
            if starts[i] < message.stop and starts[i + 1] > message.start
        ]
        taken = sum(
            (min(message.stop, starts[i + 1]) - max(message.start, starts[i]))
            * (size_bytes[i] // (starts[i + 1] - starts[i]))
            for i in held
        )
        clock = max(clock, *(ready_ns[i] for i in held)) + cost(taken)
        end = max(end, *(clock + tail_ns[i] for i in held))
    return end
