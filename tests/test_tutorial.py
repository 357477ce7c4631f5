"""The tutorial's script, changes and commands, carried out as it says."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from syncline.plan.run import Run
from tests.lab.testbed.machine import require_namespaces
from tests.pages import code_blocks, text_of
from tests.programs import output_of
from tests.timeouts import JOB_DEADLINE_S

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
