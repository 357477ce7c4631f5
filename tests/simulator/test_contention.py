"""Calibrating the contention from measured iterations."""

from __future__ import annotations

import random

import msgspec
import pytest

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.planners.table import CANDIDATES
from syncline.simulator.predict import LARGEST, calibrate_contention, predict_iteration_s
from tests import strategies as some

NETWORK = Network.line(workers=4, a_s=2e-4, b_s_per_byte=2e-9)


def instance() -> tuple[Profile, list[Plan]]:
    """Return a profile of 20 layers, some 40 ms, and the plans of all planners."""
    random_ = random.Random(5)
    profile = some.profile_of(
        [random_.randint(500_000, 2_000_000) for _ in range(20)],
        [random_.randint(1000, 500_000) for _ in range(20)],
        forward_ns=10_000_000,
    )
    return profile, [planner.plan(profile, NETWORK) for planner in CANDIDATES]


@pytest.mark.parametrize(
    ("known", "noise"),
    [
        (1.0, 0.0),
        (1.37, 0.01),
        (3.5, 0.0),
        *(
            pytest.param(known, noise, marks=pytest.mark.slow)
            for known, noise in ((1.0, 0.01), (1.1, 0.0), (1.1, 0.01), (1.37, 0.0))
        ),
        *(
            pytest.param(known, noise, marks=pytest.mark.slow)
            for known, noise in ((2.0, 0.0), (2.0, 0.01), (3.5, 0.01))
        ),
    ],
)
def test_a_known_factor_is_recovered(known: float, noise: float) -> None:
    profile, plans = instance()
    random_ = random.Random(7)
    truth = msgspec.structs.replace(NETWORK, contention=known)
    measured = [
        (plan, predict_iteration_s(profile, truth, plan) * random_.uniform(1 - noise, 1 + noise))
        for plan in plans
    ]
    start = msgspec.structs.replace(NETWORK, contention=9.0)  # its own contention is replaced
    found = calibrate_contention(profile, start, measured)
    assert found.contention == pytest.approx(known, abs=0.06 if noise else 1e-3)
    assert msgspec.structs.replace(found, contention=1.0) == NETWORK


def test_iterations_faster_than_simulated_mean_no_contention() -> None:
    profile, plans = instance()
    measured = [(plan, predict_iteration_s(profile, NETWORK, plan) * 0.9) for plan in plans]
    assert calibrate_contention(profile, NETWORK, measured).contention == 1


def test_nothing_measured_means_no_contention() -> None:
    profile, _ = instance()
    assert calibrate_contention(profile, NETWORK, []).contention == 1


def test_the_factor_is_bounded() -> None:
    profile, plans = instance()
    measured = [(plan, 100 * predict_iteration_s(profile, NETWORK, plan)) for plan in plans]
    found = calibrate_contention(profile, NETWORK, measured)
    assert found.contention == pytest.approx(LARGEST, abs=1e-3)
