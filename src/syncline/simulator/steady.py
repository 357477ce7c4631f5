"""The steady state: simulate until the time from one iteration to the next settles."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.simulator.dag import Dag, build
from syncline.simulator.graph import Times
from syncline.simulator.strategy import Strategy
from syncline.simulator.workers import ALIKE, Workers

__all__ = ["Steady", "steady_state"]

FIRST_ITERATIONS = 4
MOST_ITERATIONS = 64
AGREEING = 3
"""Periods in a row that must be equal."""
WARM_UP = 4
"""Iterations left out of the mean where every one is different."""


class Steady(NamedTuple):
    """A simulated run, and the period that it settled to."""

    dag: Dag
    start_ns: Times
    stop_ns: Times
    ends_ns: Times
    """When each iteration ended; under contention, of the first half of them only."""
    period_ns: float
    """From one iteration's end to the next: the last period, or the mean after warm-up if periods
    differ."""
    error_ns: float
    """Standard error of the period; 0 where it settled."""
    settled: bool
    """The last periods were equal to a nanosecond a million."""

    @property
    def window(self) -> int:
        """An iteration in the steady state, with another one after it if there is one."""
        return max(len(self.ends_ns) - 2, 0)


def steady_state(
    profile: Profile,
    network: Network,
    plan: Plan | None,
    *,
    strategy: Strategy,
    workers: Workers,
) -> Steady:
    """Simulate iterations, twice as many each time, until the last three take equally long.

    Under contention only the first half of them counts: an iteration is slowed by those after it,
    which the last ones of a run lack. With several loaders, as many iterations as there are loaders
    count as one. If every iteration starts afresh, because the last has ended and nothing was
    fetched ahead, one is enough. If each iteration draws its own computing times, or 64 do not
    settle, the period is a mean.

    Raises:
        UserError: see :func:`syncline.simulator.dag.build`.
    """
    # Batches that several loaders read at the same time arrive together: their iterations follow
    # one another quickly, and then all wait for the next ones. Only such a round repeats.
    round_of = strategy.loaders if strategy.prefetch_data else 1
    most = max(MOST_ITERATIONS, 2 * FIRST_ITERATIONS * round_of)
    iterations = 1
    if workers.jitter:
        iterations = most
    elif _carries_over(profile, plan, strategy, workers):
        iterations = FIRST_ITERATIONS * round_of
    while True:
        dag = build(
            profile, network, plan, strategy=strategy, workers=workers, iterations=iterations
        )
        start_ns, stop_ns = dag.graph.run()
        ends_ns = dag.ends_ns(stop_ns)
        if iterations == 1:
            ends_ns = np.array([stop_ns.max(initial=0)])
            return Steady(dag, start_ns, stop_ns, ends_ns, float(ends_ns[0]), 0.0, True)
        # Under contention an iteration is slowed by those after it, which the last ones lack.
        known_ns = ends_ns[: len(ends_ns) // 2] if network.contention.slows else ends_ns
        last = (known_ns[round_of:] - known_ns[:-round_of])[-AGREEING:]
        agree = len(last) == AGREEING and int(last.max() - last.min()) <= 1e-6 * float(last[-1])
        if agree and not workers.jitter:
            return Steady(dag, start_ns, stop_ns, known_ns, float(last[-1]) / round_of, 0.0, True)
        if iterations >= most:
            periods = np.diff(known_ns, prepend=0)
            kept = periods[min(WARM_UP * round_of, len(periods) // 2) :]
            error = float(kept.std(ddof=1)) / math.sqrt(len(kept))
            return Steady(dag, start_ns, stop_ns, known_ns, float(kept.mean()), error, False)
        iterations *= 2


def _carries_over(
    profile: Profile, plan: Plan | None, strategy: Strategy, workers: Workers
) -> bool:
    """Return whether any part of an iteration can run beside the one before it."""
    on_need = plan is not None and plan.wait == "need"
    # Fast workers push while slow ones still update.
    apart = strategy.exchange == "parameter-server" and workers != ALIKE
    ahead = strategy.prefetch_data or strategy.prefetch_copy
    return on_need or apart or ahead or profile.has_lanes
