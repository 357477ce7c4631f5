"""A replay on real emulated hosts, and how it refuses and fails."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import pytest

from syncline.errors import MismatchError, PeerError, UserError
from syncline.lab.processes import ended_by_signals
from syncline.lab.replay.session import ReplayOutcome, ReplayRequest, require_memory
from syncline.lab.replay.session import replay as run_replay
from syncline.lab.testbed import Cluster
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.profile import Profile
from syncline.train.measure.machine import machine_name
from tests.lab.replay.examples import PROFILE, layers
from tests.lab.testbed.machine import require_namespaces

CLUSTER = Cluster.of(hosts=2)
NETWORK = Network.line(workers=2, a_s=1e-4, b_s_per_byte=1e-7, name="given")


def request(**changes: object) -> ReplayRequest:
    fields = {"profile": PROFILE, "cluster": CLUSTER, "planners": ("ddp", "tictac")}
    fields |= {"rounds": 2, "iterations": 2, "network": NETWORK}
    return ReplayRequest(**fields | changes)  # type: ignore[arg-type]


def replayed(progress: Any = None, **changes: object) -> ReplayOutcome:
    require_namespaces()
    return run_replay(request(**changes), progress=progress)


def own_plan(name: str) -> Plan:
    return msgspec.structs.replace(planner_named("wfbp").plan(PROFILE, NETWORK), planner=name)


@pytest.mark.slow
def test_a_replay_of_names_that_torch_refuses() -> None:
    told: list[tuple[str, int, int]] = []
    found = replayed(lambda *now: told.append(now), network=None, plans=(own_plan("mine"),))
    replay = found.replay
    names = ["ddp", "tictac", "mine"]
    assert [entry.planner for entry in replay.entries] == names
    assert [plan.planner for plan in found.plans] == names
    assert (replay.workers, replay.rounds, replay.iterations) == (2, 2, 2)
    assert replay.network == found.network.name == "emulated cluster, probed"
    assert found.network.contention == Contention()  # what waits slows nothing down
    assert found.network.workers == 2
    for entry, plan, forecast in zip(replay.entries, found.plans, found.forecasts, strict=True):
        assert entry.predicted_s == forecast.prediction.iteration_s
        assert (entry.messages, entry.wait) == (len(plan.messages), plan.wait)
        assert all(len(times) == 2 for times in entry.iterations_s)
        assert entry.measured_s > 0
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages[:3] == ["starting the workers", "probing the network", "planning"]
    assert set(stages[3:]) == {f"replaying {name}" for name in names}
    assert told[-1][1:] == (6, 6)
    assert {timeline.source for timeline in found.timelines} == {"measured"}
    labels = {span.label for span in found.timelines[1].spans if span.kind == "message"}
    # Names of the profile, not of the module; of the messages that this iteration has part in.
    assert labels
    planned = {found.plans[1].label(each) for each in found.plans[1].message_tensors()}
    assert labels <= planned == {"c", "b x/y", "half", "a.b.c"}


@pytest.mark.slow
def test_plans_that_overlap_are_replayed_in_shards() -> None:
    found = replayed(profile=layers(), planners=("ddp", "overlap"), shard=True)
    assert [plan.sharded for plan in found.plans] == [False, True]
    # Of 96 ms, the update takes 4: two workers make half of it each.
    ddp, overlap = (each.prediction.computation_s for each in found.forecasts)
    assert (round(ddp * 1e3), round(overlap * 1e3)) == (97, 95)
    assert min(min(entry.rounds_s) for entry in found.replay.entries) > 0.09


def test_a_replay_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(PeerError, match="stopped after 1 s; take fewer rounds"):
        replayed(timeout_s=1.0)


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))]
)
def test_signals_end_it(number: int, ended: BaseException) -> None:
    with pytest.raises(type(ended)) as caught, ended_by_signals():
        replayed(lambda *_: os.kill(os.getpid(), number))  # twice: the second is ignored
    assert caught.value.args == ended.args


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"planners": ()}, "nothing to replay"),
        ({"planners": ("ddp", "ddp")}, "'ddp' would run twice"),
        ({"plans": (own_plan("ddp"),)}, "'ddp' would run twice"),
        ({"planners": ("merg",)}, "did you mean 'merge'"),
        ({"rounds": 0}, "rounds must be at least 1, found 0"),
        ({"iterations": -1}, "iterations must be at least 1, found -1"),
        ({"warmup": 0}, "warmup must be at least 1, found 0"),
        ({"cluster": Cluster.of(hosts=1)}, "at least 2 workers"),
        ({"timeout_s": 0.0}, "the timeout must be finite and above 0"),
        ({"timeout_s": float("inf")}, "the timeout must be finite and above 0"),
    ],
)
def test_what_cannot_be_asked_for(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        request(**changes)


def test_a_network_of_another_size() -> None:
    with pytest.raises(MismatchError, match="is of 2 workers, the emulated cluster has 3"):
        request(cluster=Cluster.of(hosts=3))


def test_gradients_that_do_not_fit_into_memory() -> None:
    huge = msgspec.structs.replace(PROFILE.gradients[-1], elements=1 << 50)
    profile: Profile = msgspec.structs.replace(PROFILE, gradients=(huge,))
    with pytest.raises(UserError, match=r"2 workers with .* of gradients each need about"):
        require_memory(profile, 2)
    require_memory(PROFILE, 2)


def test_the_machine_has_a_name() -> None:
    assert " core" in machine_name()
