"""``syncline emulate`` and ``syncline replay`` as a user meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.lab.replay.result import Replay
from tests.cli.examples import Printed
from tests.lab.replay.examples import PROFILE
from tests.lab.testbed.machine import (
    SYNCLINE,
    Identity,
    alive,
    descendants,
    devices,
    finished,
    networks,
    require_namespaces,
    started,
)
from tests.timeouts import DEADLINE_S, wait_until

EMULATE = (*SYNCLINE, "emulate")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    require_namespaces()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return finished(*EMULATE, *arguments)


def ready(parent: subprocess.Popen[str], workers: int) -> set[Identity]:
    """Wait until every worker has said that it is ready; return all processes under the command."""
    assert parent.stdout is not None
    for _ in range(workers):
        assert parent.stdout.readline().endswith("| ready\n")
    return descendants(parent.pid)


def test_a_job_that_ends_well() -> None:
    options = "--hosts 2 --workers-per-host 6 --rate 1gbit"
    # Options after the command are the command's.
    code = 'echo $RANK $LOCAL_RANK $NODE_RANK $(uname -n) "$@"'
    result = run(*options.split(), "sh", "-c", code, "sh", "--hosts", "7")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == sorted(
        f"{f'host{n // 6} rank {n}':13} | {n} {n % 6} {n // 6} host{n // 6} --hosts 7"
        for n in range(12)
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
    result = run(*options, "--", sys.executable, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "host0 rank 0 | 100000\n"
    assert "links 1 Gbit/s (host1 100 Mbit/s)" in result.stderr
    rows = {cells[0]: cells[1:] for line in result.stderr.splitlines() if (cells := line.split())}
    assert rows["host1"][:2] == ["100", "Mbit/s"]
    sent, unit = float(rows["host1"][2]), rows["host1"][3]
    assert unit == "kB"
    assert 100 < sent < 110


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
    with started(*EMULATE, "--hosts", "3", "--", "sh", "-c", worker) as parent:
        processes = ready(parent, 3)
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
    with started(*EMULATE, "--hosts", "3", "--rate", "1gbit", "--", "sh", "-c", worker) as parent:
        processes = ready(parent, 3)
        wait_until(lambda: len(descendants(parent.pid)) >= 8, "all daemons")
        processes |= descendants(parent.pid)
        ours = networks(number for number, _ in processes)
        assert len(ours) == 4
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(map(alive, processes)), "the end of all processes")
    assert devices() == before
    # The kernel gives the number of a network that has ended to the next one, which may be that of
    # another program.
    wait_until(lambda: not ours & networks(), "the end of all networks")
    result = run("--hosts", "3", "--", "hostname")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 3


def test_a_reader_that_goes_away_ends_the_job() -> None:
    with started(*EMULATE, "--", "sh", "-c", "while :; do echo ready; done") as parent:
        processes = ready(parent, 2)
        assert parent.stdout is not None
        parent.stdout.close()
        assert parent.stderr is not None
        said = parent.stderr.read()
        assert parent.wait(DEADLINE_S) == 128 + signal.SIGPIPE
    assert "Traceback" not in said
    assert not any(map(alive, processes))


QUICK = ("--rounds", "1", "--iterations", "1", "--warmup", "1", "--rate", "1gbit")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    PROFILE.save(path := tmp_path / "profile.json")
    return path


@pytest.mark.slow
def test_a_table_and_a_report(printed: Printed, profile: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    options = ("--planner", "ddp,merge", "--scale-compute", "2", "--report", report)
    lines = printed("replay", profile, *QUICK, *options).splitlines()
    assert lines[0].startswith("layers · 2 hosts, 1 worker each, links 1 Gbit/s · medians of 1 ")
    begins = {line.split()[0] for line in lines if line.strip()}
    assert begins >= {"planner", "ddp", "merge", "computing"}
    assert "note: computing takes 2 times as long as in the profile" in lines
    assert lines[-1] == f"report written to {report}"
    found = Replay.load(report / "replay.json")
    assert found.computation_s == pytest.approx(2 * PROFILE.computation_s)


@pytest.mark.slow
def test_json_is_all_that_is_printed(printed: Printed, profile: Path, tmp_path: Path) -> None:
    network = "a=1e-4,b=1e-9"
    options = ("--planner", "wfbp", "--network", network, "--json")
    found = Replay.from_json(printed("replay", profile, *QUICK, *options))
    assert [entry.planner for entry in found.entries] == ["wfbp"]
    assert found.network.startswith(f"{network} at 2 workers")
    assert found.warmup == found.iterations == found.rounds == 1
    found.save(tmp_path / "saved.json")
    assert printed("show", tmp_path / "saved.json").startswith("layers · 2 hosts")
