"""The steady state: simulate until iterations take equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from syncline.errors import MismatchError
from syncline.plan.plan import Plan
from syncline.plan.simulator.dag import Dag, Scenario, build, side_by_side
from syncline.plan.simulator.graph import Times
from syncline.plan.simulator.workers import ALIKE

FIRST_ITERATIONS = 4
MOST_ITERATIONS = 64
AGREEING = 3  # periods in a row that must be equal
WARM_UP = 4  # iterations left out of the mean if the period does not become constant
OFFSETS = 8  # number of simulated sets of offsets between jobs that share links


class Steady(NamedTuple):
    """A simulated run and its period; of jobs that share links, the first job's run."""

    dag: Dag
    start_ns: Times
    stop_ns: Times
    ends_ns: Times
    """When each iteration ended; under contention, only for the first half of the iterations."""
    period_ns: float
    """Time between the ends of iterations: the last, or the mean after warm-up if they differ."""
    error_ns: float  # standard error of the period; 0 if it is constant
    alone_ns: float | None = None
    """The period without the other jobs that share the links, if there are any."""
    offset_ns: tuple[float, ...] = ()
    """The period for each way in which such jobs are offset; :attr:`period_ns` is the mean."""

    @property
    def window(self) -> int:
        """Index of an iteration in the steady state, followed by another one if there is one."""
        return max(len(self.ends_ns) - 2, 0)

    @property
    def begin_ns(self) -> int:
        """When that iteration begins: the end of the one before it."""
        return int(self.ends_ns[self.window - 1]) if self.window else 0


def steady_state(scenario: Scenario, plan: Plan | None) -> Steady:
    """Simulate iterations, twice as many each time, until the last three take equally long.

    Without a plan nothing is exchanged. Of jobs that share links, the period is the mean over
    evenly spread offsets. With jitter, or if 64 iterations do not agree, it is the mean over
    iterations. If nothing overlaps the next iteration or is prefetched for it, one iteration is
    enough. The errors are those of :func:`syncline.plan.simulator.predict.predict`.
    """
    network = scenario.network
    gradients = scenario.profile.gradients
    if plan and (difference := plan.difference(gradients, network.workers)):
        raise MismatchError(f"this plan does not fit the profile and network: {difference}")
    if plan is None or network.jobs == 1:
        return _steady_run(scenario, plan, [0])
    by_itself = scenario._replace(network=msgspec.structs.replace(network, jobs=1))
    alone = _steady_run(by_itself, plan, [0])
    runs = [
        _steady_run(scenario, plan, [0, *(round(share * alone.period_ns) for share in shares)])
        for shares in _offsets(network.jobs - 1)
    ]
    periods_ns = tuple(run.period_ns for run in runs)
    mean_ns = math.fsum(periods_ns) / len(runs)
    return min(runs, key=lambda run: abs(run.period_ns - mean_ns))._replace(
        period_ns=mean_ns,
        error_ns=math.sqrt(math.fsum(run.error_ns**2 for run in runs)) / len(runs),
        alone_ns=alone.period_ns,
        offset_ns=periods_ns,
    )


def _offsets(others: int) -> list[list[float]]:
    """Return sets of offsets of the other jobs, as shares of a period: a Latin hypercube."""
    strata = np.tile(np.arange(OFFSETS), (others, 1))
    shuffled = np.random.default_rng(0).permuted(strata, axis=1)
    return ((shuffled.T + 0.5) / OFFSETS).tolist()  # type: ignore[no-any-return]


def _steady_run(scenario: Scenario, plan: Plan | None, offsets_ns: Sequence[int]) -> Steady:
    """Return the steady state of as many jobs as offsets, each beginning at its own."""
    profile, network, strategy, workers = scenario
    # Batches that several loaders read at the same time arrive together. Their iterations follow
    # one another quickly, then wait for the next batches. Only such rounds are alike.
    round_of = strategy.loaders if strategy.prefetch_data else 1
    by_need = plan is not None and plan.wait == "need"
    ahead = strategy.prefetch_data or strategy.prefetch_copy
    # Fast workers push while slow ones still update.
    drift_apart = strategy.exchange == "parameter-server" and workers != ALIKE
    most = max(MOST_ITERATIONS, 2 * FIRST_ITERATIONS * round_of)
    iterations = 1
    if workers.jitter:
        iterations = most
    elif len(offsets_ns) > 1 or by_need or drift_apart or ahead or profile.has_lanes:
        # Some part of an iteration can run beside the one before it.
        iterations = FIRST_ITERATIONS * round_of
    jobs = [scenario] * len(offsets_ns)
    if workers.jitter:  # each job draws its own
        seeds = range(workers.seed, workers.seed + len(offsets_ns))
        jobs = [scenario._replace(workers=msgspec.structs.replace(workers, seed=s)) for s in seeds]
    while True:
        dags = [build(job, plan, iterations) for job in jobs]
        dag = dags[0]
        graph = dag.graph if len(dags) == 1 else side_by_side(dags, offsets_ns)
        start_ns, stop_ns = graph.run()
        after = np.cumsum([len(each.graph) for each in dags])  # the first task after each job's
        split = list(zip(dags, np.split(stop_ns, after), strict=False))
        jobs_ns = np.array([each.ends_ns(times_ns) for each, times_ns in split])
        sent_ns = np.array([each.sent_ns(times_ns) for each, times_ns in split])
        start_ns, stop_ns = start_ns[: len(dag.graph)], stop_ns[: len(dag.graph)]
        if iterations == 1:
            ends_ns = np.array([stop_ns.max(initial=0)])
            return Steady(dag, start_ns, stop_ns, ends_ns, float(ends_ns[0]), 0.0)
        # Contention slows an iteration by those after it, which the last iterations do not have.
        slows = network.contention_under(by_need=by_need).slows or network.colocated
        if slows or len(dags) > 1:
            jobs_ns, sent_ns = jobs_ns[:, : iterations // 2], sent_ns[:, : iterations // 2]
        ends_ns = jobs_ns[0]
        # Messages may fall behind by a little more each time, until something waits for them.
        both_ns = np.stack([jobs_ns, sent_ns])
        last = (both_ns[..., round_of:] - both_ns[..., :-round_of])[..., -AGREEING:]
        spread = np.ptp(last, axis=(0, 2)) if last.size else math.inf
        agree = last.shape[2] == AGREEING and np.all(spread <= 1e-6 * last[0, :, -1])
        if agree and not workers.jitter:
            period_ns = float(last[0, :, -1].mean()) / round_of
            return Steady(dag, start_ns, stop_ns, ends_ns, period_ns, 0.0)
        if iterations >= most:
            periods = np.diff(both_ns, prepend=0)[..., min(WARM_UP * round_of, len(ends_ns) // 2) :]
            joined, sent = periods.mean(axis=1)
            error = float(joined.std(ddof=1)) / math.sqrt(len(joined))
            period_ns = float(joined.mean())
            if not workers.jitter:
                period_ns = max(period_ns, float(sent.mean()))
            return Steady(dag, start_ns, stop_ns, ends_ns, period_ns, error)
        iterations *= 2
