"""The steady state is found, not assumed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.exchange import Link, Stage
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.predict import predict, predict_iteration_s
from syncline.plan.simulator.steady import MOST_ITERATIONS, Steady, steady_state
from syncline.plan.simulator.strategy import STRATEGIES, Strategy
from syncline.plan.simulator.workers import ALIKE, Workers
from tests import strategies as some
from tests.plan.simulator.chains import CUT, chain, line, plan_of


def settled(
    profile: Profile,
    strategy: Strategy = STRATEGIES["loop"],
    *,
    network: Network | None = None,
    plan: Plan | None = None,
    workers: Workers = ALIKE,
) -> Steady:
    """Return the steady state; without a network, of one message a layer that costs its size."""
    network = network or line(0)
    plan = plan or Wfbp().plan(profile, network)
    return steady_state(Scenario(profile, network, strategy, workers), plan)


def test_one_iteration_where_nothing_carries_over() -> None:
    steady = settled(chain([10], [20], [30], io=5))
    assert (steady.dag.iterations, steady.period_ns, steady.error_ns) == (1, 65, 0)


def test_the_first_iteration_is_not_the_period() -> None:
    """It waits for no message; its first batch is waited for."""
    profile = chain([50, 50], [50, 50], [100, 100], io=30)
    plan = plan_of(profile, CUT, wait="need")
    steady = settled(profile, STRATEGIES["pytorch"], plan=plan)
    assert steady.ends_ns[0] == 230
    assert (steady.period_ns, steady.error_ns) == (300, 0)


def test_more_iterations_until_the_loaders_have_fallen_behind() -> None:
    """Batches read ahead hide slow reading at first."""
    strategy = msgspec.structs.replace(STRATEGIES["mxnet"], loaders=1, ahead=4)
    steady = settled(chain([10], [20], [1], io=35), strategy)
    assert (steady.period_ns, steady.error_ns) == (35, 0)


def test_the_mean_where_it_never_synchronizes() -> None:
    steady = settled(chain([10_000], [20_000], [1]), workers=Workers(jitter=0.3, seed=1))
    assert steady.dag.iterations == MOST_ITERATIONS
    periods = np.diff(steady.ends_ns, prepend=0)
    assert steady.period_ns == pytest.approx(periods[4:].mean())
    assert 0 < steady.error_ns < 3000


@pytest.mark.parametrize("loaders", [1, 2, 4, 7])
def test_several_loaders_share_the_reading(loaders: int) -> None:
    """Batches that arrive together are no sign that reading is hidden."""
    strategy = msgspec.structs.replace(STRATEGIES["pytorch"], loaders=loaders, ahead=2 * loaders)
    steady = settled(chain([10], [20], [1], io=6000), strategy)
    assert steady.error_ns == 0
    assert steady.period_ns == pytest.approx(6000 / loaders, rel=1e-3)


# --- jobs that share links ---


def over(
    s_per_byte: float, *, latency_s: float = 0.0, jobs: int = 1, stages: tuple[Stage, ...] = ()
) -> Network:
    """Return links between two workers, where a ring sends each byte once over each."""
    link = Link(alpha_s=latency_s / 2, beta_s_per_byte=s_per_byte, gamma_s_per_byte=0.0)
    return Network.of_link(link, workers=2, jobs=jobs, stages=stages)


def sending_last(computing_s: float, size_bytes: int) -> tuple[Profile, Plan]:
    profile = some.profile_of([round(computing_s * 1e9)], [size_bytes // 4])
    return profile, Plan.merging("one", profile, 2, [0])


def test_one_job_alone_is_what_it_was() -> None:
    profile, plan = sending_last(0.2, 1_000_000)
    prediction = predict(profile, over(1e-6), plan).prediction
    assert prediction.iteration_s == pytest.approx(0.2 + 1.0)
    assert (prediction.sharing, prediction.slowdown) == (None, 1)


def test_two_jobs_stay_offset_and_lose_what_they_send_at_once() -> None:
    """A period of C + 2 T - d, where one begins d after the other (d < T); else nothing is lost."""
    profile, plan = sending_last(3.0, 1_000_000)  # computing 3 s, sending 1 s
    steady = settled(profile, network=over(1e-6, jobs=2), plan=plan)
    assert steady.alone_ns == 4e9
    # Offsets of 1/16, 3/16, ... of 4 s: d of 0.25, 0.75, 1.25, ... 3.75 s.
    expected = [4.75, 4.25, 4.0, 4.0, 4.0, 4.0, 4.25, 4.75]
    assert sorted(steady.offset_ns) == pytest.approx(sorted(1e9 * s for s in expected), rel=1e-4)
    assert steady.period_ns == pytest.approx(4.25e9, rel=1e-4)
    assert steady.error_ns == 0


def test_messages_that_fall_behind_set_the_pace_in_the_end() -> None:
    """Four jobs keep the link busy for 10 % longer than they compute.

    A message is needed only by the next backward pass, so that a job's first iterations take as
    long as alone.
    """
    profile = some.profile_of([0], [68_750], forward_ns=10**9)
    plan = plan_of(profile, [(0, 68_750)], workers=2, wait="need")
    for jobs, expected_s in ((1, 1.0), (3, 1.0), (4, 1.1)):
        found_s = predict_iteration_s(profile, over(1e-6, jobs=jobs), plan)
        assert found_s == pytest.approx(expected_s, rel=2e-3)


def test_jobs_that_only_send_have_an_equal_share_each() -> None:
    profile, plan = sending_last(0.0, 1_000_000)
    for jobs in (2, 3, 7):
        found_s = predict_iteration_s(profile, over(1e-6, jobs=jobs), plan)
        assert found_s == pytest.approx(jobs, rel=2e-3)


def test_latencies_and_what_hosts_do_take_nothing_of_a_link() -> None:
    """Messages that keep a link busy for half of their time have room for one another."""
    profile, plan = sending_last(1.0, 1_000_000)
    half = (Stage(at="host", bytes_per_s=2e6),)
    for network in (over(1e-6, latency_s=1.0, jobs=2), over(5e-7, stages=half, jobs=2)):
        prediction = predict(profile, network, plan).prediction
        assert prediction.slowdown == 1
        assert predict(profile, network.replace(jobs=4), plan).prediction.slowdown > 1


@pytest.mark.parametrize("name", ["parameter-server", "pytorch"])
def test_other_strategies_share_too(name: str) -> None:
    profile, plan = sending_last(0.5, 1_000_000)
    alone, shared = (
        predict(profile, over(1e-6, jobs=jobs), plan, strategy=STRATEGIES[name]).prediction
        for jobs in (1, 2)
    )
    assert shared.sharing is not None
    assert shared.sharing.alone_s == pytest.approx(alone.iteration_s)
    assert shared.sharing.shortest_s <= shared.iteration_s <= shared.sharing.longest_s
    assert 1.1 < shared.slowdown < 2


def test_noise_is_each_jobs_own() -> None:
    profile, plan = sending_last(1.0, 1_000_000)
    workers = Workers(jitter=0.2, seed=3)
    steady = settled(profile, network=over(1e-6, jobs=2), plan=plan, workers=workers)
    assert steady.error_ns > 0
    assert 1.05 < steady.period_ns / (steady.alone_ns or 1) < 1.6


@some.costly
@given(
    some.layer_profiles(max_layers=5, min_elements=1),
    st.integers(2, 4),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from(["need", "all"]),
    st.integers(1, 2),
)
def test_sharing_lies_between_alone_and_an_equal_part_of_the_link(
    profile: Profile, jobs: int, latency_s: float, wait: str, in_flight: int
) -> None:
    """No job is faster than alone, nor slower than with a link of its own of an equal part.

    And the link carries all bytes: a period is not shorter than the time for those of all jobs.
    """
    plan = Plan.merging("each", profile, 2, list(range(len(profile.gradients))))
    plan = msgspec.structs.replace(plan, wait=wait, in_flight=in_flight)
    s_per_byte = 2e-9
    shared = predict(profile, over(s_per_byte, latency_s=latency_s, jobs=jobs), plan).prediction
    alone_s, part_s = (
        predict_iteration_s(profile, over(rate, latency_s=latency_s), plan)
        for rate in (s_per_byte, s_per_byte * jobs)
    )
    assert shared.sharing is not None
    assert shared.sharing.alone_s == alone_s
    clock_s = 1e-9 * 20
    assert alone_s <= shared.sharing.shortest_s * 1.005 + clock_s
    assert shared.sharing.longest_s <= part_s * 1.02 + clock_s
    sent_s = jobs * profile.gradient_bytes * s_per_byte
    assert shared.sharing.shortest_s >= sent_s * 0.99 - clock_s * len(plan.messages)
