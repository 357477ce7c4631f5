"""What launchers share."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from syncline.lab import processes
from syncline.lab.processes import LocalProcess, ended_by_signals, received_signals, run_folder
from tests.lab.testbed.machine import runs, started
from tests.timeouts import DEADLINE_S, wait_until


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
    assert processes.end_of(code) == words
    assert processes.exit_code_of(code) == exit_code


def test_signals_are_read_instead_of_acting_and_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with received_signals() as received:
        received.settimeout(10)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        read = received.recv(1) + received.recv(1)
    assert sorted(read) == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


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


FAMILY = "sleep 100 & echo $! $$; wait"  # a process with a child; it prints both
LAUNCHER = """
import time
from syncline.lab.processes import LocalProcess
LocalProcess(["sh", "-c", "echo $$; exec sleep 100"], {})
time.sleep(100)
"""


def test_a_process_ends_with_a_launcher_that_is_killed() -> None:
    launcher = started(sys.executable, "-c", LAUNCHER)
    assert launcher.stdout is not None
    process = int(launcher.stdout.readline())
    launcher.kill()
    wait_until(lambda: not runs(process), "the end of the process")
    launcher.communicate()


def test_closing_ends_all_that_a_process_has_started(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = LocalProcess(["sh", "-c", FAMILY], {}, stdout=out)
    wait_until((tmp_path / "out").read_text, "the numbers of both processes")
    family = [int(number) for number in (tmp_path / "out").read_text().split()]
    assert process.close(time.monotonic()) == -signal.SIGKILL
    wait_until(lambda: not any(map(runs, family)), "the end of both processes")
    assert process.close(time.monotonic()) == -signal.SIGKILL


def test_a_process_may_end_by_itself() -> None:
    process = LocalProcess(["sh", "-c", "exit $CODE"], {"CODE": "7"})
    assert process.close(time.monotonic() + DEADLINE_S) == 7
    assert process.close(time.monotonic()) == 7
    process.terminate()  # to no effect


# What a command leaves behind when it is killed, the next one removes.

HOLD = """
import time
from syncline.lab.processes import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_this_users_alone_and_goes_with_what_is_in_it(temporary: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_command_is_removed_and_no_other(temporary: Path) -> None:
    holders = [started(sys.executable, "-c", HOLD, TMPDIR=str(temporary)) for _ in range(2)]
    try:
        folders = [Path(h.stdout.readline().strip()) for h in holders if h.stdout is not None]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert folders[0].exists()
        with run_folder():
            assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_left_alone(temporary: Path) -> None:
    theirs = temporary / f"syncline-{os.getuid()}-squatted"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    with run_folder() as folder:
        assert folder != theirs
    assert theirs.exists()
