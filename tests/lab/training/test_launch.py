"""Mistakes are found before a worker starts; if one fails, all end, and one line says why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from syncline.errors import FileError, MismatchError, UserError
from syncline.lab.processes import threads_a_worker
from syncline.lab.training.checkpoint import FILE_NAME, load_checkpoint
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.launch import preflight
from syncline.lab.training.models.vision import ResNet20
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Gradient, Profile
from tests import strategies as some
from tests.cases import first_few
from tests.lab.testbed.machine import SYNCLINE, descendants, finished, runs, started
from tests.lab.training.test_compressed import few_images
from tests.timeouts import DEADLINE_S, wait_until
from tests.words import assert_tells


def test_cores_are_shared_out_unless_the_user_has_done_it() -> None:
    assert threads_a_worker(2, {"OMP_NUM_THREADS": "5"}) == {}
    assert threads_a_worker(10_000, {}) == {"OMP_NUM_THREADS": "1"}
    assert int(threads_a_worker(1, {})["OMP_NUM_THREADS"]) >= 1


def start(folder: Path, options: str = "") -> subprocess.Popen[str]:
    temporary_of(folder).mkdir()
    command = (*SYNCLINE, "train", "--report", folder / "report", *options.split())
    return started(*command, OMP_NUM_THREADS="1", TMPDIR=str(temporary_of(folder)))


def temporary_of(folder: Path) -> Path:
    return folder / "temporary"


def imports_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


def workers_of(parent: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process of each rank, once both have started."""
    found: dict[int, int] = {}

    def both() -> bool:
        found.clear()
        for process, _ in sorted(descendants(parent.pid)):
            with contextlib.suppress(OSError):  # it has ended
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                for rank in (int(v[5:]) for v in variables if v.startswith(b"RANK=")):
                    found.setdefault(rank, process)  # what a worker starts has its variables, too
        return len(found) == 2

    wait_until(both, "two workers")
    return found


def seconds_computed(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ended(parent: subprocess.Popen[str], workers: Iterable[int] = ()) -> tuple[str, str]:
    """Wait for the end of the command and make sure that no worker is left."""
    try:
        out, err = parent.communicate(timeout=DEADLINE_S)
    finally:
        parent.kill()
    wait_until(lambda: not any(map(runs, workers)), "workers to end")
    assert "Traceback" not in err
    return out, err


def test_training_prints_one_json_object_and_leaves_a_report(tmp_path: Path) -> None:
    images = f"{few_images(tmp_path)} --batch-size 2"
    parent = start(tmp_path, f"--json --baseline --epochs 1 --steps 6 {images}")
    out, err = ended(parent)
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
    parent = start(tmp_path, "--model vgg16 --batch-size 256")
    workers = workers_of(parent)
    wait_until(lambda: seconds_computed(workers[1]) > 5, "the first iteration")
    os.kill(workers[1], signal.SIGKILL)
    _, err = ended(parent, workers.values())
    assert parent.returncode == 1
    assert len(err.splitlines()) == 1
    assert_tells(err, "error: worker 1 ", "SIGKILL (signal 9)", "--resume")


@pytest.mark.parametrize(
    ("number", "code", "says"),
    first_few([(signal.SIGKILL, -signal.SIGKILL, []), (signal.SIGINT, 130, ["stopped"])], 0),
    ids=["killed", "ctrl-c"],
)
def test_when_the_command_ends_the_workers_end_and_the_checkpoint_stays(
    tmp_path: Path, number: signal.Signals, code: int, says: list[str]
) -> None:
    folder = tmp_path / "checkpoint"
    parent = start(tmp_path, f"--epochs 5000 --checkpoint {folder} {few_images(tmp_path)}")
    wait_until(lambda: (folder / FILE_NAME).exists(), "a checkpoint")
    workers = workers_of(parent)
    parent.send_signal(number)
    _, err = ended(parent, workers.values())
    assert parent.returncode == code
    lines = [line for line in err.splitlines() if line and not line.startswith("epoch ")]
    assert lines == says
    assert load_checkpoint(folder)[1].epoch >= 1
    # One folder, and none where the command could remove it.
    assert len(list(temporary_of(tmp_path).iterdir())) == (number == signal.SIGKILL)


@pytest.mark.parametrize("by_workers", first_few([False, True]))
def test_ctrl_c_while_torch_is_imported_leaves_nothing(tmp_path: Path, by_workers: bool) -> None:
    parent = start(tmp_path)
    workers = workers_of(parent).values() if by_workers else ()
    wait_until(lambda: all(map(imports_torch, workers or [parent.pid])), "torch to be imported")
    parent.send_signal(signal.SIGINT)
    if by_workers:
        parent.send_signal(signal.SIGINT)
    assert ended(parent, workers) == ("", "\nstopped\n" if by_workers else "stopped\n")
    assert parent.returncode == 130
    assert not list(temporary_of(tmp_path).iterdir())


@pytest.mark.slow
def test_under_torchrun_the_command_is_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("from syncline.cli import main\nmain()\n")
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node 2 {script}"
    options = f"train --steps 2 {few_images(tmp_path)} --report {tmp_path / 'report'}"
    result = finished(sys.executable, *torchrun.split(), *options.split(), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("resnet20 on imagefolder, 2 workers (gloo)\n")
    assert result.stdout.count("resnet20 on imagefolder") == 1


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    return TrainingConfig.of("resnet20", "digits", report=str(tmp_path / "deep" / "report"))


def check(config: TrainingConfig, **change: object) -> None:
    preflight(msgspec.structs.replace(config, **change), workers_here=2)


def profile(*, missing: int = 0, **more: int) -> Profile:
    """Return a profile of the model, without its last parameters and with more of other names."""
    named = reversed(list(ResNet20(10).named_parameters()))
    elements = {name: p.numel() for name, p in named} | more
    gradients = [Gradient(name=n, elements=e, ready_after=0) for n, e in elements.items()]
    whole = some.profile_of([0], [0])
    return msgspec.structs.replace(whole, workers=2, gradients=tuple(gradients[missing:]))


def test_folders_are_made(config: TrainingConfig, tmp_path: Path) -> None:
    check(config, checkpoint=str(tmp_path / "ck"))
    assert (tmp_path / "deep" / "report").is_dir()
    assert (tmp_path / "ck").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"file/ck: --checkpoint needs a folder"):
        check(config, checkpoint=str(tmp_path / "file" / "ck"))


@pytest.mark.parametrize("planner", PLANNERS)
def test_training_takes_every_planner(config: TrainingConfig, planner: str) -> None:
    check(config, planner=planner)


def test_a_plan_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    def plan(of: Profile, workers: int = 2, **changes: object) -> str:
        made = Plan.merging("single", of, workers, [len(of.gradients) - 1])
        msgspec.structs.replace(made, **changes).save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    check(config, plan=plan(profile()))
    check(config, plan=plan(profile(), wait="need"))
    with pytest.raises(MismatchError, match=r"plan.json: the plan is for 4 workers, this job has"):
        check(config, plan=plan(profile(), workers=4))
    with pytest.raises(MismatchError, match=r"60 gradients .* model has 59; .* leave out --plan"):
        check(config, plan=plan(profile(more=3)))
    with pytest.raises(FileError, match="no such file"):
        check(config, plan=str(tmp_path / "none.json"))


def test_a_profile_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    profile().save(path := tmp_path / "profile.json")
    check(config, profile=str(path))
    profile(missing=1).save(path)
    said = r"the profile has 58 .* this model has 59; .* 'head.bias'; leave out --pr"
    with pytest.raises(MismatchError, match=said):
        check(config, profile=str(path))


def test_the_rest_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    Network.line(workers=16, a_s=1e-3, b_s_per_byte=1e-9).save(path := tmp_path / "network.json")
    with pytest.raises(MismatchError, match="of 16 workers, this job has 2"):
        check(config, network=str(path))
    with pytest.raises(FileError, match="expected a checkpoint, found none"):
        check(config, checkpoint=str(tmp_path), resume=True)
    with pytest.raises(UserError, match="lower --batch-size"):
        check(config, workers=2000)
