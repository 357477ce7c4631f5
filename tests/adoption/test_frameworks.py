"""Frameworks train with their adapters as with stock DDP, to the last bit, and overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
CASES = [
    ("lightning", "automatic"),
    ("transformers", "accumulating"),
    ("accelerate", "plain"),
    ("lightning", "accumulating"),
    ("lightning", "manual"),
    ("lightning", "averaging"),
    ("lightning", "swa"),
    ("transformers", "checkpointed"),
    ("accelerate", "saved"),
]


def run(framework: str, kind: str, which: str, folder: Path) -> list[dict[str, Any]]:
    """Train with two processes; return what each has noted."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [sys.executable, *launcher, f"tests.adoption.run_{framework}", kind, which, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
    )
    assert done.returncode == 0, "\n".join(
        line for line in done.stderr.splitlines() if "[rank" in line or "Error" in line
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "kind"), CASES)
def test_bits_are_those_of_stock_ddp(framework: str, kind: str, tmp_path: Path) -> None:
    stock = run(framework, kind, "stock", tmp_path / "stock")
    ours = run(framework, kind, "syncline", tmp_path / "syncline")
    assert {rank["wrapper"] for rank in stock} == {"torch.nn.parallel.distributed"}
    assert {rank["wrapper"] for rank in ours} == {"syncline.parallel.ddp"}
    assert len({rank["digest"] for rank in stock + ours}) == 1
    for rank in ours:
        assert rank["steps"] == stock[0]["steps"]
        assert rank["overlapped"] >= 20, rank
    if kind == "automatic":
        for which in ("stock", "syncline"):
            run(framework, "resumed", which, tmp_path / which)
        resumed = [json.loads((tmp_path / w / "0.json").read_text()) for w in ("stock", "syncline")]
        assert resumed[0]["digest"] == resumed[1]["digest"] != stock[0]["digest"]
