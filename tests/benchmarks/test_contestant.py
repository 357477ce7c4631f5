"""Contestants train in turns, each of its own script."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.contestant import Contestant

from syncline.lab.testbed import Cluster
from tests.lab.testbed.machine import require_namespaces

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(99, 99))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 99)).square().mean().backward()
    optimizer.step()
"""
WARM_UP, PASSES, TURNS = 3, 4, 2


def contestant(folder: Path, steps: int, bucket_cap_mb: int | None = None) -> Contestant:
    (folder / "train.py").write_text(SCRIPT)
    return Contestant(
        ["train.py", str(steps)],
        cluster=Cluster.of(hosts=2, rate="1gbit"),
        environment={},
        job={
            "warm_up": WARM_UP,
            "most": WARM_UP,
            "passes": PASSES,
            "digest_at": WARM_UP + TURNS * PASSES,
            "bucket_cap_mb": bucket_cap_mb,
        },
        python=sys.executable,
        folder=str(folder),
    )


@pytest.mark.slow
def test_each_trains_when_it_is_its_turn(tmp_path: Path) -> None:
    require_namespaces()
    with contestant(tmp_path, 99) as one, contestant(tmp_path, 99, 1) as other:
        turns = [each.turn() for _ in range(TURNS) for each in (one, other)]
    times_s = [time_s for turn in turns for time_s in turn["begins_s"]]
    assert len(times_s) == len(turns) * (PASSES + 1)
    assert all(a < b for a, b in pairwise(times_s))  # nobody trains in another's turn
    assert turns[-1]["digest"] == turns[-2]["digest"] != ""


@pytest.mark.slow
def test_a_script_that_ends_too_early_is_told(tmp_path: Path) -> None:
    require_namespaces()
    with (
        pytest.raises(SystemExit, match=r"rank \d ended.*let it make more steps"),
        contestant(tmp_path, WARM_UP + 1) as one,
    ):
        one.turn()
