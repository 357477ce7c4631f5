"""What planner tests share: an evaluator that knows nothing of the product's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.simulator.predict import predict

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
