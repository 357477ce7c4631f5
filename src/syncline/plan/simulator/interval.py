"""The 90 % prediction interval of an iteration's time."""

from __future__ import annotations

import math

from syncline.plan.plan import Plan
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.transformations import with_compute_scale

SIMULATED = 1.08
"""Nine of ten iterations take what is simulated within this factor, if the profile, the network and
the contention were measured."""
NOMINAL = 2.1
"""Nine of ten exchanges over a link of which only the nominal rate is known take at most this many
times what the formula says."""
LARGEST_MISFIT = 0.1
"""A fit's mean error counts up to here: small messages, which cost little, weigh in it as much as
large ones."""
LARGEST = 2.0  # logarithm of the largest factor that is told; beyond it, nothing is known
NINE_OF_TEN = 1.645  # standard errors to either side


def interval_s(
    iteration_s: float,
    computation_s: float,
    communication_s: float,
    scenario: Scenario,
    plan: Plan,
) -> tuple[float, float]:
    """Return the ends of the interval that holds nine of ten measured iterations.

    The times are the prediction's. The page "Algorithms and costs" says what the factors rest on.
    """
    profile, network = scenario.profile, scenario.network
    noise, misfit = 0.0, min(network.fit_error or 0.0, LARGEST_MISFIT)
    if (baseline := profile.baseline) is not None and baseline.iteration_s > 0:
        noise = NINE_OF_TEN * baseline.noise_s / baseline.iteration_s
    shared = math.exp(min(math.hypot(math.log(SIMULATED), noise, misfit), LARGEST))
    known = 1.0 if network.is_measured else network.known_within
    less, more = (1.0, NOMINAL) if known is None else (1 / known, known)

    def simulated_s(exchange: float, computing: float) -> float:
        if exchange == 1:
            return iteration_s * computing
        slower = with_compute_scale(profile, computing)
        changed = scenario._replace(profile=slower, network=network.faster(1 / exchange))
        return steady_state(changed, plan).period_ns / NS_PER_S

    shortest_s = simulated_s(less, 1 / shared)
    if network.contention_under(by_need=plan.wait == "need").fitted:
        return min(shortest_s, iteration_s), max(simulated_s(more, shared), iteration_s)
    # Computing and messages may slow each other so much that nothing is gained by overlapping them.
    # Other jobs' messages are in the way, too.
    waiting_s = max(communication_s, iteration_s - computation_s)
    longest_s = computation_s * shared + waiting_s * more
    return min(shortest_s, iteration_s), max(longest_s, iteration_s * shared)
