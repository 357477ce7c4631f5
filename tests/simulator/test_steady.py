"""The steady state is found, not assumed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from syncline.planners.wfbp import Wfbp
from syncline.simulator.steady import MOST_ITERATIONS, steady_state
from syncline.simulator.strategy import STRATEGIES
from syncline.simulator.workers import ALIKE, Workers

from .test_dag import chain, line, plan_of

LOOP = STRATEGIES["loop"]


def test_one_iteration_where_nothing_carries_over() -> None:
    profile = chain([10], [20], [30], io=5)
    plan = Wfbp().plan(profile, line(0))
    steady = steady_state(profile, line(0), plan, strategy=LOOP, workers=ALIKE)
    assert (steady.dag.iterations, steady.period_ns, steady.settled) == (1, 65, True)


def test_the_first_iteration_is_not_the_period() -> None:
    """It waits for no message; its first batch is waited for."""
    profile = chain([50, 50], [50, 50], [100, 100], io=30)
    plan = plan_of(profile, [(0, 50), (100, 200), (50, 100)], wait="need")
    steady = steady_state(profile, line(0), plan, strategy=STRATEGIES["pytorch"], workers=ALIKE)
    assert np.diff(steady.ends_ns, prepend=0).tolist()[0] == 230
    assert steady.period_ns == 300
    assert steady.settled


def test_more_iterations_until_the_loaders_have_fallen_behind() -> None:
    """Batches read ahead hide slow reading at first."""
    profile = chain([10], [20], [1], io=35)
    strategy = msgspec.structs.replace(STRATEGIES["mxnet"], loaders=1, ahead=4)
    steady = steady_state(
        profile, line(0), Wfbp().plan(profile, line(0)), strategy=strategy, workers=ALIKE
    )
    assert steady.period_ns == 35
    assert steady.settled


def test_the_mean_where_it_never_settles() -> None:
    profile = chain([10_000], [20_000], [1])
    plan = Wfbp().plan(profile, line(0))
    workers = Workers(jitter=0.3, seed=1)
    steady = steady_state(profile, line(0), plan, strategy=LOOP, workers=workers)
    assert steady.dag.iterations == MOST_ITERATIONS
    assert not steady.settled
    periods = np.diff(steady.ends_ns, prepend=0)
    assert steady.period_ns == pytest.approx(periods[4:].mean())
    assert 0 < steady.error_ns < 3000


@pytest.mark.parametrize("loaders", [1, 2, 4, 7])
def test_several_loaders_share_the_reading(loaders: int) -> None:
    """Batches that arrive together are no sign that reading is hidden."""
    profile = chain([10], [20], [1], io=6000)
    strategy = msgspec.structs.replace(STRATEGIES["pytorch"], loaders=loaders, ahead=2 * loaders)
    plan = Wfbp().plan(profile, line(0))
    steady = steady_state(profile, line(0), plan, strategy=strategy, workers=ALIKE)
    assert steady.settled
    assert steady.period_ns == pytest.approx(6000 / loaders, rel=1e-3)
