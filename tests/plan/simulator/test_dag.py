"""The DAG of S-SGD: the equations of dag-model as tests, and each way to overlap by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.exchange import Link, Stage
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Message
from syncline.plan.planners.wfbp import Single, Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.bound import lower_bound_ns, terms
from syncline.plan.simulator.dag import Scenario, build
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.strategy import STRATEGIES, Strategy
from syncline.plan.simulator.transformations import as_planned, with_compute_scale
from syncline.plan.simulator.workers import ALIKE, Workers
from syncline.plan.timeline import COMPUTE
from tests import strategies as some
from tests.plan.simulator.chains import (
    CUT,
    HALVES,
    NS,
    Times,
    chain,
    gradient,
    job,
    layers,
    line,
    op,
    period_ns,
    pieces,
    plan_of,
)

phase_ns = st.integers(0, 8000)
LINK = Link(alpha_s=3 * NS, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)


# --- dag-model, Eq. 1 to 3 (4 and 5: test_predict.py) ---


def sent_ns(profile: Profile, a: int) -> int:
    """Return the cost of all messages of wait-free backpropagation."""
    return sum(a + m.stop - m.start for m in Wfbp().plan(profile, line(a)).messages)


@some.many
@given(layers, phase_ns, phase_ns, phase_ns, st.integers(0, 500))
def test_equations_1_and_2_nothing_overlaps(
    times: Times, io: int, h2d: int, update: int, a: int
) -> None:
    profile = chain(*times, io=io, h2d=h2d, update=update)
    compute = io + h2d + sum(times[0]) + sum(times[1]) + update
    for alone in ("s-sgd", "loop"):
        assert period_ns(profile, line(0, 0, workers=1), strategy=alone) == compute
    assert period_ns(profile, line(a), strategy="s-sgd") == compute + sent_ns(profile, a)


@some.many
@given(layers, phase_ns, phase_ns, st.integers(0, 500))
def test_equation_3_reading_and_copying_beside_computing(
    times: Times, io: int, h2d: int, a: int
) -> None:
    """With one thread that reads and copies: max(t_io + t_h2d, t_f + t_b + t_c)."""
    profile = chain(*times, io=io, h2d=h2d)
    computing = sum(times[0]) + sum(times[1]) + sent_ns(profile, a)
    # Two threads are a pipeline, which the paper's equation does not have.
    for preset, reading in (("caffe-mpi", io + h2d), ("pytorch", max(io, h2d))):
        strategy = msgspec.structs.replace(STRATEGIES[preset], overlap_communication=False)
        assert period_ns(profile, line(a), strategy=strategy) == max(reading, computing)


def test_the_frameworks_of_the_paper() -> None:
    """I/O 50, copy 20, forward 60, backward 90, update 5; messages of 10 + 40 a layer."""
    profile = chain([20, 20, 20], [30, 30, 30], [40, 40, 40], io=50, h2d=20, update=5)
    network = msgspec.structs.replace(line(10), link=LINK)
    backward_and_messages = 30 + 3 * 50
    assert {name: period_ns(profile, network, strategy=name) for name in STRATEGIES} == {
        "s-sgd": 50 + 20 + 60 + 90 + 150 + 5,
        "loop": 50 + 20 + 60 + backward_and_messages + 5,
        "caffe-mpi": 60 + backward_and_messages + 5,
        "pytorch": 60 + backward_and_messages + 5,
        "mxnet": 20 + 60 + backward_and_messages + 5,
        "tensorflow": 20 + 60 + backward_and_messages + 5,
        "cntk": 20 + 60 + 90 + 150 + 5,
        # Push and pull take 4 * (3 + 160 / 16) = 52 each and run beside each other.
        "parameter-server": 20 + 60 + 30 + 3 * 52 + 52 + 5,
    }


def test_need_first_by_hand() -> None:
    """Two layers of 100 bytes; forward 50 each, backward 50 each; the line is 1 ns a byte.

    Ready at 50 (g2) and 100 (g1) after the backward pass begins. In ready order g1 arrives at 250
    and the forward pass takes 100 more. Need first, g1 goes at 100 and is back at 200; g2, cut in
    two, fills the line before and after; its second half arrives at 250, when f2 begins.
    """
    in_order = [(0, 100), (100, 200)]
    assert period_ns(HALVES, line(0), plan_of(HALVES, in_order)) == 350
    assert period_ns(HALVES, line(0), plan_of(HALVES, in_order, wait="need")) == 350
    assert period_ns(HALVES, line(0), plan_of(HALVES, CUT, wait="need")) == 300


def test_the_update_is_spread_over_the_forward_pass() -> None:
    """Half of the update is done before each layer, because each has half of the bytes."""
    profile = chain([50, 50], [50, 50], [100, 100], update=20)
    timeline = predict(profile, line(0), plan_of(profile, CUT, wait="need")).timeline
    assert timeline.iteration_ns == 320
    assert {(s.label, s.stop_ns - s.start_ns) for s in timeline.spans if s.kind == "update"} == {
        ("update before f1", 10),
        ("update before f2", 10),
    }


def test_two_in_flight_hide_latencies() -> None:
    spans = [(i, i + 20) for i in range(0, 200, 20)]
    assert period_ns(HALVES, line(10), plan_of(HALVES, spans)) == 100 + 50 + 10 * 30
    two = plan_of(HALVES, spans, in_flight=2)
    # The first latency shows, the others run beside the message before.
    assert period_ns(HALVES, line(10), two) == 100 + 50 + 10 + 200
    assert period_ns(HALVES, line(30), two) == 100 + 50 + 30 + 4 * 50 + 40


def test_decoupled_all_reduces() -> None:
    """Reduce-scatter in backward, all-gather in the next forward (DeAR)."""
    profile = chain([60, 60], [100, 100], [100, 100])
    scatter = [(0, 100, "reduce-scatter"), (100, 200, "reduce-scatter")]
    gather = [(100, 200, "all-gather"), (0, 100, "all-gather")]
    plan = plan_of(profile, [*scatter, *gather], wait="need")
    # Each half takes 50: g1 is scattered at 200 to 250, gathered at 300, g2 gathered at 350.
    assert period_ns(profile, line(0), plan) == 300 + 120


@some.many
@given(layers, st.integers(0, 300), st.integers(1, 3), st.integers(0, 500), st.data())
def test_the_one_round_problem_gives_the_period(
    times: Times, a: int, in_flight: int, update: int, data: st.DataObject
) -> None:
    """``simulator.terms``: max(base, arrival + tail), for any cut in any order."""
    profile = chain(*times, update=update)
    plan = plan_of(profile, data.draw(pieces(profile)), wait="need", in_flight=in_flight)
    t = terms(profile)
    begin, ends, worst = 0, [0] * in_flight, t.base_ns
    for message, tensors in zip(plan.messages, plan.message_tensors(), strict=True):
        begin = max(begin, ends[-in_flight], *(t.ready_ns[i] for i in tensors))
        ends.append(max(begin + a, ends[-1]) + message.stop - message.start)
        worst = max(worst, ends[-1] + max(t.tail_ns[i] for i in tensors))
    assert period_ns(profile, line(a), plan) == worst


def test_a_device_and_a_host_that_launches() -> None:
    """The host launches 10 + 10 + 30; the device waits for it, and the host for nothing."""
    operations = [
        op("forward", 10, resource="host"),
        op("forward", 25, 0),
        op("backward", 30, resource="host"),
        op("backward", 5, 2),
    ]
    profile = job(operations, gradient(10, 3))
    assert profile.finish_ns() == [10, 35, 40, 45]
    # The next iteration's launches wait for nothing but the host: 40 of launching a period.
    plan = plan_of(profile, [(0, 10)], wait="need", workers=1)
    assert period_ns(profile, line(0, 0, workers=1), plan) == 40


def test_unlimited_devices() -> None:
    """PACE, section IV-A: two branches run beside each other."""
    branches = [op("forward", 10), op("backward", 40, 0), op("backward", 50, 0)]
    profile = job([*branches, op("update", 5, 1, 2)], gradient(20, 1), gradient(20, 2, name="h"))
    unlimited = Strategy(name="pace", compute="unlimited")
    assert period_ns(profile, line(0)) == 10 + 40 + 50 + 20 + 5
    assert period_ns(profile, line(0), strategy=unlimited) == 10 + 40 + 20 + 20 + 5


def test_unlimited_devices_do_not_begin_before_the_last_iteration_has_ended() -> None:
    profile = chain([5], [5], [1], io=1, update=2)
    strategy = Strategy(name="s", compute="unlimited", prefetch_data=True)
    assert period_ns(profile, line(0), strategy=strategy) == 5 + 5 + 1 + 2


def test_stragglers_hold_up_everybody() -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=10)
    plan, slow = Single().plan(profile, line(0)), Workers(stragglers=((3, 1.5),))
    assert period_ns(profile, line(0), plan) == 200 + 200 + 10
    assert period_ns(profile, line(0), plan, workers=slow) == 300 + 200 + 15
    row = predict(profile, line(0), plan, workers=slow).prediction
    assert row.computation_s == pytest.approx(315 * NS)


@some.few
@given(layers, st.integers(0, 300), st.integers(2, 6), st.sampled_from(["update", "need"]))
def test_equal_workers_are_as_one(times: Times, a: int, count: int, wait: str) -> None:
    """Simulated apart (a factor of 1 for each, none collapsed), they take as long."""
    profile = chain(*times, update=7)
    network = line(a, workers=count)
    plan = msgspec.structs.replace(Wfbp().plan(profile, network), wait=wait)
    apart = Workers(jitter=1e-12)
    assert period_ns(profile, network, plan, workers=apart) == period_ns(profile, network, plan)


def test_jitter_is_seeded_and_has_an_error() -> None:
    profile = chain([5000, 5000], [5000, 5000], [100, 100])
    plan = Single().plan(profile, line(0))
    first, again, other = (
        predict(profile, line(0), plan, workers=Workers(jitter=0.1, seed=seed)).prediction
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first.iteration_s != other.iteration_s
    assert 0 < first.error_s < 0.1 * first.iteration_s
    # Everybody waits for the slowest of four each time, which is not communication.
    assert first.iteration_s > 20_200 * NS
    assert first.exposed_s == pytest.approx(200 * NS)


def test_more_than_the_clock_holds() -> None:
    profile = chain([4 * 10**13], [0], [1])
    with pytest.raises(UserError, match="longer than the"):
        period_ns(profile, line(0, workers=2048), workers=Workers(spread=0.1))


@pytest.mark.parametrize("workers", [ALIKE, Workers(stragglers=((1, 2.0),))], ids=["alike", "slow"])
def test_contention_with_iterations_to_come(workers: Workers) -> None:
    """The last iterations of a run have nothing after them that slows them down."""
    operations = [
        op("forward", 1_000, resource="host"),
        op("forward", 4_000, 0),
        op("backward", 1_000, resource="host"),
        op("backward", 6_000, 2),
        op("update", 5_000, 3),
    ]
    profile = job(operations, gradient(1000, 3, 1))
    network = msgspec.structs.replace(
        line(0, 12), contention=Contention(computing=2.0, exchange=2.0)
    )
    plan = plan_of(profile, [(0, 1000)], wait="need")
    scenario = Scenario(profile, network, workers=workers)
    steady = steady_state(scenario, plan)
    assert steady.error_ns == 0
    assert len(steady.ends_ns) == steady.dag.iterations // 2
    dag = build(scenario, plan, iterations=60)
    middle = np.diff(dag.ends_ns(dag.graph.run()[1]))[20:30]
    assert set(middle.tolist()) == {steady.period_ns}


@pytest.mark.parametrize("one", [True, False])
def test_what_depends_on_a_read_waits_for_it_with_several_loaders(one: bool) -> None:
    operations = [op("data", 10), op("data", 1), op("copy", 1, 0), op("backward", 2)]
    profile = job(operations, gradient(1, 3))
    strategy = Strategy(name="s", prefetch_data=True, prefetch_copy=True, one_loader=one, loaders=2)
    steady = steady_state(Scenario(profile, line(0), strategy), None)
    first = [steady.start_ns[steady.dag.slot_tasks(slot)[0, 0]] for slot in range(4)]
    assert first == [0, 0, 10, 11]


@pytest.mark.parametrize("loaders", [1, 2, 4])
def test_reading_ahead_without_copies(loaders: int) -> None:
    profile = job([op("data", 40), op("backward", 10)], gradient(0, 1))
    strategy = Strategy(name="s", prefetch_data=True, loaders=loaders, ahead=1)
    assert period_ns(profile, line(0), strategy=strategy) == max(40 // loaders, 10)


@some.few
@given(
    layers,
    st.integers(0, 300),
    st.sampled_from(sorted(set(STRATEGIES) - {"parameter-server"})),
    st.integers(1, 2),
    st.integers(0, 5000),
)
def test_no_strategy_undercuts_the_bound(
    times: Times, a: int, name: str, in_flight: int, io: int
) -> None:
    """The bound itself, not what the prediction clips to the iteration."""
    profile = chain(*times, io=io, h2d=io // 3, update=20)
    network = line(a)
    plan = msgspec.structs.replace(Wfbp().plan(profile, network), wait="need", in_flight=in_flight)
    seen = as_planned(profile, STRATEGIES[name], 1.0)
    bound = lower_bound_ns(terms(seen), network.all_reduce, decoupled=False)
    if profile.gradient_bytes:
        assert period_ns(profile, network, plan, strategy=name) >= bound - 2


# --- parameter servers ---


def served(workers: int = 4, **options: object) -> Network:
    """Return a network with a link of 3 ns and 1/16 ns a byte."""
    return Network.of_link(LINK, workers=workers, name="served", **options)  # type: ignore[arg-type]


def exchanged_ns(network: Network, *spans: tuple[int, int]) -> int:
    """Return how much longer messages through a server make an iteration."""
    profile = chain([50], [50], [spans[-1][1]])
    return period_ns(profile, network, plan_of(profile, spans), strategy="parameter-server") - 100


def test_equal_workers_push_as_much_apart() -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=10)
    alike, apart = (
        period_ns(profile, served(), strategy="parameter-server", workers=workers)
        for workers in (ALIKE, Workers(spread=1e-12))
    )
    assert alike == pytest.approx(apart, abs=10)
    assert period_ns(profile, served(1), strategy="parameter-server") == 210


SERVERS = {
    "sharded": (served(algorithm="sharded-parameter-server"), 2 * (4 * 3 + 25)),
    "two": (served(algorithm="parameter-server", servers=2), 2 * (4 * 3 + 50)),
    # Two hosts push and pull; inside each, half of the bytes is sent once before and once after.
    # Each way takes 2 * (3 + 25) + 3 + 12.5.
    "hosts": (served(hosts=2, inside=LINK), 2 * 72),
    "hosts, as algorithm": (served(hosts=2, inside=LINK, algorithm="parameter-server"), 2 * 72),
    "measured": (msgspec.structs.replace(line(40), algorithm="parameter-server"), 40 + 100),
    "stages": (served(stages=(Stage(at="host", bytes_per_s=4 / NS),)), 4 * 2 * (3 + 25) + 100),
}


@pytest.mark.parametrize(("network", "expected_ns"), SERVERS.values(), ids=SERVERS)
def test_a_server_that_the_network_knows(network: Network, expected_ns: int) -> None:
    """The network's own exchange is taken: its servers, its hosts, its measured curve."""
    assert exchanged_ns(network, (0, 100)) == expected_ns


def test_pushes_and_pulls_share_the_links_of_servers_on_the_workers_hosts() -> None:
    """Two messages: the pull of the first runs beside the push of the second."""
    link = msgspec.structs.replace(LINK, alpha_s=0.0)
    apart, colocated = (
        exchanged_ns(
            Network.of_link(link, workers=4, algorithm="sharded-parameter-server", colocated=same),
            (0, 1600),
            (1600, 3200),
        )
        for same in (False, True)
    )
    assert apart == 3 * 400
    assert colocated == pytest.approx(4 * 300, abs=2)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (line(0), "needs the point-to-point costs of a link"),
        (served(algorithm="gtop-k", density=0.01), "parameter servers exchange all of them"),
    ],
    ids=["no link", "sparse"],
)
def test_what_a_server_cannot_exchange(network: Network, message: str) -> None:
    with pytest.raises(UserError, match=message):
        exchanged_ns(network, (0, 1))


@pytest.mark.parametrize(
    ("messages", "later_ns"),
    [
        ([(0, 100)], 0),
        ([(0, 100, "reduce-scatter"), (0, 100, "all-gather")], 0),
        ([Message(start=0, stop=100, delay_s=7 * NS)], 7),
    ],
    ids=["whole", "decoupled", "late"],
)
def test_decoupled_all_reduces_and_delays_at_a_server(
    messages: list[tuple[int, int, str] | Message], later_ns: int
) -> None:
    profile = chain([50], [50], [100])
    found = period_ns(profile, served(), plan_of(profile, messages), strategy="parameter-server")
    assert found == 100 + 2 * 4 * (3 + 25) + later_ns


def test_finalize_and_update_wait_for_all_messages() -> None:
    operations = [op(phase, 1000) for phase in ("backward", "finalize", "forward", "update")]  # type: ignore[arg-type]
    profile = job(operations, gradient(1, 0))
    timeline = predict(profile, line(5000, 0), plan_of(profile, [(0, 1)])).timeline
    computing = [s for s in timeline.spans if s.lane == COMPUTE and s.kind != "wait"]
    assert [s.start_ns for s in computing] == [0, 6000, 7000, 8000]


def test_empty_gradients_are_updated_too() -> None:
    profile = chain([5], [5], [0], update=7)
    plan = msgspec.structs.replace(Wfbp().plan(profile, line(0)), wait="need")
    assert period_ns(profile, line(0), plan) == 17


def test_streams_run_beside_each_other_and_beside_other_workers() -> None:
    """Forward 100 beside 30 on stream 2; 250 of other workers; backward 50; two updates."""
    operations = [
        op("forward", 100),
        op("forward", 30, resource="stream 2"),
        op("forward", 250, 0, resource="peers"),
        op("backward", 50, 0, 1, 2),
        op("update", 20, 3, resource="stream 2"),
        op("update", 8, 4),
    ]
    profile = job(operations, gradient(1, 3, 0))
    network = line(40, 0, workers=2)
    forecast = predict(profile, network, Single().plan(profile, network))
    assert forecast.timeline.iteration_ns == 468
    assert forecast.prediction.computation_s == pytest.approx(428 * NS)
    assert "peers" in {s.lane for s in forecast.timeline.spans if s.kind == "wait"}
    # Neither a faster device nor a slower worker changes how long other workers are waited for.
    assert period_ns(with_compute_scale(profile, 0.5), network) == 379
    assert period_ns(profile, network, workers=Workers(stragglers=((1, 2.0),))) == 646
    assert [o.duration_s for o in as_planned(profile, STRATEGIES["loop"], 2.0).operations[:3]] == [
        pytest.approx(ns * NS) for ns in (200, 60, 250)
    ]


def test_gathers_in_shards_wait_for_the_last_sum() -> None:
    """As pairs of a gather and a sum, these would be 250,000 edges; as many slices are common."""
    one = chain([0], [0], [500])
    plan = plan_of(one, [(i, i + 1) for i in range(500)]).in_shards()
    found = build(Scenario(one, line(1)), plan, iterations=1)
    assert len(plan.messages) == 1000
    assert sum(len(task.after) for task in found.messages) <= 2 * len(found.messages)
