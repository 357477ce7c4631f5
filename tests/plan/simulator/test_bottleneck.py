"""What limits a point, in one sentence, and what would lift the limit."""

from __future__ import annotations

import pytest

from syncline.plan.network import Link, Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.analysis import PathStep
from syncline.plan.simulator.bottleneck import LADDER_GBIT_S, bottleneck, layers_of
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.whatif import Change, WhatIfSimulator
from syncline.plan.simulator.workers import Workers
from syncline.plan.whatif import Bottleneck
from tests.words import assert_tells

GBIT = 125e6
PLAIN = Change()


def vgg(*, io_s: float = 0.0, scale: float = 1.0) -> Profile:
    """Return a small net whose last two layers hold nearly all the parameters."""
    layers = (
        ("conv1", 0.02, 40_000),
        ("conv2", 0.02, 60_000),
        ("fc6", 0.01, 2_500_000),
        ("fc7", 0.01, 2_000_000),
    )
    operations = [Operation(name="read", phase="data", duration_s=io_s)] if io_s else []
    needed = {}
    for name, forward_s, _ in layers:
        needed[name] = len(operations)
        operations.append(Operation(name=name, phase="forward", duration_s=forward_s * scale))
    gradients = []
    for name, forward_s, elements in reversed(layers):
        ready = len(operations)
        operations.append(Operation(name=name, phase="backward", duration_s=2 * forward_s * scale))
        gradients += [
            Gradient(
                name=f"{name}.{kind}",
                elements=count,
                ready_after=ready,
                needed_by=needed[name],
            )
            for kind, count in (("bias", 10), ("weight", elements))
        ]
    return Profile(
        model="vgg",
        device="cuda",
        workers=1,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def network(gbit_s: float = 1.0, *, latency_s: float = 20e-6, workers: int = 16) -> Network:
    link = Link(alpha_s=latency_s, beta_s_per_byte=1 / (gbit_s * GBIT), gamma_s_per_byte=0.0)
    return Network.of_link(link, workers=workers, name="net")


def found(
    profile: Profile,
    net: Network,
    change: Change = PLAIN,
    *planners: str,
) -> Bottleneck:
    names = planners or ("ddp", "merge")
    simulator = WhatIfSimulator(profile, net, {name: PLANNERS[name].plan for name in names})
    point = simulator.point(change)
    return bottleneck(simulator, change, point, 0, point.best.planner)


def test_communication_and_the_bandwidth_that_hides_it() -> None:
    profile, net = vgg(), network(1.0)
    limit = found(profile, net, PLAIN, "wfbp")
    assert limit.kind == "communication"
    said = f"communication-bound: {limit.share:.0%} of the iteration".replace("%", " %")
    assert limit.sentence.startswith(f"{said} is exposed all-reduce of layers fc6-fc7; ")
    assert limit.share == pytest.approx(limit.split.exposed_s / limit.split.iteration_s)
    # The bandwidth named is the first of the ladder that hides it, found by simulating both.
    rate = limit.cure_bandwidth_bytes_per_s
    assert rate is not None
    ladder = [gbit * GBIT for gbit in LADDER_GBIT_S]
    hides = [
        found(profile, net, Change(bandwidth_bytes_per_s=r), "wfbp").split.shares["communication"]
        < 0.05
        for r in ladder
    ]
    assert ladder[hides.index(True)] == rate
    assert limit.sentence.endswith(f"; {rate / GBIT:g} Gbit/s would make it compute-bound")
    assert sum(part.time_s for part in limit.path) == pytest.approx(limit.split.iteration_s)
    assert sum(limit.by_kind().values()) == pytest.approx(limit.split.iteration_s)


def test_where_latencies_rule_no_bandwidth_helps_but_fewer_workers_do() -> None:
    limit = found(vgg(), network(10.0, latency_s=1e-3, workers=200))
    assert limit.cure_bandwidth_bytes_per_s is None
    assert limit.cure_workers in (2, 4, 8, 16, 32, 64, 128)
    assert "no bandwidth up to 400 Gbit/s would change that, since each message takes 398 ms" in (
        limit.sentence
    )
    assert f"but {limit.cure_workers} workers would make it compute-bound" in limit.sentence


def test_what_neither_helps() -> None:
    limit = found(vgg(scale=1e-3), network(1.0, latency_s=1e-2))
    assert limit.sentence.endswith("nor would fewer workers")
    assert (limit.cure_bandwidth_bytes_per_s, limit.cure_workers) == (None, None)


def test_a_plan_of_ones_own_is_not_tried_on_fewer_workers() -> None:
    profile, net = vgg(scale=1e-3), network(1.0, latency_s=1e-2)
    plan = PLANNERS["single"].plan(profile, net)
    simulator = WhatIfSimulator(profile, net, {"single": lambda *_: plan}, replans=False)
    limit = bottleneck(simulator, Change(), simulator.point(Change()), 0, "single")
    assert "fewer workers" not in limit.sentence
    assert limit.cure_workers is None


def test_workers_on_hosts_stay_on_whole_hosts() -> None:
    fast = Link(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=0.0)
    slow = Link(alpha_s=5e-2, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0)
    net = Network.of_link(slow, workers=24, hosts=8, inside=fast, name="net")
    limit = found(vgg(), net)
    assert limit.kind == "communication"
    assert limit.cure_workers is None  # no power of two is a multiple of 3


def test_computing() -> None:
    limit = found(vgg(), network(400.0, latency_s=0.0, workers=2))
    assert limit.kind == "compute"
    assert_tells(limit.sentence, "compute-bound", "100 %", "backward pass", "less than 1 %")


def test_loading_that_reading_ahead_hides() -> None:
    limit = found(vgg(io_s=0.1), network(400.0, latency_s=0.0, workers=2))
    assert limit.kind == "loading"
    assert_tells(limit.sentence, "loading-bound", "36 %", "--strategy pytorch")


def test_loading_that_takes_several_loaders() -> None:
    change = Change(strategy=STRATEGIES["pytorch"])
    limit = found(vgg(io_s=0.5), network(400.0, latency_s=0.0, workers=2), change)
    assert limit.kind == "loading"
    assert limit.sentence.endswith("; 4 loader processes that read ahead would hide it")


def test_loading_that_no_loader_hides() -> None:
    change = Change(strategy=STRATEGIES["pytorch"])
    limit = found(vgg(io_s=60.0), network(400.0, latency_s=0.0, workers=2), change)
    assert limit.sentence.endswith("not even 64 loader processes that read ahead would hide it")


def test_a_straggler() -> None:
    change = Change(behaviour=Workers(stragglers=((3, 1.2),)))
    limit = found(vgg(), network(400.0, latency_s=0.0), change)
    assert limit.kind == "straggler"
    assert_tells(limit.sentence, "straggler-bound", "17 %", "rank 3", "1.2 times", "180 ms")
    assert {part.rank for part in limit.path if part.kind != "message"} == {3}


def test_several_stragglers() -> None:
    change = Change(behaviour=Workers(stragglers=((3, 1.5), (5, 1.5))))
    sentence = found(vgg(), network(400.0, latency_s=0.0), change).sentence
    assert "waiting for 2 workers such as rank 3, which compute 1.5 times as long" in sentence


def test_jitter() -> None:
    change = Change(behaviour=Workers(jitter=0.2))
    sentence = found(vgg(), network(400.0, latency_s=0.0), change).sentence
    assert "waiting for whichever worker is the slowest" in sentence


@pytest.mark.parametrize(
    ("change", "planner", "said"),
    [
        (Change(), "dear", "exposed reduce-scatter and all-gather of"),
        (Change(density=0.9), "single", "exposed gtop-k-butterfly exchange of"),
        (Change(strategy=STRATEGIES["parameter-server"]), "wfbp", "exposed push and pull of"),
    ],
)
def test_the_exchange_is_named(change: Change, planner: str, said: str) -> None:
    assert said in found(vgg(), network(0.5), change, planner).sentence


# --- naming layers ---


def plan_of(*names: str) -> Plan:
    """Return a plan of a message a tensor, the tensors in ready order."""
    return Plan(
        planner="p",
        model="m",
        workers=2,
        tensors=tuple(Tensor(name=name, elements=1) for name in names),
        messages=tuple(Message(start=i, stop=i + 1) for i in range(len(names))),
    )


def on_path(*durations_ns: int) -> list[PathStep]:
    return [PathStep(0, ns, "message", "", message=index) for index, ns in enumerate(durations_ns)]


def test_layers_are_named_in_forward_order() -> None:
    plan = plan_of("fc8.w", "fc7.w", "fc6.w", "conv2.w", "conv1.w")
    assert layers_of(plan, on_path(0, 50, 50, 1, 1)) == "layers fc6-fc7"
    assert layers_of(plan, on_path(0, 0, 90, 1, 1)) == "layer fc6"
    assert layers_of(plan, on_path(50, 0, 0, 50, 0)) == "layers conv2 and fc8"
    assert layers_of(plan, on_path(20, 20, 20, 20, 20)) == "layers conv2-fc8"


def test_all_layers() -> None:
    plan = plan_of("b.w", "a.w")
    assert layers_of(plan, on_path(50, 50)) == "all layers"
    assert layers_of(plan, []) == "all layers"


def test_many_ranges_are_not_all_named() -> None:
    plan = plan_of(*(f"l{9 - i}" for i in range(10)))
    text = layers_of(plan, on_path(10, 0, 10, 0, 10, 10, 0, 10, 0, 0))
    assert text == "layers l4-l5 and 2 others"


def test_tensors_of_a_layer_count_once() -> None:
    plan = plan_of("fc.bias", "fc.weight", "conv.weight")
    assert layers_of(plan, on_path(50, 50, 0)) == "layer fc"
