"""Advice: the parts of an iteration add up, and remedies are what the simulator predicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from syncline.cli.commands import cli
from syncline.errors import UserError
from syncline.files.report.advice import advice, print_advice
from syncline.plan.advice import Advice, Interface, RankFacts
from syncline.plan.cost import CostCurve
from syncline.plan.network import Link, Measurement, Network
from syncline.plan.planners.auto import choose
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import WAIT, Baseline, Gradient, Profile
from syncline.plan.simulator.predict import predict_iteration_s
from tests.strategies import in_sequence

LAYERS = 6
change = msgspec.structs.replace


def profile(*, elements: int = 2_000_000, waiting_s: float = 0.0) -> Profile:
    """A model of equal layers, which computes for 90 ms."""
    layers = [f"layer{n}" for n in range(LAYERS)]
    steps = [
        ("data loading", "data", 0.001),
        *((name, "forward", 0.005) for name in layers),
        *((name, "backward", 0.01) for name in reversed(layers)),
        (WAIT, "finalize", waiting_s),
        ("update", "update", 0.002),
    ]
    gradients = (
        Gradient(name=name, elements=elements, ready_after=2 * LAYERS - n, needed_by=1 + n)
        for n, name in reversed(list(enumerate(layers)))
    )
    made = change(in_sequence(steps, gradients), model="Equal", workers=4)
    as_it_is_s = predict_iteration_s(made, network(), Ddp().plan(made, network()))
    baseline = Baseline(iteration_s=as_it_is_s, noise_s=0.001, iterations=20)
    return change(made, baseline=baseline)


def network(rate: float = 125e6) -> Network:
    """A ring of four over links of 1 Gbit/s, as if it was measured."""
    link = Link(alpha_s=2e-5, beta_s_per_byte=1 / rate, gamma_s_per_byte=0.0)
    found = Network.of_link(link, workers=4, algorithm="ring", name="ring")
    points = [
        Measurement(size_bytes=size, time_s=found.all_reduce.seconds(size), repetitions=4)
        for size in (1 << n for n in range(10, 25, 2))
    ]
    return change(found, points=tuple(points))


def test_parts_add_up_and_remedies_are_predictions() -> None:
    made, net = profile(waiting_s=0.004), network()
    found = advice(made, net)
    assert math.isclose(sum(p.seconds for p in found.parts), found.iteration_s)
    parts = {part.name: part.seconds for part in found.parts}
    assert parts["computing"] == pytest.approx(0.092)
    assert parts["waiting for the slowest rank"] == pytest.approx(0.004)
    assert parts["exposed communication"] > 0.5 * found.iteration_s
    assert found.limit.startswith("exposed communication limits")
    remedies = {remedy.name: remedy for remedy in found.remedies}
    best = min(p.iteration_s for p in choose(made, net).comparison.predictions)
    as_it_is_s = predict_iteration_s(made, net, Ddp().plan(made, net))
    assert remedies["overlap"].gain == pytest.approx(as_it_is_s / best)
    half = remedies["16-bit gradients"]
    assert half.iteration_s < 0.75 * found.iteration_s
    assert remedies["network of 10 Gbit/s"].gain > half.gain
    gains = [remedy.gain for remedy in found.remedies]
    assert gains == sorted(gains, reverse=True)
    assert all(0.03 <= remedy.error < 0.2 for remedy in found.remedies)
    assert [scale.workers for scale in found.scaling] == [2, 4, 8, 16, 32, 64]
    assert found.scaling[1].ddp_s == pytest.approx(found.iteration_s)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    (row,) = [row for row in advice(profile(), network()).exchanges if row.size_bytes == 1 << 24]
    assert row.algorithm_bytes_per_s == pytest.approx(row.size_bytes / row.time_s)
    assert row.bus_bytes_per_s == pytest.approx(row.algorithm_bytes_per_s * 2 * 3 / 4)
    assert row.bus_bytes_per_s == pytest.approx(125e6, rel=0.01)


def test_where_nothing_helps_it_says_so() -> None:
    found = advice(profile(elements=2000), network(1.25e10))
    assert found.limit.startswith("not the network: it takes")
    console = Console(width=100, record=True)
    print_advice(console, found)
    remedies = console.export_text().partition("what would help")[2].partition("workers")[0]
    assert "overlap " not in remedies


def test_a_single_worker_exchanges_nothing() -> None:
    alone = Network(name="alone", workers=1, all_reduce=CostCurve.line(0.0, 0.0))
    found = advice(change(profile(), workers=1, baseline=None), alone)
    assert found.limit.startswith("not the network: it takes 0.0 %")
    assert (found.exchanges, found.remedies, found.scaling) == ((), (), ())
    print_advice(Console(quiet=True), found)


def face(name: str = "eth0", speed: float | None = 1.25e8, **other: object) -> Interface:
    return Interface(name=name, bytes_per_s=speed, **{"mtu_bytes": 1500, **other})


def suspects(net: Network, **changed: object) -> tuple[str, ...]:
    """Return what is said of four hosts, of which the second is changed."""
    own: Any = {"interface": face(), "computing_s": 0.09, "link_s": 0.01}
    ranks = [RankFacts(rank=n, host=f"host{n}", **own) for n in range(4)]
    ranks[1] = change(ranks[1], **changed)
    return advice(profile(), net, ranks).suspects


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"interface": face(faster="eth1")}, "host1 (rank 1) sends through eth0, and eth1 is fast"),
        ({"interface": face("lo", None, mtu_bytes=65536)}, "host1 (rank 1) sends through lo"),
        ({"interface": face(mtu_bytes=9000)}, "the MTU differs between hosts: 1500, 9000 bytes"),
        ({"interface": face(speed=1.25e9)}, "the MTU is 1500 bytes"),
        ({"retransmitted": 0.05}, "host1 (rank 1) sends 5.0 % of its TCP segments twice"),
        ({"computing_s": 0.2}, "slow host? host1 (rank 1) computes in 200 ms"),
        ({"link_s": 0.09}, "slow link? 1 MiB from host0 to host1 takes 90.0 ms, 10.0 ms on"),
    ],
)
def test_suspects_are_named(changed: dict[str, object], said: str) -> None:
    (suspect,) = suspects(network(), **changed)
    assert said in suspect


@pytest.mark.parametrize("each", [1, 2])
def test_a_host_is_slow_if_its_links_are_slow_both_ways(each: int) -> None:
    """Its neighbours' links to each other are not; those inside a host say nothing."""
    between = {2 * each: 0.09, 3 * each: 0.08}
    facts = [
        RankFacts(rank=n, host=f"host{n // each}", link_s=between.get(n, 0.2 if n % each else 0.01))
        for n in range(4 * each)
    ]
    (suspect,) = advice(profile(), network(), facts).suspects
    assert suspect.startswith("slow host? 1 MiB to or from host2 takes at least 80.0 ms, 10.0 ms")


def test_a_link_that_is_not_filled_is_named() -> None:
    assert suspects(network()) == ()
    (suspect,) = suspects(network(4e7))
    assert "the bus bandwidth reaches 320 Mbit/s of an interface of 1 Gbit/s" in suspect


def test_the_command_advises_on_files(tmp_path: Path) -> None:
    made, net, saved = (tmp_path / f"{name}.json" for name in ("profile", "network", "advice"))
    profile().save(made)
    network().save(net)

    def output(*arguments: object) -> str:
        return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).output

    as_text = output("advise", "--profile", made, net)
    for part in ("(measured)", "exposed communication", "bus", "overlap", "with overlap"):
        assert part in as_text
    found = Advice.from_json(output("advise", "--json", "--profile", made, "100gbit,workers=8"))
    assert (found.is_measured, found.workers) == (False, 8)
    found.save(saved)
    assert "Equal, 8 workers" in output("show", saved)
    with pytest.raises(UserError, match="one NETWORK"):
        output("advise", "--profile", made, "a", "b")
    with pytest.raises(UserError, match="--seconds must be above 0"):
        output("advise", "--seconds", "0", "train.py")
