"""What limits a point, in one sentence, and what would lift the limit."""

from __future__ import annotations

import pytest

from syncline.plan.network import Link, Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Profile
from syncline.plan.simulator.analysis import PathStep
from syncline.plan.simulator.bottleneck import LADDER_GBIT_S, bottleneck, layers_of
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.whatif import Change, WhatIfSimulator
from syncline.plan.simulator.workers import Workers
from syncline.plan.whatif import Bottleneck
from tests.plan.simulator.chains import gradient, job, op
from tests.words import assert_tells

GBIT = 125e6
PLAIN = Change()
PYTORCH = Change(strategy=STRATEGIES["pytorch"])
NET = {"conv1": (20, 40_000), "conv2": (20, 60_000), "fc6": (10, 2_500_000), "fc7": (10, 2_000_000)}
"""Forward time in milliseconds, and elements: the last two hold nearly all the parameters."""


def vgg(*, io_ms: int = 0, ms: int = 10**6) -> Profile:
    """Return a small net; ``ms`` is how many nanoseconds a millisecond of computing takes."""
    operations = [op("data", io_ms * 10**6)] if io_ms else []
    first = len(operations)
    operations += [op("forward", time * ms, name=name) for name, (time, _) in NET.items()]
    gradients = []
    for layer, (name, (time, elements)) in reversed(list(enumerate(NET.items()))):
        operations.append(op("backward", 2 * time * ms, name=name))
        gradients += [
            gradient(count, len(operations) - 1, first + layer, f"{name}.{kind}")
            for kind, count in (("bias", 10), ("weight", elements))
        ]
    return job(operations, *gradients)


def network(gbit_s: float = 1.0, *, latency_s: float = 20e-6, workers: int = 16) -> Network:
    link = Link(alpha_s=latency_s, beta_s_per_byte=1 / (gbit_s * GBIT), gamma_s_per_byte=0.0)
    return Network.of_link(link, workers=workers, name="net")


def found(profile: Profile, net: Network, change: Change = PLAIN, *planners: str) -> Bottleneck:
    names = planners or ("ddp", "merge")
    simulator = WhatIfSimulator(profile, net, {name: PLANNERS[name].plan for name in names})
    point = simulator.point(change)
    return bottleneck(simulator, change, point, 0, point.best.planner)


def test_communication_and_the_bandwidth_that_hides_it() -> None:
    profile, net = vgg(), network(1.0)
    limit = found(profile, net, PLAIN, "wfbp")
    assert limit.kind == "communication"
    share = f"{limit.share:.0%}".replace("%", " %")
    # The bandwidth named is the first of the ladder that hides it, found by simulating both.
    rate = next(
        gbit
        for gbit in LADDER_GBIT_S
        if found(profile, net, Change(bandwidth_bytes_per_s=gbit * GBIT), "wfbp").split.shares[
            "communication"
        ]
        < 0.05
    )
    assert limit.cure_bandwidth_bytes_per_s == rate * GBIT
    facts = ("communication-bound", share, "all-reduce", "layers fc6-fc7", f"{rate:g} Gbit/s")
    assert_tells(limit.sentence, *facts)
    assert limit.share == pytest.approx(limit.split.exposed_s / limit.split.iteration_s)
    assert sum(part.time_s for part in limit.path) == pytest.approx(limit.split.iteration_s)
    assert sum(limit.by_kind().values()) == pytest.approx(limit.split.iteration_s)


def test_where_latencies_rule_no_bandwidth_helps_but_fewer_workers_do() -> None:
    limit = found(vgg(), network(10.0, latency_s=1e-3, workers=200))
    assert limit.cure_bandwidth_bytes_per_s is None
    assert limit.cure_workers in (2, 4, 8, 16, 32, 64, 128)
    facts = ("no bandwidth up to 400 Gbit/s", "398 ms", f"but {limit.cure_workers} workers")
    assert_tells(limit.sentence, *facts)


def test_what_neither_helps() -> None:
    limit = found(vgg(ms=1000), network(1.0, latency_s=1e-2))
    assert_tells(limit.sentence, "nor would fewer workers")
    assert (limit.cure_bandwidth_bytes_per_s, limit.cure_workers) == (None, None)


def test_a_plan_of_ones_own_is_not_tried_on_fewer_workers() -> None:
    profile, net = vgg(ms=1000), network(1.0, latency_s=1e-2)
    plan = PLANNERS["single"].plan(profile, net)
    simulator = WhatIfSimulator(profile, net, {"single": lambda *_: plan}, replans=False)
    limit = bottleneck(simulator, PLAIN, simulator.point(PLAIN), 0, "single")
    assert "fewer workers" not in limit.sentence
    assert limit.cure_workers is None


def test_workers_on_hosts_stay_on_whole_hosts() -> None:
    fast = Link(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=0.0)
    slow = Link(alpha_s=5e-2, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0)
    limit = found(vgg(), Network.of_link(slow, workers=24, hosts=8, inside=fast, name="net"))
    assert limit.kind == "communication"
    assert limit.cure_workers is None  # no power of two is a multiple of 3


def slow(*stragglers: tuple[int, float]) -> Change:
    return Change(behaviour=Workers(stragglers=stragglers))


@pytest.mark.parametrize(
    ("io_ms", "workers", "change", "kind", "facts"),
    [
        (0, 2, PLAIN, "compute", ["100 %", "backward pass", "less than 1 %"]),
        (100, 2, PLAIN, "loading", ["36 %", "--strategy pytorch"]),
        (500, 2, PYTORCH, "loading", ["4 loader processes that read ahead"]),
        (60_000, 2, PYTORCH, "loading", ["not even 64 loader processes"]),
        (0, 16, slow((3, 1.2)), "straggler", ["17 %", "rank 3", "1.2 times", "180 ms"]),
        (0, 16, slow((3, 1.5), (5, 1.5)), "straggler", ["2 workers such as rank 3", "1.5 times"]),
        (0, 16, Change(behaviour=Workers(jitter=0.2)), "straggler", ["whichever worker"]),
    ],
    ids=["computing", "ahead", "loaders", "no loader", "straggler", "stragglers", "jitter"],
)
def test_what_limits(io_ms: int, workers: int, change: Change, kind: str, facts: list[str]) -> None:
    limit = found(vgg(io_ms=io_ms), network(400.0, latency_s=0.0, workers=workers), change)
    assert limit.kind == kind
    assert_tells(limit.sentence, f"{kind}-bound", *facts)


@pytest.mark.parametrize(
    ("change", "planner", "said"),
    [
        (PLAIN, "dear", "exposed reduce-scatter and all-gather of"),
        (Change(density=0.9), "single", "exposed gtop-k-butterfly exchange of"),
        (Change(strategy=STRATEGIES["parameter-server"]), "wfbp", "exposed push and pull of"),
    ],
    ids=["decoupled", "sparse", "server"],
)
def test_the_exchange_is_named(change: Change, planner: str, said: str) -> None:
    assert said in found(vgg(), network(0.5), change, planner).sentence


@pytest.mark.parametrize(
    ("names", "durations_ns", "text"),
    [
        ("fc8.w fc7.w fc6.w conv2.w conv1.w", (0, 50, 50, 1, 1), "layers fc6-fc7"),
        ("fc8.w fc7.w fc6.w conv2.w conv1.w", (0, 0, 90, 1, 1), "layer fc6"),
        ("fc8.w fc7.w fc6.w conv2.w conv1.w", (50, 0, 0, 50, 0), "layers conv2 and fc8"),
        ("fc8.w fc7.w fc6.w conv2.w conv1.w", (20, 20, 20, 20, 20), "layers conv2-fc8"),
        ("b.w a.w", (50, 50), "all layers"),
        ("b.w a.w", (), "all layers"),
        ("l9 l8 l7 l6 l5 l4 l3 l2", (9, 0, 9, 0, 9, 9, 0, 9), "layers l4-l5 and 2 others"),
        ("fc.bias fc.weight conv.weight", (50, 50, 0), "layer fc"),
    ],
)
def test_layers_are_in_forward_order(names: str, durations_ns: tuple[int, ...], text: str) -> None:
    tensors = tuple(Tensor(name=name, elements=1) for name in names.split())
    messages = tuple(Message(start=i, stop=i + 1) for i in range(len(tensors)))
    plan = Plan(planner="p", model="m", workers=2, tensors=tensors, messages=messages)
    steps = [PathStep(0, ns, "message", "", message=i) for i, ns in enumerate(durations_ns)]
    assert layers_of(plan, tensors, steps) == text
