"""Contention between computing and messages, fitted to measured iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.profile import COMPUTING, WAIT, Operation, Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.steady import steady_state

Floats = NDArray[np.float64]

MANY = 2
"""Plans with more than this many times the DDP baseline's messages show the CPU time of each."""
LARGEST = 4.0  # a larger factor is an error of the model, not contention
EXACT = 1e-3  # a difference below this share of an iteration is the error of a fit
ROUNDS = 4  # Gauss-Newton steps of the fit of the computing time that messages take
PRECISION = 2e-4  # width of the interval of factors at which a root search ends
MOST_STEPS = 26
TOLERANCE = 1e-4
"""Share of an iteration by which a prediction may differ from what a factor is fitted to."""


class Measured(NamedTuple):
    """Iterations of a training under one plan."""

    plan: Plan
    iteration_s: float
    noise_s: float = 0.0  # a smaller difference from a prediction is noise
    slowdown_s: float | None = None
    """Seconds that a worker computed longer than in the profile: in forward and backward pass under
    the DDP baseline, in the whole iteration under the engine. None if it was not measured."""


def corrected_by_baseline(
    baseline: Measured, profile: Profile, network: Network
) -> tuple[Profile, Network, Measured]:
    """Return the profile and the network corrected by the DDP baseline, and the baseline itself.

    Where contention cannot explain the measured times, the passes, the wait for the slowest worker
    or the cost of messages are scaled so that the baseline is predicted as measured; the page
    "Algorithms and costs" has the rules. The network's own contention is ignored.
    """
    contention = _fitted(profile, network, [baseline])
    if baseline.slowdown_s and (baseline.slowdown_s < 0 or contention.computing == LARGEST):
        alone_s = profile.phase_s(*COMPUTING)
        factor = max(alone_s + baseline.slowdown_s, 0.0) / alone_s
        profile = _changed(profile, lambda o: o.phase in COMPUTING, lambda s: s * factor)
        baseline = baseline._replace(slowdown_s=0.0)
        contention = _fitted(profile, network, [baseline])
    if 1 < contention.exchange < LARGEST:
        return profile, network, baseline
    computing = 1.0 if baseline.slowdown_s is None else contention.computing

    def over_s(faster: float) -> float:
        slowed = msgspec.structs.replace(network, contention=Contention(computing=computing))
        predicted_s = predict_iteration_s(profile, slowed.faster(faster), baseline.plan)
        return predicted_s - baseline.iteration_s

    longer_s = over_s(1.0)
    profile = _changed(profile, lambda o: o.name == WAIT, lambda s: max(s - longer_s, 0.0))
    if over_s(1.0) > EXACT * baseline.iteration_s:
        faster = _root(lambda faster: -over_s(faster), TOLERANCE * baseline.iteration_s)
        if faster < LARGEST:  # otherwise messages are not the reason
            network = network.faster(faster)
    return profile, network, baseline


def _changed(
    profile: Profile, chosen: Callable[[Operation], bool], change: Callable[[float], float]
) -> Profile:
    """Return the profile with other durations of some operations."""
    operations = tuple(
        msgspec.structs.replace(o, duration_s=change(o.duration_s)) if chosen(o) else o
        for o in profile.operations
    )
    return msgspec.structs.replace(profile, operations=operations)


def fit_contention(profile: Profile, network: Network, measured: Sequence[Measured]) -> Network:
    """Return the network with the contention that explains measured iterations.

    The engine sends the messages of plans that wait on need, and DDP's reducer all others. So each
    kind is fitted by itself; a kind that was not measured keeps the network's contention, and so
    does DDP's reducer if its messages overlap too little to show that. The first plan under the
    reducer is the DDP baseline. Each factor is between 1 and 4. The page "Algorithms and costs"
    says how they are fitted.
    """
    by_need = [m for m in measured if m.plan.wait == "need"]
    others = [m for m in measured if m.plan.wait != "need"]
    if by_need:
        found = _fitted(profile, network, by_need)
        network = msgspec.structs.replace(network, contention_by_need=found)
    if others:
        baseline_messages = len(others[0].plan.messages)
        many = [m for m in others if len(m.plan.messages) > MANY * baseline_messages]
        few = [m for m in others if m not in many]
        if not network.contention.slows or _show_contention(profile, network, few):
            found = _fitted(profile, network, few)
            network = msgspec.structs.replace(network, contention=found)
        if many:
            found = _with_handling(profile, network, many, baseline_messages)
            network = msgspec.structs.replace(network, contention=found)
    return network


def _show_contention(profile: Profile, network: Network, measured: Sequence[Measured]) -> bool:
    """Whether the network's contention changes predictions by more than the noise of the times."""
    free = msgspec.structs.replace(network, contention=Contention())

    def change_s(plan: Plan) -> float:
        with_s, without_s = (predict_iteration_s(profile, n, plan) for n in (network, free))
        return with_s - without_s

    return any(abs(change_s(m.plan)) > m.noise_s for m in measured)


def _with_handling(
    profile: Profile, network: Network, many: Sequence[Measured], baseline_messages: int
) -> Contention:
    """Return the network's contention with a time for each message beyond the baseline's."""
    more = [len(m.plan.messages) - baseline_messages for m in many]
    late_s = [m.iteration_s - predict_iteration_s(profile, network, m.plan) for m in many]
    weight = sum(count * count for count in more)
    cost_s = math.fsum(count * late for count, late in zip(more, late_s, strict=True))
    return msgspec.structs.replace(
        network.contention, per_message_s=max(cost_s / weight, 0.0), free_messages=baseline_messages
    )


def _fitted(profile: Profile, network: Network, measured: Sequence[Measured]) -> Contention:
    """Return the contention that explains measured iterations, at least one, all of one kind."""
    timed = [(m.plan, m.slowdown_s) for m in measured if m.slowdown_s is not None]
    counts = [len(plan.messages) for plan, _ in timed]
    wanted_s = math.fsum(max(slowdown_s, 0.0) for _, slowdown_s in timed)

    def with_factors(computing: float, exchange: float, per_message_s: float = 0.0) -> Network:
        contention = Contention(
            computing=computing, exchange=exchange, per_message_s=per_message_s, fitted=True
        )
        return msgspec.structs.replace(network, contention=contention, contention_by_need=None)

    def slowdowns_s(computing: float, exchange: float, per_message_s: float) -> list[float]:
        network = with_factors(computing, exchange, per_message_s)
        return [_slowdown_s(profile, network, plan) for plan, _ in timed]

    def by_messages(exchange: float) -> Network:
        """Return the network fitted to the slowdowns under few messages and many (Gauss-Newton)."""
        slower, per_message_s = 0.1, 0.0
        step, step_s = 0.1, 0.01 * profile.phase_s(*COMPUTING) / max(counts)
        wanted = np.array([slowdown_s for _, slowdown_s in timed])
        for _ in range(ROUNDS):
            found = np.array(slowdowns_s(1 + slower, exchange, per_message_s))
            more_slower = np.array(slowdowns_s(1 + slower + step, exchange, per_message_s))
            more_each = np.array(slowdowns_s(1 + slower, exchange, per_message_s + step_s))
            by_slower, by_message = (more_slower - found) / step, (more_each - found) / step_s
            goal_s = wanted - found + by_slower * slower + by_message * per_message_s
            slower, per_message_s = _least_squares(by_slower, by_message, goal_s)
            slower = min(slower, LARGEST - 1 - step)
        return with_factors(1 + slower, exchange, per_message_s)

    def by_slowdown(exchange: float) -> Network:
        """Return the network with this factor of messages, and computing's fitted to slowdowns."""
        if not timed:
            return with_factors(exchange, exchange)

        def slowdown_s(computing: float) -> float:
            slowed = with_factors(computing, exchange)
            return math.fsum(_slowdown_s(profile, slowed, plan) for plan, _ in timed) - wanted_s

        tolerance_s = TOLERANCE * min(m.iteration_s for m in measured)
        return with_factors(_root(slowdown_s, tolerance_s), exchange)

    def differences(candidate: Network) -> list[float]:
        return [predict_iteration_s(profile, candidate, m.plan) - m.iteration_s for m in measured]

    def mean_error(candidate: Network) -> float:
        pairs = zip(differences(candidate), measured, strict=True)
        return math.fsum(seconds / m.iteration_s for seconds, m in pairs)

    by_need = measured[0].plan.wait == "need"
    several = by_need and len(set(counts)) > 1 and profile.phase_s(*COMPUTING) > 0
    first = by_messages(1.0) if several else by_slowdown(1.0)
    noise_s = [max(m.noise_s, EXACT * m.iteration_s) for m in measured]
    found = zip(differences(first), noise_s, strict=True)
    if all(abs(seconds) <= noise for seconds, noise in found):
        return first.contention
    if not several:
        return by_slowdown(_root(lambda e: mean_error(by_slowdown(e)), TOLERANCE)).contention
    computing, per_message_s = first.contention.computing, first.contention.per_message_s
    return by_messages(
        _root(lambda e: mean_error(with_factors(computing, e, per_message_s)), TOLERANCE)
    ).contention


def _least_squares(a: Floats, b: Floats, wanted: Floats) -> tuple[float, float]:
    """Return ``(x, y)``, both at least 0, with the least ``sum((a x + b y - wanted)^2)``."""
    aa, ab, bb, aw, bw = (
        float(p @ q) for p, q in ((a, a), (a, b), (b, b), (a, wanted), (b, wanted))
    )
    independent = aa * bb - ab * ab
    if independent > 1e-9 * aa * bb:
        x, y = (bb * aw - ab * bw) / independent, (aa * bw - ab * aw) / independent
        if x >= 0 and y >= 0:
            return x, y
    alone = (max(aw / aa, 0.0) if aa else 0.0, 0.0), (0.0, max(bw / bb, 0.0) if bb else 0.0)
    return min(alone, key=lambda found: float(np.sum((a * found[0] + b * found[1] - wanted) ** 2)))


def _root(increasing: Callable[[float], float], tolerance: float) -> float:
    """Return the factor at which a function crosses 0, or the nearest end of the range.

    Regula falsi, the Illinois variant; a simulated time is nearly linear in a factor. Source: M.
    Dowell and P. Jarratt, A modified regula falsi method for computing the root of an equation, BIT
    11 (1971).
    """
    low, high = 1.0, LARGEST
    if (below := increasing(low)) >= 0:
        return low
    if (above := increasing(high)) <= 0:
        return high
    side = 0  # the value at an end that is kept twice in a row is halved
    for _ in range(MOST_STEPS):
        factor = (low * above - high * below) / (above - below)
        value = increasing(factor)
        if abs(value) <= tolerance or high - low <= PRECISION:
            break
        if value < 0:
            low, below = factor, value
            above = above / 2 if side < 0 else above
        else:
            high, above = factor, value
            below = below / 2 if side > 0 else below
        side = -1 if value < 0 else 1
    return round(factor, 4)


def _slowdown_s(profile: Profile, network: Network, plan: Plan) -> float:
    """Return how much longer forward and backward pass take than with nothing in flight."""
    steady = steady_state(Scenario(profile, network), plan)
    slowdown_ns = 0
    for index, slot in enumerate(steady.dag.layout.slots):
        if slot.operation is None or slot.deferred_update:
            continue
        if profile.operations[slot.operation].phase in COMPUTING:
            task = int(steady.dag.slot_tasks(index)[steady.window, 0])
            slowdown_ns += int(steady.stop_ns[task] - steady.start_ns[task]) - slot.duration_ns
    return slowdown_ns / NS_PER_S
