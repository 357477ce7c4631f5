"""What planner tests share: instances, and evaluators that know nothing of the product's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import Planner
from syncline.plan.profile import Gradient, Profile
from syncline.plan.quantities import BYTES_PER_ELEMENT
from syncline.plan.simulator.bound import terms
from syncline.plan.simulator.predict import predict_iteration_s
from tests.strategies import in_sequence

Cost = Callable[[int], float]


def finish(ready: Sequence[float], sizes: Sequence[int], cuts: Sequence[int], cost: Cost) -> float:
    """Return when the last message ends: MG-WFBP, Eq. 7, message by message.

    A tensor without elements is in the message of the element before it, whatever the cuts say;
    leading ones are in the first message.
    """
    ends = set(cuts)
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
    done = list(itertools.accumulate(round(o.duration_s * 1e9) for o in profile.operations))
    return [done[g.ready_after] for g in profile.gradients]


def iteration_s(profile: Profile, network: Network, planner: Planner) -> float:
    return predict_iteration_s(profile, network, planner.plan(profile, network))


def assert_best(
    planner: Planner, profile: Profile, network: Network, others: Iterable[Planner]
) -> float:
    """Check that no plan of the others is predicted to be faster than ours; return our time."""
    ours = iteration_s(profile, network, planner)
    for other in others:
        assert ours <= iteration_s(profile, network, other), (profile.model, other.NAME)
    return ours


def spans(plan: Plan) -> list[tuple[int, int]]:
    """Return the first and the last element but one of each message."""
    return [(m.start, m.stop) for m in plan.messages]


def chain(
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
    steps = [("f", "forward", s) for s in forward_s] + [("b", "backward", s) for s in backward_s]
    gradients = (
        Gradient(
            name=f"g{layers - 1 - i}",
            elements=count,
            dtype=dtypes[i] if dtypes else "float32",
            ready_after=layers + i,
            needed_by=layers - 1 - i,
        )
        for i, count in enumerate(elements)
    )
    return in_sequence(steps, gradients)


UNIT_LINE = Network.line(workers=2, a_s=0, b_s_per_byte=1 / 4)  # a second an element
FIGURE_2 = chain([1, 1, 1], [4, 2, 1], [2, 1, 1])
"""PACE, Fig. 2: AR_1 is long and ready first, AR_3 is needed first."""


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
    known = terms(profile)
    clock, end = 0.0, float(known.base_ns)
    owner = [i for i, g in enumerate(profile.gradients) for _ in range(g.elements)]
    for message in plan.messages:
        held = owner[message.start : message.stop]
        taken = sum(BYTES_PER_ELEMENT[profile.gradients[i].dtype] for i in held)
        clock = max(clock, *(known.ready_ns[i] for i in held)) + cost(taken)
        end = max(end, *(clock + known.tail_ns[i] for i in held))
    return end
