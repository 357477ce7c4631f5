"""How ``benchmarks.step_time`` follows its jobs and decides whose turn it is."""

from __future__ import annotations

import argparse
import io
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from benchmarks.step_cells import OURS, TARGET_CELLS, Cell
from benchmarks.step_jobs import Ended, free_bytes, race_cell
from benchmarks.step_race import Race, networks_of, planned, spoken
from benchmarks.step_results import Results, Turn
from benchmarks.step_worker import BEGUN, TURN
from rich.console import Console

from syncline.lab.testbed.job import JobResult, WorkerEnd
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners.ddp import Ddp
from syncline.plan.simulator.predict import predict_iteration_s
from tests.benchmarks.test_step_targets import cell_of, results_of, turn_of
from tests.strategies import profile_of

CELL = TARGET_CELLS[0]


def race_of(
    results: Results, contestants: list[str], rounds: int = 2, path: Path = Path("none.json")
) -> Race:
    arguments = argparse.Namespace(rounds=rounds, iterations=2, warmup=2, minutes=None)
    console = Console(file=io.StringIO())
    return Race(arguments, contestants, "python", results, path, console)


def raced(
    monkeypatch: pytest.MonkeyPatch, *lines: tuple[int, bool, bytes]
) -> tuple[Ended, list[tuple[str, Turn]]]:
    """Return how a race ended, and its turns, on hosts that print lines and fail, rank 1 first.

    Without lines they run until they are stopped.
    """

    def run(*_: Any, output: Any, signals: socket.socket, **__: Any) -> JobResult:
        signals.settimeout(30)
        for line in lines:
            output(*line)
        code = 1 if lines else -signals.recv(1)[0]
        ends = [
            WorkerEnd(rank=rank, host=rank, code=code, after_s=2.0 - rank, stopped=False)
            for rank in range(2)
        ]
        return JobResult(ends=tuple(ends), wall_s=3.0)

    bed = nullcontext(SimpleNamespace(run=run))
    monkeypatch.setattr("benchmarks.step_jobs.Testbed", lambda _: bed)
    turns: list[tuple[str, Turn]] = []
    take = {"expected_s": lambda _: 1.0, "turn": lambda *told: turns.append(told)}
    options: Any = {"python": sys.executable, "iterations": 2, "warmup": 2, "seconds": None}
    return race_cell(CELL, [("ddp", 0)], {}, **options, **take), turns


BEGINS = (0, False, BEGUN.encode() + b'{"contestant": "ddp", "round": 0}')


def test_turns_are_told_from_what_else_workers_print(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = turn_of(0, 1.0)
    ended, turns = raced(
        monkeypatch,
        (0, False, b"some library is here"),
        BEGINS,
        (0, True, TURN.encode() + b"not an event, as it is on standard error"),
        (0, False, TURN.encode() + msgspec.json.encode({"contestant": "ddp", "turn": turn})),
    )
    assert turns == [("ddp", turn)]
    assert ended.contestant is None  # what fails then is nobody's turn


def test_the_reason_is_what_the_first_rank_to_fail_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [b"[rank0]: PeerError: a peer was lost", b"[rank1]: RuntimeError: this is why"]
    lines = [(rank, True, line) for rank, line in enumerate(said)]
    ended, _ = raced(monkeypatch, BEGINS, *lines, (1, True, b"some last words"))
    assert ended.contestant == "ddp"
    assert ended.reason == "rank 1 ended with exit code 1: RuntimeError: this is why"


def test_a_job_that_leaves_no_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.step_jobs.free_bytes", lambda: 0)
    monkeypatch.setattr("benchmarks.step_jobs.WATCH_S", 0.01)
    assert "memory" in raced(monkeypatch)[0].reason


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
    profile = profile_of([200_000_000], [1_000_000], forward_ns=100_000_000)
    network = Network.line(workers=4, a_s=1e-3, b_s_per_byte=1e-8)
    plans, forecasts = planned(profile, {None: network}, OURS)
    assert set(plans) == set(forecasts) == set(OURS)
    assert all(f.iteration_s >= f.lower_bound_s > 0.29 for f in forecasts.values())


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.6, "10 s"), (61, "1 min 01 s"), (3 * 3600 + 120, "3 h 02 min")]
)
def test_durations_are_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_what_computing_does_to_messages_is_measured_before_the_plans_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bert = cell_of({}, Cell(model="bert", workers=4, rate="1gbit"))
    cell = msgspec.structs.replace(bert, clip=True, update_s=0.02)
    profile = cell.cell.profile(update_s=cell.update_s)
    race = race_of(results_of(cell), ["overlap-int8"], path=tmp_path / "results.json")
    factors = {"ddp": 1.1, "need": 1.2, "int8": 1.5}
    slowed = {
        kind: msgspec.structs.replace(cell.network, contention=Contention(exchange=factor))
        for kind, factor in factors.items()
    }
    stock = Ddp().plan(profile, cell.network)

    def train(_: Cell, turns: Any, plans: dict[str, Plan], **others: Any) -> Ended:
        for name, number in turns:
            plan = plans.get(name, stock)
            kind = "ddp" if plan is stock else "int8" if plan.wire else "need"
            iteration_s = predict_iteration_s(profile, slowed[kind], plan)
            others["turn"](name, turn_of(number, iteration_s))
        return Ended(contestant=None)

    monkeypatch.setattr("benchmarks.step_race.race_cell", train)
    monkeypatch.setattr("benchmarks.step_race.PREDICTED", ("overlap-int8",))
    race.run(cell.cell)
    (measured,) = race.results.cells
    by_wire = networks_of(measured, profile)
    assert by_wire[None] == measured.network
    found = {
        "ddp": measured.network.contention,
        "need": measured.network.contention_by_need,
        "int8": by_wire["int8"].contention_by_need,
    }
    for kind, contention in found.items():
        assert contention is not None
        assert (contention.computing, contention.per_message_s) == (1.0, 0.0)
        assert contention.exchange == pytest.approx(factors[kind], rel=0.01)


def test_a_plan_counts_clipping_that_no_replay_emulates() -> None:
    cell = Cell(model="resnet50", workers=4, rate="1gbit", clip=True)
    plain, counted = cell.profile(), cell.profile(update_s=0.02)
    assert counted.computation_s == pytest.approx(plain.computation_s + 0.02)
    assert counted.norm == plain.norm == "2"
