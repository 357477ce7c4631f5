"""How ``benchmarks.step_time`` follows its jobs and decides whose turn it is."""

from __future__ import annotations

import argparse
import io
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.step_cells import OURS, TARGET_CELLS, Cell
from benchmarks.step_jobs import Ended, _reason, _Watch, free_bytes
from benchmarks.step_race import Race, planned, spoken
from benchmarks.step_results import Results, Turn
from benchmarks.step_worker import BEGUN, TURN
from rich.console import Console

from syncline.lab.testbed.job import JobResult, WorkerEnd
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict_iteration_s
from tests.benchmarks.test_step_targets import cell_of, results_of

CELL = TARGET_CELLS[0]


def watch_of(taken: list[tuple[str, Any]]) -> _Watch:
    return _Watch(lambda mark, what: taken.append((mark, what)), lambda _: 1.0)


def race_of(results: Results, contestants: list[str], rounds: int = 2) -> Race:
    arguments = argparse.Namespace(rounds=rounds, iterations=2, warmup=2, minutes=None)
    console = Console(file=io.StringIO())
    return Race(arguments, contestants, "python", results, Path("none.json"), console)


def test_events_are_told_from_what_else_workers_print() -> None:
    taken: list[tuple[str, Any]] = []
    with watch_of(taken) as watch:
        watch.line(0, False, b"some library is here")
        watch.line(0, False, BEGUN.encode() + b'{"contestant": "ddp", "round": 0}')
        assert watch.contestant == "ddp"
        watch.line(0, True, TURN.encode() + b"not an event, as it is on standard error")
        watch.line(0, False, TURN.encode() + b'{"contestant": "ddp"}')
        assert watch.contestant is None  # what fails now is nobody's turn
    assert [mark for mark, _ in taken] == [BEGUN, TURN]
    assert len(watch.said[0]) == 2


def test_the_reason_is_what_the_first_rank_to_fail_said() -> None:
    with watch_of([]) as watch:
        watch.line(0, True, b"[rank0]: PeerError: a peer was lost")
        watch.line(1, True, b"[rank1]: RuntimeError: this is why")
        watch.line(1, True, b"some last words")
    ends = tuple(
        WorkerEnd(rank=rank, host=rank, code=1, after_s=after_s, stopped=False)
        for rank, after_s in ((0, 2.0), (1, 1.0))
    )
    reason = _reason(JobResult(ends=ends, wall_s=3.0), watch)
    assert reason == "rank 1 ended with exit code 1: RuntimeError: this is why"


def test_a_job_that_leaves_no_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.step_jobs.free_bytes", lambda: 0)
    monkeypatch.setattr("benchmarks.step_jobs.WATCH_S", 0.01)
    watch = watch_of([])
    watch.signals.settimeout(30)
    with watch:
        assert watch.signals.recv(1) == bytes([signal.SIGTERM])
    assert "memory" in watch.why_stopped


def test_free_memory_is_read() -> None:
    assert free_bytes() > 0


def test_each_round_is_begun_by_another_contestant() -> None:
    turns = race_of(Results(), ["a", "b", "c"]).turns_left(None)
    assert turns == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]


def test_turns_that_are_done_and_contestants_that_failed_are_left_out() -> None:
    measured = cell_of({"ddp": [1.0, 1.0], "wfbp": [1.0]}).with_failure("fsdp2", "why")
    race = race_of(results_of(measured), ["ddp", "wfbp", "fsdp2", "overlap"])
    assert race.turns_left(measured) == [("overlap", 0), ("wfbp", 1), ("overlap", 1)]


def test_what_is_left_is_expected_to_take_as_long_as_before() -> None:
    measured = cell_of({"ddp": [10.0]})
    one = race_of(results_of(measured), ["ddp"]).expected_s(CELL)
    two = race_of(results_of(measured), ["ddp"], rounds=3).expected_s(CELL)
    assert two - one == pytest.approx(10.0)


def test_every_plan_of_ours_is_made_and_predicted() -> None:
    profile = Profile(
        model="two",
        device="emulated",
        workers=1,
        iterations=1,
        operations=(
            Operation(name="a", phase="forward", duration_s=0.1),
            Operation(name="a backward", phase="backward", duration_s=0.2, after=(0,)),
        ),
        gradients=(Gradient(name="a.weight", elements=1_000_000, ready_after=1, needed_by=0),),
    )
    network = Network.line(workers=4, a_s=1e-3, b_s_per_byte=1e-8)
    plans, forecasts = planned(profile, network, OURS)
    assert set(plans) == set(forecasts) == set(OURS)
    assert all(f.iteration_s >= f.lower_bound_s > 0.29 for f in forecasts.values())


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.6, "10 s"), (61, "1 min 01 s"), (3 * 3600 + 120, "3 h 02 min")]
)
def test_durations_are_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_what_computing_does_to_messages_is_measured_before_the_plans_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = msgspec.structs.replace(cell_of({}), clip=True, update_s=0.02)
    profile = cell.cell.profile(update_s=cell.update_s)
    race = race_of(results_of(cell), [])
    slowed = msgspec.structs.replace(
        cell.network,
        contention=Contention(exchange=1.1),
        contention_by_need=Contention(exchange=1.2),
    )
    stock = Ddp().plan(profile, cell.network)

    def race_cell(_: Cell, turns: Any, plans: dict[str, Plan], **others: Any) -> Ended:
        for name, number in turns:
            iteration_s = predict_iteration_s(profile, slowed, plans.get(name, stock))
            turn = Turn(
                round=number,
                iteration_s=iteration_s,
                settled_s=iteration_s,
                idle_s=0.0,
                steps_s=(),
                wall_s=1.0,
            )
            others["turn"](name, turn)
        return Ended(contestant=None)

    monkeypatch.setattr("benchmarks.step_race.race_cell", race_cell)
    network = race._explored(cell, profile).network
    assert network.contention_by_need is not None
    for contention, exchange in ((network.contention, 1.1), (network.contention_by_need, 1.2)):
        assert (contention.computing, contention.per_message_s) == (1.0, 0.0)
        assert contention.exchange == pytest.approx(exchange, rel=0.01)


def test_a_plan_counts_clipping_that_no_replay_emulates() -> None:
    cell = Cell(model="resnet50", workers=4, rate="1gbit", clip=True)
    plain, counted = cell.profile(), cell.profile(update_s=0.02)
    assert counted.computation_s == pytest.approx(plain.computation_s + 0.02)
    assert counted.norm == plain.norm == "2"
