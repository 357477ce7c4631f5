"""Jobs: every worker knows its place, and one that fails ends all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from syncline.errors import UserError
from syncline.lab.processes import received_signals
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.job import JobResult, worker_environment
from tests.timeouts import DEADLINE_S

from .machine import descendants


def run(
    bed: Testbed, code: str, *, grace_s: float = DEADLINE_S, timeout_s: float = DEADLINE_S
) -> JobResult:
    return bed.run(["sh", "-c", code], grace_s=grace_s, timeout_s=timeout_s)


def test_workers_know_their_place_and_their_device() -> None:
    cluster = Cluster(hosts=2, workers_per_host=2)
    assert worker_environment(cluster, 3, {"OMP_NUM_THREADS": "7"}) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "1",
    }
    assert "PYTHONUNBUFFERED" not in worker_environment(cluster, 0, {"PYTHONUNBUFFERED": ""})
    assert "OMP_NUM_THREADS" in worker_environment(cluster, 0, {})


def test_output_is_kept_by_rank_also_much_and_of_what_a_worker_leaves_behind(bed: Testbed) -> None:
    much = "setsid sleep 1000 & seq 100000; seq 100000 >&2"
    result = run(bed, f"{much}; echo $RANK; echo no end | tr -d '\\n' >&2")
    numbers = "".join(f"{number}\n" for number in range(1, 100001))
    assert result.stdout == tuple(f"{numbers}{rank}\n" for rank in range(3))
    assert result.stderr == (f"{numbers}no end\n",) * 3
    assert [(end.rank, end.host, end.code) for end in result.ends] == [(n, n, 0) for n in range(3)]
    assert (result.exit_code, result.cause) == (0, None)
    assert (result.signal, result.timed_out) == (None, False)


@pytest.mark.parametrize(
    ("failure", "code", "exit_code"),
    [("exit 5", 5, 5), ("kill -9 $$", -signal.SIGKILL, 128 + signal.SIGKILL)],
)
def test_the_first_to_fail_is_the_cause_and_the_others_are_stopped(
    bed: Testbed, failure: str, code: int, exit_code: int
) -> None:
    result = run(bed, f"[ $RANK != 1 ] || {failure}; sleep 1000", grace_s=0.05)
    assert result.exit_code == exit_code
    assert result.cause is not None
    assert (result.cause.rank, result.cause.code) == (1, code)
    assert [end.stopped for end in result.ends] == [True, False, True]
    # Beside other work, the second signal may overtake the first one.
    assert {result.ends[rank].code for rank in (0, 2)} <= {-signal.SIGTERM, -signal.SIGKILL}


def test_the_others_may_finish_within_the_grace_time(bed: Testbed, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # Rank 0 has ended for the others once it was waited for.
    code = (
        f"if [ $RANK = 0 ]; then echo $$ > {pid}.0; mv {pid}.0 {pid}; exit 4; fi; "
        f"until [ -e {pid} ]; do sleep 0.01; done; "
        f"while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.01; done"
    )
    result = run(bed, f"{code}; [ $RANK = 1 ] || exit 6", grace_s=DEADLINE_S)
    assert result.exit_code == 4
    assert [(end.code, end.stopped) for end in result.ends] == [(4, False), (0, False), (6, False)]


def test_workers_that_ignore_being_told_are_killed(bed: Testbed, tmp_path: Path) -> None:
    deaf = f"trap '' TERM; echo > {tmp_path}/$RANK; "
    others = f"until [ -e {tmp_path}/1 -a -e {tmp_path}/2 ]; do sleep 0.02; done"
    code = f"{deaf} [ $RANK != 0 ] || {{ {others}; exit 3; }}; while :; do sleep 0.02; done"
    result = run(bed, code, grace_s=0.05)
    assert [end.code for end in result.ends] == [3, -signal.SIGKILL, -signal.SIGKILL]
    assert result.exit_code == 3


def test_a_job_that_takes_too_long(bed: Testbed) -> None:
    for timeout_s in (0.3, 3.0, 30.0):  # a busy machine needs more for the first word
        result = run(bed, "echo here; sleep 1000", timeout_s=timeout_s, grace_s=DEADLINE_S)
        if result.stdout == ("here\n",) * 3:
            break
    assert (result.timed_out, result.exit_code, result.cause) == (True, 124, None)
    assert {end.code for end in result.ends} == {-signal.SIGTERM}
    assert result.stdout == ("here\n",) * 3


def test_the_second_signal_kills(bed: Testbed) -> None:
    told = 0

    def output(rank: int, error: bool, line: bytes) -> None:
        nonlocal told
        told += 1
        if told in (3, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    code = "trap 'echo no' TERM; echo ready; while :; do sleep 0.02; done"
    with received_signals() as signals:
        result = bed.run(
            ["sh", "-c", code], timeout_s=DEADLINE_S, grace_s=1000, output=output, signals=signals
        )
    assert {end.code for end in result.ends} == {-signal.SIGKILL}
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.stdout == ()  # it was handed to ``output``


def test_a_command_that_cannot_be_run_leaves_no_worker(bed: Testbed) -> None:
    before = descendants(os.getpid())
    with pytest.raises(UserError, match="'no-such' on host0 cannot be run"):
        bed.run(["no-such"])
    assert descendants(os.getpid()) <= before  # others may end meanwhile
