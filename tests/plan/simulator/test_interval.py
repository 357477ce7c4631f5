"""Prediction intervals: their ends, and how many measured figures lie in them."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import raw
from syncline.errors import UserError
from syncline.plan.network import CARRIED_OVER, PRESETS, Contention, Measurement, Network
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import Overlap
from syncline.plan.prediction import Prediction
from syncline.plan.profile import Baseline, Profile
from syncline.plan.simulator.interval import NOMINAL, SIMULATED
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.trace_files import TRACES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ALL_REDUCES = TRACES.parent / "allreduce" / "deepbench" / "allreduce.csv"
PROFILE = some.profile_of([10_000_000] * 20, [2_000_000] * 20, forward_ns=100_000_000)
GIVEN = PRESETS["10gbit"].with_workers(8)
FITTED = Contention(fitted=True)
POINTS = tuple(
    Measurement(size_bytes=s, time_s=GIVEN.all_reduce.seconds(s), repetitions=1)
    for s in (1 << 10, 1 << 20, 1 << 27)
)


def predicted(profile: Profile, network: Network) -> Prediction:
    return predict(profile, network, Ddp().plan(profile, network)).prediction


def factors(found: Prediction) -> tuple[float, float]:
    assert found.interval_s is not None
    low_s, high_s = found.interval_s
    return found.iteration_s / low_s, high_s / found.iteration_s


def measured(**others: Any) -> Network:
    return msgspec.structs.replace(GIVEN, points=POINTS, **{"contention": FITTED, **others})


def test_what_was_measured_has_the_error_of_the_simulator() -> None:
    assert factors(predicted(PROFILE, measured())) == pytest.approx((SIMULATED, SIMULATED))


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_is_not_known_of_a_link_counts_for_all_jobs_on_it(jobs: int) -> None:
    nominal = msgspec.structs.replace(GIVEN.replace(bandwidth_bytes_per_s=1e7), jobs=jobs)
    assert factors(predicted(PROFILE, nominal))[1] == pytest.approx(NOMINAL, rel=0.05)


def test_without_fitted_contention_overlapping_may_gain_nothing() -> None:
    found = predicted(PROFILE, measured(contention=Contention()))
    assert found.interval_s == pytest.approx(
        (found.iteration_s / SIMULATED, found.computation_s * SIMULATED + found.communication_s)
    )
    alone = predicted(PROFILE, measured(contention=Contention()).with_workers(1))
    assert factors(alone) == pytest.approx((SIMULATED, SIMULATED))


def test_noise_and_a_poor_fit_widen_it() -> None:
    noisy = msgspec.structs.replace(
        PROFILE, baseline=Baseline(iteration_s=0.4, noise_s=0.02, iterations=30)
    )
    cases = ((PROFILE, 0.0), (noisy, 0.0), (noisy, 0.1))
    found = [factors(predicted(profile, measured(fit_error=e)))[1] for profile, e in cases]
    assert found == sorted(set(found))
    assert math.log(found[2]) == pytest.approx(math.hypot(math.log(SIMULATED), 0.08225, 0.1))


@pytest.mark.parametrize("rate", [1e7, 1e11])
def test_an_exchange_that_was_not_measured_counts_as_far_as_it_is_exposed(rate: float) -> None:
    exposed = rate < 1e9
    nominal = GIVEN.replace(bandwidth_bytes_per_s=rate)
    low, high = factors(predicted(PROFILE, nominal))
    assert low == pytest.approx(SIMULATED)
    assert high == pytest.approx(NOMINAL if exposed else SIMULATED, rel=0.05)
    carried = measured().replace(bandwidth_bytes_per_s=rate)
    wide = CARRIED_OVER if exposed else SIMULATED
    assert factors(predicted(PROFILE, carried)) == pytest.approx((wide, wide), rel=0.05)
    with pytest.raises(UserError, match="known_within must be finite and at least 1"):
        measured(known_within=0.5)


@given(
    some.profiles(most_elements=1 << 26),
    st.sampled_from([GIVEN, PRESETS["1gbit"], measured()]),
    st.booleans(),
)
def test_the_prediction_lies_in_its_interval(
    profile: Profile, network: Network, overlaps: bool
) -> None:
    plan = (Overlap() if overlaps else Ddp()).plan(profile, network)
    found = predict(profile, network, plan).prediction
    assert found.interval_s is not None
    assert found.interval_s[0] <= found.iteration_s <= found.interval_s[1]


def own_iterations(*, fitted: bool) -> Iterator[tuple[float, float]]:
    """Yield how many times as long as predicted the benchmarks' iterations took, and may take."""
    if fitted:
        for row in raw.read(RESULTS / "prediction_error.json")["rows"]:
            yield row["measured_s"] / row["predicted_s"], SIMULATED
    for path in RESULTS.glob("step_time*.json"):
        for cell in raw.read(path)["cells"]:
            network = cell["network"]
            contention = network.get("contention_by_need") or network.get("contention", {})
            if contention.get("fitted", False) == fitted:
                for name in cell["turns"].keys() & cell["forecasts"].keys():
                    took_s = statistics.median(t["iteration_s"] for t in cell["turns"][name])
                    forecast = cell["forecasts"][name]
                    most_s = cell["computation_s"] * SIMULATED + forecast["communication_s"]
                    yield took_s / forecast["iteration_s"], most_s / forecast["iteration_s"]


def test_nine_of_ten_own_iterations_lie_in_it() -> None:
    fitted = [1 / SIMULATED <= ratio <= SIMULATED for ratio, _ in own_iterations(fitted=True)]
    others = [1 / SIMULATED <= ratio <= high for ratio, high in own_iterations(fitted=False)]
    for found in (fitted, others):
        assert len(found) > 40
        assert statistics.mean(found) >= 0.9


def test_nine_of_ten_figures_of_others_lie_in_it() -> None:
    rows = raw.read(RESULTS / "public_tables.json")["rows"]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    assert len(inside) > 200
    assert statistics.mean(inside) >= 0.9


@pytest.mark.skipif(not ALL_REDUCES.exists(), reason="no measurements of others in ../shared/data")
def test_nine_of_ten_all_reduces_of_others_cost_as_much_as_what_is_carried_over() -> None:
    tables: dict[Any, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with ALL_REDUCES.open() as file:
        for row in csv.DictReader(file):
            cluster = tables[row["platform"], row["algorithm"]]
            cluster[int(row["ranks"])][int(row["bytes"])] = float(row["mean_ms"]) * 1e-3
    found = []
    for cluster in tables.values():
        for fewer, more in itertools.combinations(sorted(cluster), 2):
            if len(sizes := cluster[fewer]) >= 3:
                network = Network.from_points(list(sizes), list(sizes.values()), workers=fewer)
                curve = network.with_workers(more).all_reduce
                for size, took_s in cluster[more].items():
                    ratio = took_s / curve.seconds(size)
                    found.append(1 / CARRIED_OVER <= ratio <= CARRIED_OVER)
    assert len(found) == 270
    assert statistics.mean(found) >= 0.9
