"""The DAG of S-SGD: the equations of dag-model as tests, and each way to overlap by hand."""

from __future__ import annotations

from collections.abc import Sequence

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
from syncline.plan.profile import Gradient, Profile
from syncline.plan.simulator.bound import lower_bound_ns, terms
from syncline.plan.simulator.dag import build
from syncline.plan.simulator.predict import predict, predict_iteration_s
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.strategy import STRATEGIES, Strategy
from syncline.plan.simulator.transformations import as_planned, with_compute_scale
from syncline.plan.simulator.workers import ALIKE, Workers
from tests import strategies as some
from tests.plan.simulator.chains import NS, chain, layers, line, op, period_ns, plan_of

phase_ns = st.integers(0, 8000)


# --- dag-model, Eq. 1 to 6 ---


@some.many
@given(layers, phase_ns, phase_ns, phase_ns, st.integers(0, 500))
def test_equations_1_and_2_nothing_overlaps(
    times: tuple[list[int], list[int], list[int]], io: int, h2d: int, update: int, a: int
) -> None:
    forward, backward, sizes = times
    profile = chain(forward, backward, sizes, io=io, h2d=h2d, update=update)
    network = line(a)
    compute = io + h2d + sum(forward) + sum(backward) + update
    one = msgspec.structs.replace(
        network, workers=1, all_reduce=Network.line(workers=1, a_s=0, b_s_per_byte=0).all_reduce
    )
    plan = Wfbp().plan(profile, one)
    assert period_ns(profile, one, plan, strategy=STRATEGIES["s-sgd"]) == compute
    plan = Wfbp().plan(profile, network)
    messages = sum(a + m.stop - m.start for m in plan.messages)
    assert period_ns(profile, network, plan, strategy=STRATEGIES["s-sgd"]) == compute + messages


@some.many
@given(layers, phase_ns, phase_ns, st.integers(0, 500))
def test_equation_3_reading_and_copying_beside_computing(
    times: tuple[list[int], list[int], list[int]], io: int, h2d: int, a: int
) -> None:
    """With one thread that reads and copies: max(t_io + t_h2d, t_f + t_b + t_c)."""
    forward, backward, sizes = times
    profile = chain(forward, backward, sizes, io=io, h2d=h2d)
    strategy = Strategy(
        name="eq. 3",
        prefetch_data=True,
        prefetch_copy=True,
        one_loader=True,
        overlap_communication=False,
    )
    plan = Wfbp().plan(profile, line(a))
    t_c = sum(a + m.stop - m.start for m in plan.messages)
    expected = max(io + h2d, sum(forward) + sum(backward) + t_c)
    assert period_ns(profile, line(a), plan, strategy=strategy) == expected
    # Two threads are a pipeline, which the paper's equation does not have.
    pipeline = msgspec.structs.replace(strategy, one_loader=False)
    expected = max(io, h2d, sum(forward) + sum(backward) + t_c)
    assert period_ns(profile, line(a), plan, strategy=pipeline) == expected


def wfbp_finish(backward: Sequence[int], sizes: Sequence[int], a: int) -> tuple[int, int]:
    """Return tau_c(1) - tau_c(L) and t_c(1) of wait-free backpropagation (MG-WFBP, Eq. 7)."""
    clock, channel, begins, cost = 0, 0, [], 0
    for layer in reversed(range(len(backward))):
        clock += backward[layer]
        start = max(clock, channel)
        cost = a + sizes[layer]
        channel = start + cost
        begins.append(start)
    return begins[-1] - begins[0], cost


@some.many
@given(layers, phase_ns, phase_ns, st.integers(0, 500))
def test_equations_4_and_5_messages_beside_backward(
    times: tuple[list[int], list[int], list[int]], io: int, h2d: int, a: int
) -> None:
    forward, backward, sizes = times
    sizes = [size + 1 for size in sizes]  # the equations have a message for every layer
    profile = chain(forward, backward, sizes, io=io, h2d=h2d)
    plan = Wfbp().plan(profile, line(a))
    found = period_ns(profile, line(a), plan, strategy=STRATEGIES["caffe-mpi"])
    spread, t_c1 = wfbp_finish(backward, sizes, a)
    assert found == max(io + h2d, sum(forward) + backward[-1] + spread + t_c1)  # Eq. 4
    alone = sum(forward) + sum(backward)
    exposed = sum(forward) + backward[-1] + spread + t_c1 - alone
    assert found == max(io + h2d, alone + exposed)  # Eq. 5, with t_c^no


@some.few
@given(layers, st.integers(1, 8000), st.integers(0, 500), st.integers(2, 8))
def test_equation_6_speedup(
    times: tuple[list[int], list[int], list[int]], io: int, a: int, count: int
) -> None:
    forward, backward, sizes = times
    sizes = [size + 1 for size in sizes]
    single = chain(forward, backward, sizes, io=io)
    shared = chain(forward, backward, sizes, io=io * 4)  # four workers read from one disk
    network = line(a, workers=count)
    alone = Network.line(workers=1, a_s=0, b_s_per_byte=0)
    strategy = STRATEGIES["caffe-mpi"]
    one_s = predict_iteration_s(single, alone, Wfbp().plan(single, alone), strategy=strategy)
    all_s = predict_iteration_s(shared, network, Wfbp().plan(shared, network), strategy=strategy)
    spread, t_c1 = wfbp_finish(backward, sizes, a)
    exposed = backward[-1] + spread + t_c1 - sum(backward)
    compute = sum(forward) + sum(backward)
    expected = count * max(io, compute) / max(4 * io, compute + exposed)
    assert count * one_s / all_s == pytest.approx(expected, rel=1e-9)


def test_the_frameworks_of_the_paper() -> None:
    """I/O 50, copy 20, forward 60, backward 90, update 5; messages of 10 + 40 a layer."""
    profile = chain([20, 20, 20], [30, 30, 30], [40, 40, 40], io=50, h2d=20, update=5)
    network = msgspec.structs.replace(
        line(10), link=Link(alpha_s=3 * NS, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)
    )
    plan = Wfbp().plan(profile, network)
    found = {
        name: period_ns(profile, network, plan, strategy=strategy)
        for name, strategy in STRATEGIES.items()
    }
    backward_and_messages = 30 + 3 * 50
    assert found["s-sgd"] == 50 + 20 + 60 + 90 + 150 + 5
    assert found["loop"] == 50 + 20 + 60 + backward_and_messages + 5
    assert found["caffe-mpi"] == found["pytorch"] == 60 + backward_and_messages + 5
    assert found["mxnet"] == found["tensorflow"] == 20 + 60 + backward_and_messages + 5
    assert found["cntk"] == 20 + 60 + 90 + 150 + 5
    # Push and pull take 4 * (3 + 160 / 16) = 52 each and run beside each other.
    assert found["parameter-server"] == 20 + 60 + 30 + 3 * 52 + 52 + 5


def test_reading_by_several_processes() -> None:
    profile = chain([10], [20], [1], io=100)
    plan = Wfbp().plan(profile, line(0))
    loading = Strategy(name="4 loaders", prefetch_data=True, loaders=4, ahead=8)
    assert period_ns(profile, line(0), plan, strategy=loading) == 31
    two = msgspec.structs.replace(loading, loaders=2)
    assert period_ns(profile, line(0), plan, strategy=two) == 50


# --- messages that wait on need ---


def test_need_first_by_hand() -> None:
    """Two layers of 100 bytes; forward 50 each, backward 50 each; the line is 1 ns a byte.

    Ready at 50 (g2) and 100 (g1) after the backward pass begins. In ready order g1 arrives at 250
    and the forward pass takes 100 more. Need first, g1 goes at 100 and is back at 200; g2, cut in
    two, fills the line before and after; its second half arrives at 250, when f2 begins.
    """
    profile = chain([50, 50], [50, 50], [100, 100])
    network = line(0)
    assert period_ns(profile, network, plan_of(profile, [(0, 100), (100, 200)])) == 350
    in_order = plan_of(profile, [(0, 100), (100, 200)], wait="need")
    assert period_ns(profile, network, in_order) == 350
    cut = plan_of(profile, [(0, 50), (100, 200), (50, 100)], wait="need")
    assert period_ns(profile, network, cut) == 300
    forecast = predict(profile, network, cut)
    assert forecast.timeline.iteration_ns == 300
    sending = [s for s in forecast.timeline.spans if s.lane == "communication"]
    # The rest of the round before stands at the window's beginning.
    assert sorted((s.start_ns, s.stop_ns) for s in sending)[0][0] == 0
    assert sum(s.stop_ns - s.start_ns for s in sending) == 200


def test_the_update_is_spread_over_the_forward_pass() -> None:
    """Half of the update is done before each layer, because each has half of the bytes."""
    profile = chain([50, 50], [50, 50], [100, 100], update=20)
    cut = plan_of(profile, [(0, 50), (100, 200), (50, 100)], wait="need")
    assert period_ns(profile, line(0), cut) == 320
    spans = predict(profile, line(0), cut).timeline.spans
    assert {(s.label, s.stop_ns - s.start_ns) for s in spans if s.kind == "update"} == {
        ("update before f1", 10),
        ("update before f2", 10),
    }


def test_two_in_flight_hide_latencies() -> None:
    profile = chain([50, 50], [50, 50], [100, 100])
    pieces = [(i, i + 20) for i in range(0, 200, 20)]
    serial = plan_of(profile, pieces)
    assert period_ns(profile, line(10), serial) == 100 + 50 + 10 * 30
    two = plan_of(profile, pieces, in_flight=2)
    # The first latency shows, the others run beside the message before.
    assert period_ns(profile, line(10), two) == 100 + 50 + 10 + 200
    assert period_ns(profile, line(30), two) == 100 + 50 + 30 + 4 * 50 + 40


def test_decoupled_all_reduces() -> None:
    """Reduce-scatter in backward, all-gather in the next forward (DeAR)."""
    profile = chain([60, 60], [100, 100], [100, 100])
    scatter = [
        Message(start=0, stop=100, collective="reduce-scatter"),
        Message(start=100, stop=200, collective="reduce-scatter"),
    ]
    gather = [
        Message(start=100, stop=200, collective="all-gather"),
        Message(start=0, stop=100, collective="all-gather"),
    ]
    plan = plan_of(profile, [*scatter, *gather], wait="need")
    # Each half takes 50: g1 is scattered at 200 to 250, gathered at 300, g2 gathered at 350.
    assert period_ns(profile, line(0), plan) == 300 + 120


def test_a_message_that_leaves_late() -> None:
    profile = chain([10], [10], [10])
    plan = plan_of(profile, [Message(start=0, stop=10, delay_s=7 * NS)])
    assert period_ns(profile, line(0), plan) == 20 + 7 + 10


@some.many
@given(layers, st.integers(0, 300), st.integers(1, 3), st.data())
def test_the_one_round_problem_gives_the_period(
    times: tuple[list[int], list[int], list[int]], a: int, in_flight: int, data: st.DataObject
) -> None:
    """``simulator.terms``: max(base, arrival + tail), for any cut in any order."""
    forward, backward, sizes = times
    profile = chain(forward, backward, sizes, update=data.draw(st.integers(0, 500)))
    total = sum(sizes)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=6)))
    cuts = [c for c in cuts if c < total]
    spans = list(zip([0, *cuts], [*cuts, total], strict=True))
    plan = plan_of(profile, data.draw(st.permutations(spans)), wait="need", in_flight=in_flight)
    t = terms(profile)
    starts: list[int] = []
    ends: list[int] = []
    latency_ends: list[int] = []
    worst = t.base_ns
    for index, (message, tensors) in enumerate(
        zip(plan.messages, plan.message_tensors(), strict=True)
    ):
        ready = max(t.ready_ns[i] for i in tensors)
        size = message.stop - message.start
        if in_flight == 1:
            ends.append(max(ready, ends[-1] if ends else 0) + a + size)
        else:
            begin = max(
                ready,
                starts[-1] if starts else 0,
                ends[index - in_flight] if index >= in_flight else 0,
            )
            starts.append(begin)
            latency_ends.append(begin + a)
            ends.append(max(begin + a, ends[-1] if ends else 0) + size)
        worst = max(worst, ends[-1] + max(t.tail_ns[i] for i in tensors))
    assert period_ns(profile, line(a), plan) == worst


# --- computing ---


def test_a_device_and_a_host_that_launches() -> None:
    """The host launches 10 + 10 + 30; the device waits for it, and the host for nothing."""
    profile = Profile(
        model="launched",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(
            op("forward", 10, resource="host"),
            op("forward", 25, 0),
            op("backward", 30, resource="host"),
            op("backward", 5, 2),
        ),
        gradients=(Gradient(name="g", elements=10, ready_after=3),),
    )
    assert profile.finish_ns() == [10, 35, 40, 45]
    # The next iteration's launches wait for nothing but the host: 40 of launching a period.
    free = Network.line(workers=1, a_s=0, b_s_per_byte=0)
    plan = msgspec.structs.replace(plan_of(profile, [(0, 10)], wait="need"), workers=1)
    assert period_ns(profile, free, plan) == 40


def test_unlimited_devices() -> None:
    """PACE, section IV-A: two branches run beside each other."""
    profile = Profile(
        model="branches",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(
            op("forward", 10),
            op("backward", 40, 0),
            op("backward", 50, 0),
            op("update", 5, 1, 2),
        ),
        gradients=(
            Gradient(name="a", elements=20, ready_after=1),
            Gradient(name="b", elements=20, ready_after=2),
        ),
    )
    plan = Wfbp().plan(profile, line(0))
    unlimited = Strategy(name="pace", compute="unlimited")
    assert period_ns(profile, line(0), plan) == 10 + 40 + 50 + 20 + 5
    assert period_ns(profile, line(0), plan, strategy=unlimited) == 10 + 40 + 20 + 20 + 5


def test_stragglers_hold_up_everybody() -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=10)
    plan = Single().plan(profile, line(0))
    assert period_ns(profile, line(0), plan) == 200 + 200 + 10
    slow = Workers(stragglers=((3, 1.5),))
    assert period_ns(profile, line(0), plan, workers=slow) == 300 + 200 + 15
    row = predict(profile, line(0), plan, workers=slow).prediction
    assert row.computation_s == pytest.approx(315 * NS)
    with pytest.raises(UserError, match="no rank 4 among 4 workers"):
        predict(profile, line(0), plan, workers=Workers(stragglers=((4, 2.0),)))


@some.few
@given(layers, st.integers(0, 300), st.integers(2, 6), st.sampled_from(["update", "need"]))
def test_equal_workers_are_as_one(
    times: tuple[list[int], list[int], list[int]], a: int, count: int, wait: str
) -> None:
    """Simulated apart (a factor of 1 for each, none collapsed), they take as long."""
    profile = chain(*times, update=7)
    network = line(a, workers=count)
    plan = msgspec.structs.replace(Wfbp().plan(profile, network), wait=wait)
    apart = Workers(jitter=1e-12)
    assert period_ns(profile, network, plan, workers=apart) == period_ns(profile, network, plan)


def test_jitter_is_seeded_and_has_an_error() -> None:
    profile = chain([5000, 5000], [5000, 5000], [100, 100])
    plan = Single().plan(profile, line(0))
    workers = Workers(jitter=0.1, seed=7)
    first = predict(profile, line(0), plan, workers=workers).prediction
    assert first == predict(profile, line(0), plan, workers=workers).prediction
    other = predict(profile, line(0), plan, workers=Workers(jitter=0.1, seed=8)).prediction
    assert first.iteration_s != other.iteration_s
    assert 0 < first.error_s < 0.1 * first.iteration_s
    # Everybody waits for the slowest of four each time.
    assert first.iteration_s > 20_200 * NS


def test_a_parameter_server_needs_a_link() -> None:
    profile = chain([1], [1], [1])
    with pytest.raises(UserError, match="needs the point-to-point costs of a link"):
        predict(
            profile,
            line(0),
            Wfbp().plan(profile, line(0)),
            strategy=STRATEGIES["parameter-server"],
        )


def test_more_than_the_clock_holds() -> None:
    profile = chain([4 * 10**13], [0], [1])
    network = line(0, workers=2048)
    plan = Wfbp().plan(profile, network)
    with pytest.raises(UserError, match="longer than the"):
        predict(profile, network, plan, workers=Workers(spread=0.1))


def served(workers: int = 4) -> Network:
    """Return a network with a link of 3 ns and 1/16 ns a byte."""
    link = Link(alpha_s=3 * NS, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)
    return Network.of_link(link, workers=workers, name="served")


def test_unlimited_devices_do_not_begin_before_the_last_iteration_has_ended() -> None:
    profile = chain([5], [5], [1], io=1, update=2)
    strategy = Strategy(name="s", compute="unlimited", prefetch_data=True)
    plan = Wfbp().plan(profile, line(0))
    assert period_ns(profile, line(0), plan, strategy=strategy) == 5 + 5 + 1 + 2


@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_contention_with_iterations_to_come(slow: float) -> None:
    """The last iterations of a run have nothing after them that slows them down."""
    profile = Profile(
        model="launched",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(
            op("forward", 1_000, resource="host"),
            op("forward", 4_000, 0),
            op("backward", 1_000, resource="host"),
            op("backward", 6_000, 2),
            op("update", 5_000, 3),
        ),
        gradients=(Gradient(name="g", elements=1000, ready_after=3, needed_by=1),),
    )
    network = msgspec.structs.replace(line(0, 12), contention=Contention.of_both(2.0))
    workers = Workers(stragglers=((1, slow),)) if slow > 1 else Workers()
    plan = plan_of(profile, [(0, 1000)], wait="need")
    loop = STRATEGIES["loop"]
    steady = steady_state(profile, network, plan, strategy=loop, workers=workers)
    assert steady.error_ns == 0
    assert len(steady.ends_ns) == steady.dag.iterations // 2
    dag = build(profile, network, plan, strategy=loop, workers=workers, iterations=60)
    middle = np.diff(dag.ends_ns(dag.graph.run()[1]))[20:30]
    assert set(middle.tolist()) == {steady.period_ns}


def test_what_depends_on_a_read_waits_for_it_with_several_loaders() -> None:
    profile = Profile(
        model="two reads",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(op("data", 10), op("data", 1), op("copy", 1, 0), op("backward", 2)),
        gradients=(Gradient(name="g", elements=1, ready_after=3),),
    )
    for one_loader in (True, False):
        strategy = Strategy(
            name="s", prefetch_data=True, prefetch_copy=True, one_loader=one_loader, loaders=2
        )
        steady = steady_state(profile, line(0), None, strategy=strategy, workers=Workers())
        first = [steady.start_ns[steady.dag.slot_tasks(slot)[0, 0]] for slot in range(4)]
        assert first == [0, 0, 10, 11]


@pytest.mark.parametrize("loaders", [1, 2, 4])
def test_reading_ahead_without_copies(loaders: int) -> None:
    profile = Profile(
        model="no copy",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(op("data", 40), op("backward", 10)),
        gradients=(Gradient(name="g", elements=0, ready_after=1),),
    )
    strategy = Strategy(name="s", prefetch_data=True, loaders=loaders, ahead=1)
    plan = Wfbp().plan(profile, line(0))
    assert period_ns(profile, line(0), plan, strategy=strategy) == max(40 // loaders, 10)


@some.few
@given(
    layers,
    st.integers(0, 300),
    st.sampled_from(sorted(set(STRATEGIES) - {"parameter-server"})),
    st.integers(1, 2),
    st.integers(0, 5000),
)
def test_no_strategy_undercuts_the_bound(
    times: tuple[list[int], list[int], list[int]], a: int, name: str, in_flight: int, io: int
) -> None:
    """The bound itself, not what the prediction clips to the iteration."""
    profile = chain(*times, io=io, h2d=io // 3, update=20)
    network = line(a)
    plan = msgspec.structs.replace(Wfbp().plan(profile, network), wait="need", in_flight=in_flight)
    seen = as_planned(profile, STRATEGIES[name], 1.0)
    bound = lower_bound_ns(terms(seen), network.all_reduce, decoupled=False)
    if profile.gradient_bytes:
        assert period_ns(profile, network, plan, strategy=STRATEGIES[name]) >= bound - 2


def test_equal_workers_push_as_much_apart() -> None:
    profile = chain([50, 50], [50, 50], [100, 100], update=10)
    server = STRATEGIES["parameter-server"]
    plan = Wfbp().plan(profile, served())
    alike = period_ns(profile, served(), plan, strategy=server)
    apart = period_ns(profile, served(), plan, strategy=server, workers=Workers(spread=1e-12))
    assert alike == pytest.approx(apart, abs=10)
    one = served(1)
    assert period_ns(profile, one, Wfbp().plan(profile, one), strategy=server) == 210


def test_a_server_that_the_network_knows() -> None:
    """The network's own exchange is taken: its servers, its hosts, its measured curve."""
    profile = chain([50], [50], [100])
    plan = plan_of(profile, [(0, 100)])
    server = STRATEGIES["parameter-server"]
    link = Link(alpha_s=3 * NS, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)

    def exchanged_ns(network: Network) -> int:
        return period_ns(profile, network, plan, strategy=server) - 100

    of_link = Network.of_link
    sharded = of_link(link, workers=4, algorithm="sharded-parameter-server")
    assert exchanged_ns(sharded) == 2 * (4 * 3 + 25)
    two = of_link(link, workers=4, algorithm="parameter-server", servers=2)
    assert exchanged_ns(two) == 2 * (4 * 3 + 50)
    hosts = of_link(link, workers=4, hosts=2, inside=link)
    # Two hosts push and pull; inside each, half of the bytes is sent once before and once after.
    assert exchanged_ns(hosts) == pytest.approx(2 * (2 * (3 + 25) + 3) + 25, abs=1)
    as_algorithm = of_link(link, workers=4, hosts=2, inside=link, algorithm="parameter-server")
    assert exchanged_ns(as_algorithm) == exchanged_ns(hosts)
    measured = Network.line(
        workers=4, a_s=40 * NS, b_s_per_byte=NS / 4, algorithm="parameter-server"
    )
    assert exchanged_ns(measured) == 40 + 100
    stages = (Stage(at="host", bytes_per_s=4 / NS),)
    assert exchanged_ns(of_link(link, workers=4, stages=stages)) == 4 * 2 * (3 + 25) + 100


def test_pushes_and_pulls_share_the_links_of_servers_on_the_workers_hosts() -> None:
    """Two messages: the pull of the first runs beside the push of the second."""
    profile = chain([50], [50], [3200])
    plan = plan_of(profile, [(0, 1600), (1600, 3200)])
    link = Link(alpha_s=0.0, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)

    def exchanged_ns(*, colocated: bool) -> int:
        algorithm = "sharded-parameter-server"
        network = Network.of_link(link, workers=4, algorithm=algorithm, colocated=colocated)
        return period_ns(profile, network, plan, strategy=STRATEGIES["parameter-server"]) - 100

    assert exchanged_ns(colocated=False) == 3 * 400
    assert exchanged_ns(colocated=True) == pytest.approx(4 * 300, abs=2)


def test_what_a_server_cannot_exchange() -> None:
    profile = chain([1], [1], [1])
    plan = plan_of(profile, [(0, 1)])
    link = Link(alpha_s=3 * NS, beta_s_per_byte=NS / 16, gamma_s_per_byte=0)
    sparse = Network.of_link(link, workers=4, algorithm="gtop-k", density=0.01)
    with pytest.raises(UserError, match="parameter servers exchange all of them"):
        predict(profile, sparse, plan, strategy=STRATEGIES["parameter-server"])


def test_decoupled_all_reduces_and_delays_at_a_server() -> None:
    profile = chain([50], [50], [100])
    server = STRATEGIES["parameter-server"]
    whole = plan_of(profile, [(0, 100)])
    decoupled = plan_of(
        profile,
        [
            Message(start=0, stop=100, collective="reduce-scatter"),
            Message(start=0, stop=100, collective="all-gather"),
        ],
    )
    late = plan_of(profile, [Message(start=0, stop=100, delay_s=7 * NS)])
    period = period_ns(profile, served(), whole, strategy=server)
    assert period == 100 + 2 * 4 * (3 + 25)
    assert period_ns(profile, served(), decoupled, strategy=server) == period
    assert period_ns(profile, served(), late, strategy=server) == period + 7


def test_empty_gradients_are_updated_too() -> None:
    profile = chain([5], [5], [0], update=7)
    plan = msgspec.structs.replace(Wfbp().plan(profile, line(0)), wait="need")
    assert period_ns(profile, line(0), plan) == 17


def streams() -> Profile:
    """Forward 100 beside 30 on stream 2; 250 of other workers; backward 50; two updates."""
    return Profile(
        model="streams",
        device="cuda",
        workers=2,
        iterations=1,
        operations=(
            op("forward", 100),
            op("forward", 30, resource="stream 2"),
            op("forward", 250, 0, resource="peers"),
            op("backward", 50, 0, 1, 2),
            op("update", 20, 3, resource="stream 2"),
            op("update", 8, 4),
        ),
        gradients=(Gradient(name="g", elements=1, ready_after=3, needed_by=0),),
    )


def test_streams_run_beside_each_other_and_beside_other_workers() -> None:
    profile = streams()
    network = Network.line(workers=2, a_s=40 * NS, b_s_per_byte=0.0)
    plan = Single().plan(profile, network)
    assert predict_iteration_s(profile, network, plan) == pytest.approx(468 * NS)
    forecast = predict(profile, network, plan)
    assert forecast.prediction.computation_s == pytest.approx(428 * NS)
    assert {s.lane: s.kind for s in forecast.timeline.spans if s.kind == "wait"}["peers"] == "wait"
    # Neither a faster device nor a slower worker changes how long other workers are waited for.
    faster = with_compute_scale(profile, 0.5)
    assert predict_iteration_s(faster, network, plan) == pytest.approx(379 * NS)
    slow = Workers(stragglers=((1, 2.0),))
    assert predict_iteration_s(profile, network, plan, workers=slow) == pytest.approx(646 * NS)
    assert [o.duration_s for o in as_planned(profile, STRATEGIES["loop"], 2.0).operations[:3]] == [
        pytest.approx(ns * NS) for ns in (200, 60, 250)
    ]


def test_gathers_in_shards_wait_for_the_last_sum() -> None:
    """As pairs of a gather and a sum, these would be 250,000 edges; as many slices are common."""
    one = chain([0], [0], [500])
    cuts = [Message(start=i, stop=i + 1) for i in range(500)]
    plan = plan_of(one, cuts).in_shards()
    found = build(one, line(1), plan, strategy=STRATEGIES["loop"], workers=ALIKE, iterations=1)
    assert len(plan.messages) == 1000
    assert sum(len(task.after) for task in found.messages) <= 2 * len(found.messages)
