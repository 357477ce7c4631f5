"""Worker processes that take orders: real ones, without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from syncline.errors import FileError, PeerError, SynclineError, UserError
from syncline.lab.workers import Failure, Lost, ThisHost, WorkerGroup, error_of
from tests.timeouts import DEADLINE_S

PROGRAM = """
import os, signal, sys, time
import msgspec
from syncline.errors import PeerError, UserError
from syncline.lab.workers import serve

class Order(msgspec.Struct):
    text: str

def act(order, progress):
    rank = int(sys.argv[2])
    progress("at it", rank, 2)
    match order.text, rank:
        case "user", 1: raise UserError("take another")
        case "user", _: raise PeerError("lost a rank")
        case "bug", 0: raise ValueError("no")
        case "die", 1: os.kill(os.getpid(), signal.SIGKILL)
        case "die" | "wait", _: time.sleep(3600)
    return Order(order.text + str(rank))

print("hello from", sys.argv[2], flush=True)
if sys.argv[2] == "7":
    sys.exit(3)
serve(sys.argv[1], int(sys.argv[2]), Order, act)
"""


class Order(msgspec.Struct):
    text: str


def add(workers: WorkerGroup, *ranks: int) -> None:
    for rank in ranks:
        command = [sys.executable, "-c", PROGRAM, workers.path, str(rank)]
        workers.start(ThisHost(), command, {}, rank=rank)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[WorkerGroup]:
    folder = tmp_path / ("long-" * 40)  # longer than a socket's address
    folder.mkdir()
    with WorkerGroup(folder) as workers:
        add(workers, 0, 1)
        workers.gather(2)
        yield workers
    assert not list(folder.iterdir())


def ask(workers: WorkerGroup, text: str, **options: object) -> list[str]:
    given = {"timeout_s": DEADLINE_S, **options}
    answers = workers.ask(Order(text), Order, **given)  # type: ignore[arg-type]
    return [answer.text for answer in answers]


def test_answers_come_by_rank_and_large_orders_arrive(pair: WorkerGroup) -> None:
    told: list[tuple[str, int, int]] = []
    assert ask(pair, "a", progress=lambda *now: told.append(now)) == ["a0", "a1"]
    assert sorted(told) == [("at it", 0, 2), ("at it", 1, 2)]
    large = "x" * (1 << 21)
    assert ask(pair, large) == [f"{large}0", f"{large}1"]
    add(pair, 2)
    pair.gather(3)
    assert ask(pair, "b") == ["b0", "b1", "b2"]
    assert ask(pair, "c", ranks=1) == ["c0"]


def test_a_failure_is_raised_in_its_class_and_the_workers_stay(
    pair: WorkerGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^take another\nworker 0: lost a rank$"):
        ask(pair, "user")
    with pytest.raises(SynclineError, match=r"^worker 0 failed: ValueError: no$"):
        ask(pair, "bug")
    assert capsys.readouterr().err.startswith("Traceback")
    assert ask(pair, "a") == ["a0", "a1"]


def test_a_killed_worker_is_named_and_the_others_are_not_waited_for(pair: WorkerGroup) -> None:
    said = r"^worker 1 was ended by SIGKILL \(signal 9\), and said:\n"
    with pytest.raises(PeerError, match=said):
        ask(pair, "die")


def test_an_order_that_takes_too_long(pair: WorkerGroup) -> None:
    with pytest.raises(PeerError, match=r"^stopped \(no answer from worker 0, 1\)$"):
        ask(pair, "wait", timeout_s=0.5, overdue="stopped")


def test_a_worker_that_ends_at_its_start_is_quoted(tmp_path: Path) -> None:
    with WorkerGroup(tmp_path, name="odd worker") as workers:
        add(workers, 7)
        said = r"^odd worker 7 ended with exit code 3, and said:\nhello"
        with pytest.raises(PeerError, match=said):
            workers.gather(1)


def test_workers_that_do_not_connect(tmp_path: Path) -> None:
    with WorkerGroup(tmp_path) as workers:
        workers.start(ThisHost(), ["sleep", "3600"], {}, rank=0)
        with pytest.raises(PeerError, match=r"^workers did not start within 0\.2 s$"):
            workers.gather(1, timeout_s=0.2)


LOST = Failure(kind="PeerError", message="the connection to another worker was lost")


@pytest.mark.parametrize(
    ("failures", "kind", "said"),
    [
        ({0: LOST, 2: Lost(-9)}, PeerError, "worker 2 was ended by SIGKILL (signal 9)"),
        ({0: LOST, 1: Failure(kind="FileError", message="x.png: no")}, FileError, "x.png: no"),
        ({1: LOST}, PeerError, "worker 1: the connection to another worker was lost"),
        ({1: Lost(7)}, PeerError, "worker 1 ended with exit code 7 and no message"),
        ({1: Lost(7, "no")}, PeerError, "worker 1 ended with exit code 7, and said:\nno"),
        ({2: Lost(None)}, PeerError, "worker 2 was lost"),
    ],
)
def test_the_cause_is_raised_not_its_consequences(
    failures: dict[int, Failure | Lost], kind: type[Exception], said: str
) -> None:
    error = error_of("worker", failures)
    assert (type(error), str(error)) == (kind, said)


def test_a_bug_is_shown_with_its_traceback_once(capsys: pytest.CaptureFixture[str]) -> None:
    trace = "Traceback ...\nValueError: no\n"
    bug = Failure(kind="ValueError", message="ValueError: no", traceback=trace)
    error = error_of("worker", {0: bug, 1: bug})
    assert (type(error), str(error)) == (SynclineError, "worker 0 failed: ValueError: no")
    assert capsys.readouterr().err == trace
