"""The examples run as their first lines say, and what the tutorial says is carried out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.run import Run
from syncline.plan.simulator.predict import predict
from tests.lab.testbed.machine import require_namespaces
from tests.pages import code_blocks, text_of
from tests.programs import output_of
from tests.timeouts import JOB_DEADLINE_S

ROOT = Path(__file__).parents[1]


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str | Path, **environment: str) -> str:
    return output_of(sys.executable, *arguments, timeout_s=JOB_DEADLINE_S, **environment)


def test_planning_without_torch(tmp_path: Path) -> None:
    # "-c", so that torch can be kept out of reach before the example runs.
    script = ROOT / "examples" / "plan_without_torch.py"
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv = ['plan_without_torch.py', {str(tmp_path)!r}]; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    output = run("-c", code)
    assert output.splitlines()[-1].startswith("overlap: predicted to take")
    kinds = (Profile, Network, Plan)
    profile, network, plan = (kind.load(tmp_path / f"{kind.KIND}.json") for kind in kinds)
    predicted_ms = predict(profile, network, plan).prediction.iteration_s * 1e3
    assert f"{predicted_ms:.1f}" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal", "lightning", "accelerate", "transformers"])
def test_training_leaves_a_report(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"train_{name}.py"
    output = run(*LAUNCHER, script, tmp_path, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1")
    assert ("loss " if name == "transformers" else "test accuracy ") in output
    report = Path(output.split()[-1])
    assert report.exists()
    record = Run.load(report.with_name("run.json"))
    assert record.workers == 2
    # Beside other work its iterations vary, and it may end before there is a decision.
    assert record.baseline is not None


STEPS = "range(600)"


def blocks(language: str) -> list[str]:
    return code_blocks(text_of("tutorial.md"), language)


def changed(script: str) -> str:
    """Return the script with the tutorial's lines taken out and put in, and its new end."""
    (diff,) = blocks("diff")
    out = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    new = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    for old, line in zip(
        ["import torch", *out], ["import torch\n" + new[0], *new[1:]], strict=True
    ):
        assert script.count(old + "\n") == 1
        script = script.replace(old + "\n", line + "\n")
    ending = "torch.distributed.destroy_process_group()"
    assert script.count(ending) == 1
    return script.replace(ending, blocks("python")[1] + ending)


def carried_out(folder: Path, script: str) -> str:
    (folder / "train.py").write_text(script)
    command = shlex.split(blocks("console")[0].removeprefix("$ "))
    assert (command[0], command[-2]) == ("syncline", "python")
    program = Path(sys.executable).with_name("syncline"), *command[1:-2]
    return output_of(*program, sys.executable, command[-1], cwd=folder, timeout_s=JOB_DEADLINE_S)


def shortened(steps: int) -> str:
    script = blocks("python")[0]
    assert script.count(STEPS) == 1
    return script.replace(STEPS, f"range({steps})")


@pytest.mark.slow
def test_training_says_what_it_gained(tmp_path: Path) -> None:
    require_namespaces()
    assert "ms a step" in carried_out(tmp_path, shortened(4))
    # To measure DDP takes at most 66 steps; the others are for planning, and for trying the plan.
    assert "times as fast as DDP" in carried_out(tmp_path, changed(shortened(150)))
    assert (tmp_path / "report" / "report.html").is_file()
    record = Run.load(tmp_path / "report" / "run.json")
    assert record.workers == 2
    assert record.baseline is not None
