"""``syncline emulate`` as a user meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.testbed.machine import (
    Identity,
    alive,
    descendants,
    devices,
    networks,
    require_namespaces,
    wait_until,
)
from tests.timeouts import DEADLINE_S

COMMAND = (sys.executable, "-c", "from syncline.cli import main; main()", "emulate")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    require_namespaces()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def started(parent: subprocess.Popen[str], workers: int) -> set[Identity]:
    """Wait until every worker has said that it is ready; return all processes under the command."""
    assert parent.stdout is not None
    for _ in range(workers):
        assert parent.stdout.readline().endswith("| ready\n")
    return descendants(parent.pid)


def test_a_job_that_ends_well() -> None:
    result = run(
        "--hosts", "2", "--workers-per-host", "6", "--rate", "1gbit", "--", "printenv", "RANK"
    )
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == sorted(
        f"{f'host{rank // 6} rank {rank}':13} | {rank}" for rank in range(12)
    )
    lines = result.stderr.splitlines()
    assert lines[0] == "emulating 2 hosts, 6 workers each, links 1 Gbit/s"
    assert lines[1].startswith("12 workers ended well after ")
    assert lines[2] == "nothing was sent from host to host"


TRANSFER = """
import os, pathlib, socket, time
listening = pathlib.Path(__file__).with_name("listening")
if os.environ["RANK"] == "0":
    with socket.create_server(("", 5000)) as server:
        listening.touch()
        with server.accept()[0].makefile("rb") as sent:
            print(len(sent.read()))
else:
    while not listening.exists():  # what is refused would be traffic, too
        time.sleep(0.02)
    socket.create_connection((os.environ["MASTER_ADDR"], 5000)).sendall(bytes(100_000))
"""


def test_what_passed_each_link_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "transfer.py"
    script.write_text(TRANSFER)
    options = ("--rate", "1gbit", "--hosts-rate", "1:100mbit", "--timeout", "300")
    result = run(*options, "--", sys.executable, str(script))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "host0 rank 0 | 100000\n"
    assert "links 1 Gbit/s (host1 100 Mbit/s)" in result.stderr
    rows = {cells[0]: cells[1:] for line in result.stderr.splitlines() if (cells := line.split())}
    assert rows["host1"][:2] == ["100", "Mbit/s"]
    sent, unit = float(rows["host1"][2]), rows["host1"][3]
    assert unit == "kB"
    assert 100 < sent < 110


def test_options_after_the_command_are_the_commands() -> None:
    result = run("--hosts", "1", "echo", "--hosts", "7")
    assert result.stdout == "host0 rank 0 | --hosts 7\n"


def test_a_rank_that_fails_is_named_and_its_exit_code_returned(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # reading it ends with rank 0, which must not be stopped
    code = (
        f"echo to standard error >&2; case $RANK in 0) exec 3> {pipe};; "
        f"1) cat {pipe}; exit 7;; *) sleep 1000;; esac"
    )
    result = run("--hosts", "3", "--grace", "0.05", "--", "sh", "-c", code)
    assert result.returncode == 7
    assert "host1 rank 1 | to standard error\n" in result.stderr
    assert "rank 1 on host1 ended with exit code 7" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: rank 1 on host1 ended with exit code 7 after ")
    assert last.endswith("; rank 0 ended well; rank 2 had to be stopped")


def test_a_rank_that_is_killed() -> None:
    result = run(
        "--hosts", "2", "--grace", "0", "--", "sh", "-c", "[ $RANK = 0 ] && kill -SEGV $$; sleep 99"
    )
    assert result.returncode == 128 + signal.SIGSEGV
    assert "error: rank 0 on host0 was ended by SIGSEGV (signal 11) after " in result.stderr


def test_a_job_that_takes_too_long() -> None:
    result = run("--timeout", "0.2", "--grace", "1", "--", "sleep", "1000")
    assert result.returncode == 124
    assert result.stderr.splitlines()[1] == "error: the job was stopped after 0.2 s (--timeout)"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "sigterm", "the terminal closes"],
)
def test_a_signal_ends_all_workers(number: signal.Signals, code: int) -> None:
    worker = f"trap 'echo told; exit 1' {number.name[3:]}; echo ready; while :; do sleep 0.02; done"
    with start("--hosts", "3", "--", "sh", "-c", worker) as parent:
        processes = started(parent, 3)
        parent.send_signal(number)
        out, err = parent.communicate(timeout=DEADLINE_S)
    assert parent.returncode == code
    assert sorted(out.splitlines()) == [f"host{rank} rank {rank} | told" for rank in range(3)]
    assert f"{number.name} was passed on; 3 workers have 10 s to end; once more kills" in err
    assert f"stopped by {number.name} after " in err
    assert not any(map(alive, processes))


def test_when_it_is_killed_nothing_is_left_and_the_next_start_works() -> None:
    before = devices()
    # What is hardest to get rid of: workers that ignore signals, and a daemon without a parent.
    worker = "trap '' TERM INT HUP; setsid sleep 1000 & echo ready; while :; do sleep 0.02; done"
    with start("--hosts", "3", "--rate", "1gbit", "--", "sh", "-c", worker) as parent:
        processes = started(parent, 3)
        wait_until(lambda: len(descendants(parent.pid)) >= 8, "all daemons")
        processes |= descendants(parent.pid)
        ours = networks(number for number, _ in processes)
        assert len(ours) == 4
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(map(alive, processes)), "the end of all processes")
    assert devices() == before
    assert not ours & networks()
    result = run("--hosts", "3", "--", "hostname")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 3


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    worker = f"echo ready; until [ -e {tmp_path}/$0 ]; do sleep 0.02; done; ip -br addr show eth0"
    with (
        start("--hosts", "2", "--", "sh", "-c", worker, "first") as first,
        start("--hosts", "2", "--", "sh", "-c", worker, "second") as second,
    ):
        started(first, 2)
        started(second, 2)
        (tmp_path / "first").touch()
        out, _ = first.communicate(timeout=DEADLINE_S)
        assert (first.returncode, out.count("10.0.0.")) == (0, 2)
        assert second.poll() is None
        (tmp_path / "second").touch()
        out, _ = second.communicate(timeout=DEADLINE_S)
        assert (second.returncode, out.count("10.0.0.")) == (0, 2)


def test_a_reader_that_goes_away_ends_the_job() -> None:
    with start("--", "sh", "-c", "while :; do echo ready; done") as parent:
        processes = started(parent, 2)
        assert parent.stdout is not None
        parent.stdout.close()
        assert parent.stderr is not None
        said = parent.stderr.read()
        assert parent.wait(DEADLINE_S) == 128 + signal.SIGPIPE
    assert "Traceback" not in said
    assert not any(map(alive, processes))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'COMMAND...'"),
        (("--hosts", "0", "true"), "error: hosts must be from 1 to 100, found 0"),
        (("--rate", "1gb", "true"), "error: bandwidth '1gb' could mean bits or bytes"),
        (("--hosts-rate", "9:1gbit", "true"), "error: a rate is given for host 9, but the 2 hosts"),
        (
            ("--timeout", "0", "true"),
            "error: the seconds of --timeout must be finite and above 0",
        ),
        (("--grace", "-1", "true"), "error: the seconds of --grace must be finite and at least 0"),
        (("no-such",), "error: 'no-such' on host0 cannot be run: No such file or directory; check"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
