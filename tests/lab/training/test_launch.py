"""Whatever happens to a worker, all of them end, and one line says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.lab.processes import threads_a_worker
from syncline.lab.training.checkpoint import FILE_NAME, load_checkpoint
from tests.cases import first_few
from tests.timeouts import DEADLINE_S
from tests.words import assert_tells

COMMAND = (sys.executable, "-c", "from syncline.cli import main; main()", "train")


def test_cores_are_shared_out_unless_the_user_has_done_it() -> None:
    assert threads_a_worker(2, {"OMP_NUM_THREADS": "5"}) == {}
    assert threads_a_worker(10_000, {}) == {"OMP_NUM_THREADS": "1"}
    assert int(threads_a_worker(1, {})["OMP_NUM_THREADS"]) >= 1


# ------------------------------------------------------------------ real processes


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    temporary_of(folder).mkdir()
    return subprocess.Popen(
        [*COMMAND, "--report", str(folder / "report"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary_of(folder))},
    )


def temporary_of(folder: Path) -> Path:
    return folder / "temporary"


def imports_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


def workers_of(parent: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process of each rank that ``parent`` has started, so far."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours
            continue
        rank = next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)
        if int(fields[1]) == parent.pid and rank is not None:
            found[rank] = int(entry.name)
    return found


def seconds_computed(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def ended(parent: subprocess.Popen[str], workers: dict[int, int]) -> tuple[str, str]:
    """Wait for the end of the command and make sure that no worker is left."""
    try:
        out, err = parent.communicate(timeout=DEADLINE_S)
    finally:
        parent.kill()
    wait_until(
        lambda: not any(Path(f"/proc/{p}").exists() for p in workers.values()), "workers to end"
    )
    assert "Traceback" not in err
    return out, err


def test_training_prints_one_json_object_and_leaves_a_report(tmp_path: Path) -> None:
    parent = start(
        tmp_path, *("--json", "--baseline", "--batch-size", "64", "--epochs", "1", "--steps", "6")
    )
    out, err = ended(parent, {})
    assert parent.returncode == 0, err
    assert out.count("\n") == 1
    fields = json.loads(out)
    assert fields["identical_parameters"] is True
    assert fields["results"]["steps"] == 6
    assert Path(fields["report"]).is_file()
    assert err.startswith("epoch 1/1  step 6  test accuracy ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_worker_killed_in_the_first_iteration_ends_all(tmp_path: Path) -> None:
    # An iteration of this takes many seconds; importing torch and the data takes three at most.
    parent = start(tmp_path, "--model", "vgg16", "--batch-size", "256")
    wait_until(lambda: len(workers_of(parent)) == 2, "two workers")
    workers = workers_of(parent)
    wait_until(lambda: seconds_computed(workers[1]) > 5, "the first iteration")
    os.kill(workers[1], signal.SIGKILL)
    _, err = ended(parent, workers)
    assert parent.returncode == 1
    assert len(err.splitlines()) == 1
    assert_tells(err, "error: worker 1 ", "SIGKILL (signal 9)", "--resume")


@pytest.mark.parametrize(
    ("number", "code", "says"),
    first_few([(signal.SIGKILL, -signal.SIGKILL, ""), (signal.SIGINT, 130, "stopped")], 0),
    ids=["killed", "ctrl-c"],
)
def test_when_the_command_ends_the_workers_end_and_the_checkpoint_stays(
    tmp_path: Path, number: signal.Signals, code: int, says: str
) -> None:
    folder = tmp_path / "checkpoint"
    options = ("--epochs", "500", "--batch-size", "64")
    parent = start(tmp_path, *options, "--checkpoint", str(folder))
    wait_until(lambda: (folder / FILE_NAME).exists(), "a checkpoint")
    workers = workers_of(parent)
    assert len(workers) == 2
    parent.send_signal(number)
    _, err = ended(parent, workers)
    assert parent.returncode == code
    assert [line for line in err.splitlines() if line and not line.startswith("epoch ")] == (
        [says] if says else []
    )
    assert load_checkpoint(folder)[1].epoch >= 1
    # One folder, and none where the command could remove it.
    assert len(list(temporary_of(tmp_path).iterdir())) == (number == signal.SIGKILL)


def test_ctrl_c_while_torch_is_imported_leaves_nothing_behind(tmp_path: Path) -> None:
    parent = start(tmp_path)
    wait_until(lambda: imports_torch(parent.pid), "the command to import torch")
    parent.send_signal(signal.SIGINT)
    assert ended(parent, {}) == ("", "stopped\n")
    assert parent.returncode == 130
    assert not list(temporary_of(tmp_path).iterdir())


@pytest.mark.slow
def test_ctrl_c_while_workers_import_torch_leaves_nothing_behind(tmp_path: Path) -> None:
    parent = start(tmp_path)
    wait_until(lambda: len(workers_of(parent)) == 2, "two workers")
    workers = workers_of(parent)
    wait_until(lambda: all(map(imports_torch, workers.values())), "the workers to import torch")
    parent.send_signal(signal.SIGINT)
    parent.send_signal(signal.SIGINT)
    assert ended(parent, workers) == ("", "\nstopped\n")
    assert parent.returncode == 130
    assert not list(temporary_of(tmp_path).iterdir())


@pytest.mark.slow
def test_an_error_of_a_worker_is_said_once_with_its_exit_code(tmp_path: Path) -> None:
    parent = start(tmp_path, "--lr", "1e30", "--batch-size", "64")
    _, err = ended(parent, {})
    assert parent.returncode == 2
    assert err.startswith("error: training diverged: the loss of syncline on rank ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_under_torchrun_the_command_is_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("from syncline.cli import main\nmain()\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    options = ("train", "--steps", "2", "--batch-size", "64", "--report", str(tmp_path / "report"))
    result = subprocess.run(
        [sys.executable, *torchrun, *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("resnet20 on digits, 2 workers (gloo)\n")
    assert result.stdout.count("resnet20 on digits") == 1
