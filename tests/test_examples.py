"""The examples run as their first lines say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.run import Run
from syncline.plan.simulator.predict import predict
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
