"""What launchers share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncline.lab.processes import (
    LocalProcess,
    end_of,
    ended_by_signals,
    exit_code_of,
    handled_signals,
    place_variables,
    received_signals,
)
from tests.timeouts import DEADLINE_S


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (0, "ended with exit code 0", 0),
        (3, "ended with exit code 3", 3),
        (-9, "was ended by SIGKILL (signal 9)", 137),
        (-40, "was ended by signal 40", 168),
    ],
)
def test_how_a_process_ended(code: int, words: str, exit_code: int) -> None:
    assert end_of(code) == words
    assert exit_code_of(code) == exit_code


def test_ranks_fill_one_host_after_the_other() -> None:
    variables = place_variables(rank=5, workers=6, workers_per_host=2)
    assert variables == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
    }


def test_signals_are_read_instead_of_acting_and_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with received_signals() as received:
        received.settimeout(10)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        read = received.recv(1) + received.recv(1)
    assert sorted(read) == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_replaced_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with contextlib.suppress(KeyError), handled_signals(lambda *_: None):
        assert signal.getsignal(signal.SIGHUP) != before
        raise KeyError
    assert signal.getsignal(signal.SIGHUP) == before


def test_the_first_signal_raises_and_further_ones_do_not_disturb_what_tidies_up() -> None:
    before = signal.getsignal(signal.SIGTERM)
    tidied = False
    with pytest.raises(SystemExit) as caught, ended_by_signals():  # noqa: PT012 - what is tested
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            tidied = True
    assert caught.value.code == 143
    assert tidied
    assert signal.getsignal(signal.SIGTERM) == before


def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        with received_signals() as received:
            received.settimeout(0.1)
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(TimeoutError):
                received.recv(1)
    finally:
        signal.signal(signal.SIGHUP, before)


FAMILY = "sleep 100 & echo $! $$; wait"
"""A process with a child; it prints both."""
LAUNCHER = """
import time
from syncline.lab.processes import LocalProcess
LocalProcess(["sh", "-c", "echo $$; exec sleep 100"], {})
time.sleep(100)
"""


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(process: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while runs(process):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_process_ends_with_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    process = int(launcher.stdout.readline())
    launcher.kill()
    wait_for_end(process)
    launcher.communicate()


def test_closing_ends_all_that_a_process_has_started(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = LocalProcess(["sh", "-c", FAMILY], {}, stdout=out)
    while not (said := (tmp_path / "out").read_text()):
        time.sleep(0.01)
    assert process.close(time.monotonic()) == -signal.SIGKILL
    for number in said.split():
        wait_for_end(int(number))
    assert process.close(time.monotonic()) == -signal.SIGKILL


def test_a_process_may_end_by_itself() -> None:
    process = LocalProcess(["sh", "-c", "exit $CODE"], {"CODE": "7"})
    assert process.close(time.monotonic() + DEADLINE_S) == 7
    assert process.close(time.monotonic()) == 7
    process.terminate()  # to no effect
