"""What planners that hide communication behind the next forward pass reckon with."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.simulator.steady import steady_state
from syncline.simulator.strategy import STRATEGIES
from syncline.simulator.workers import ALIKE

__all__ = ["Terms", "terms"]


class Terms(NamedTuple):
    """One round of gradients, on a clock that starts with the backward pass.

    In the steady state every round is alike: all messages of a round have arrived when the next
    backward pass begins, because each holds a gradient that some operation before it waits for. So
    the period is the time from one backward pass to the next,

        ``max(base, max over messages (arrival + tail))``,

    which is the objective of PACE (Theorem 1) with ``sum of f_j over L_i`` as the tail.
    """

    ready_ns: list[int]
    """When each gradient is ready; non-decreasing, in the profile's order of gradients."""
    size_bytes: list[int]
    """Bytes of each gradient."""
    tail_ns: list[int]
    """From the moment that the gradient has arrived to the next backward pass, if nothing else
    holds up the forward pass: the update and the operations from the one that needs it on."""
    base_ns: int
    """The period without communication."""


def terms(profile: Profile) -> Terms:
    """Return the terms of a profile's gradients, the update spread over the forward pass."""
    phases = [operation.phase for operation in profile.operations]
    later = ("backward", "finalize", "update")
    start = next((i for i, p in enumerate(phases) if p in later), len(phases))
    gates = profile.gates_ns()
    finish = profile.finish_ns()
    forward_ns = max(finish[:start], default=0)

    # The longest way from each forward operation to the backward pass, over dependencies and over
    # the order of its lane.
    tail = [0] * (start + 1)
    after_it: list[list[int]] = [[] for _ in range(start)]
    previous: dict[str, int] = {}
    for index in range(start):
        operation = profile.operations[index]
        for before in operation.after:
            after_it[before].append(index)
        if operation.lane in previous:
            after_it[previous[operation.lane]].append(index)
        previous[operation.lane] = index
    own_ns = [o.duration_ns + gates.get(i, 0) for i, o in enumerate(profile.operations)]
    for index in reversed(range(start)):
        tail[index] = own_ns[index] + max((tail[later] for later in after_it[index]), default=0)
    if start < len(phases):
        gate = gates.get(start, 0)
        tail = [ns + gate for ns in tail[:-1]] + [gate]
    ready = [max(ns - forward_ns, 0) for ns in profile.ready_ns()]
    return Terms(
        ready_ns=list(itertools.accumulate(ready, max)),
        size_bytes=[gradient.size_bytes for gradient in profile.gradients],
        tail_ns=[tail[min(need, start)] for need in profile.need_operations()],
        base_ns=_base_ns(profile, finish),
    )


def _base_ns(profile: Profile, finish_ns: list[int]) -> int:
    """Return the period without communication: shorter than an iteration if the host runs ahead."""
    if profile.has_host:
        network = Network.line(workers=1, a_s=0.0, b_s_per_byte=0.0)
        loop = STRATEGIES["loop"]
        alone = steady_state(profile, network, None, strategy=loop, workers=ALIKE)
        return int(alone.period_ns)
    update_ns = sum(o.duration_ns for o in profile.operations if o.is_device_update)
    return max(finish_ns, default=0) + sum(profile.gates_ns().values()) - update_ns
