"""Advice: the parts of an iteration add up, and remedies are what the simulator predicts."""

from __future__ import annotations

import math
from pathlib import Path

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
from syncline.plan.profile import WAIT, Baseline, Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict_iteration_s

LAYERS = 6


def profile(*, elements: int = 2_000_000, waiting_s: float = 0.0, measured: bool = True) -> Profile:
    """A model of equal layers, which computes for 90 ms."""
    names = [f"layer{n}" for n in range(LAYERS)]
    operations = [Operation(name="data loading", phase="data", duration_s=0.001)]
    for index, name in enumerate(names):
        operations.append(Operation(name=name, phase="forward", duration_s=0.005, after=(index,)))
    for index, name in enumerate(reversed(names)):
        operations.append(
            Operation(name=name, phase="backward", duration_s=0.01, after=(LAYERS + index,))
        )
    operations.append(Operation(name=WAIT, phase="finalize", duration_s=waiting_s, after=(12,)))
    operations.append(Operation(name="update", phase="update", duration_s=0.002, after=(13,)))
    gradients = [
        Gradient(
            name=f"{name}.weight",
            elements=elements,
            ready_after=1 + LAYERS + index,
            needed_by=1 + names.index(name),
        )
        for index, name in enumerate(reversed(names))
    ]
    made = Profile(
        model="Equal",
        device="cpu",
        workers=4,
        iterations=9,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )
    if not measured:
        return made
    as_it_is_s = predict_iteration_s(made, network(), Ddp().plan(made, network()))
    baseline = Baseline(iteration_s=as_it_is_s, noise_s=0.001, iterations=20)
    return msgspec.structs.replace(made, baseline=baseline)


def network(rate: float = 125e6) -> Network:
    """A ring of four over links of 1 Gbit/s, as if it was measured."""
    link = Link(alpha_s=2e-5, beta_s_per_byte=1 / rate, gamma_s_per_byte=0.0)
    found = Network.of_link(link, workers=4, algorithm="ring", name="ring")
    sizes = [1 << n for n in range(10, 25, 2)]
    points = [
        Measurement(size_bytes=size, time_s=found.all_reduce.seconds(size), repetitions=4)
        for size in sizes
    ]
    return msgspec.structs.replace(found, points=tuple(points))


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
    half = remedies["16-bit gradients"].iteration_s
    assert half < 0.75 * found.iteration_s
    assert remedies["network of 10 Gbit/s"].gain > remedies["16-bit gradients"].gain
    assert [r.gain for r in found.remedies] == sorted(
        (r.gain for r in found.remedies), reverse=True
    )
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
    text = console.export_text()
    assert "overlap " not in text.partition("what would help")[2].partition("workers")[0]


def test_a_single_worker_exchanges_nothing() -> None:
    alone = Network(name="alone", workers=1, all_reduce=CostCurve.line(0.0, 0.0))
    made = msgspec.structs.replace(profile(measured=False), workers=1)
    found = advice(made, alone)
    assert found.limit.startswith("not the network: it takes 0.0 %")
    assert (found.exchanges, found.remedies, found.scaling) == ((), (), ())
    print_advice(Console(quiet=True), found)


def face(name: str = "eth0", speed: float | None = 1.25e8, **other: object) -> Interface:
    return Interface(name=name, bytes_per_s=speed, **{"mtu_bytes": 1500, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"interface": face(faster="eth1")}, "host1 (rank 1) sends through eth0, and eth1 is fast"),
        ({"interface": face("lo", None, mtu_bytes=65536)}, "host1 (rank 1) sends through lo"),
        ({"interface": face(mtu_bytes=9000)}, "the MTU differs between hosts: 1500, 9000 bytes"),
        ({"interface": face(speed=1.25e9)}, "the MTU is 1500 bytes"),
        ({"retransmitted": 0.05}, "host1 (rank 1) sends 5.0 % of its TCP segments twice"),
        ({"computing_s": 0.2}, "slow host? host1 (rank 1) computes in 200 ms"),
        ({"link_s": 0.09}, "slow host? host1 (rank 1) exchanges 1 MiB with its neighbours in 90.0"),
    ],
)
def test_suspects_are_named(changed: dict[str, object], said: str | None) -> None:
    ranks = [
        RankFacts(rank=n, host=f"host{n}", interface=face(), computing_s=0.09, link_s=0.01)
        for n in range(4)
    ]
    ranks[1] = msgspec.structs.replace(ranks[1], **changed)
    suspects = advice(profile(), network(), ranks).suspects
    if said is None:
        assert suspects == ()
    else:
        (suspect,) = suspects
        assert said in suspect


def test_a_link_that_is_not_filled_is_named() -> None:
    ranks = [RankFacts(rank=n, host=f"host{n}", interface=face()) for n in range(4)]
    (suspect,) = advice(profile(), network(4e7), ranks).suspects
    assert "the bus bandwidth reaches 320 Mbit/s of an interface of 1 Gbit/s" in suspect


def test_the_command_advises_on_files(tmp_path: Path) -> None:
    made, net = tmp_path / "profile.json", tmp_path / "network.json"
    profile().save(made)
    network().save(net)
    run = CliRunner().invoke
    as_text = run(cli, ["advise", "--profile", str(made), str(net)], catch_exceptions=False).output
    assert "(measured)" in as_text
    for part in ("exposed communication", "bus", "overlap", "with overlap"):
        assert part in as_text
    elsewhere = ["advise", "--json", "--profile", str(made), "100gbit,workers=8"]
    found = Advice.from_json(run(cli, elsewhere, catch_exceptions=False).output)
    assert not found.is_measured
    assert found.workers == 8
    saved = tmp_path / "advice.json"
    found.save(saved)
    assert "Equal, 8 workers" in run(cli, ["show", str(saved)], catch_exceptions=False).output
    with pytest.raises(UserError, match="one NETWORK"):
        run(cli, ["advise", "--profile", str(made), "a", "b"], catch_exceptions=False)
    with pytest.raises(UserError, match="--seconds must be above 0"):
        run(cli, ["advise", "--seconds", "0", "train.py"], catch_exceptions=False)
