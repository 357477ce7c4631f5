"""Tests of ``syncline.train.shutdown``; tests of lost peers are in ``test_faults``."""

import re
from pathlib import Path

import pytest

from tests.mortal import Mortals, script

ENDS_WITH_A_THREAD_THAT_HOLDS_A_WORK = """
import threading
import time
from multiprocessing.util import Finalize

import torch
from syncline import DistributedDataParallel

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
ended, released = threading.Event(), threading.Event()
# On a busy machine the thread may run later than is waited for at the end.
sleep, time.sleep = time.sleep, lambda s: released.wait(60) if ended.is_set() else sleep(s)
DistributedDataParallel(torch.nn.Linear(1, 1))
release = lambda: (ended.wait(), print("released", flush=True), released.set())
threading.Thread(target=release, daemon=True).start()
Finalize(None, ended.set, exitpriority=-998)
"""


def test_threads_release_what_they_hold_before_the_interpreter_exits(
    mortals: Mortals, tmp_path: Path
) -> None:
    [ended] = mortals.run(script, 1, ENDS_WITH_A_THREAD_THAT_HOLDS_A_WORK, folder=tmp_path)
    assert (ended.code, ended.out) == (0, "released\n"), ended.err


TRAINS = """
import logging
import os
import torch
import torch.distributed as dist
from syncline.train.ddp import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{before}
model = DistributedDataParallel(torch.nn.Linear(4, 4), cache=False)
for _ in range(3):
    with {around}:
        model(torch.ones(2, 4)).sum().backward()
{after}
"""
BEGINS = "syncline: measuring the first iterations"
ENDED = "syncline: training ended after 3 iterations, while measuring DDP: .* training decides it"
UNDECIDED = f"{ENDED}; profile= and"
AS_RECORDS = [f"INFO:syncline:{line}" for line in (BEGINS, UNDECIDED)]
FAILS = ("raise SystemExit(1)", "1 / 0")
SECOND = "other = DistributedDataParallel(torch.nn.Bilinear(4, 4, 1)); other(*torch.ones(2, 2, 4))"
OF_TWO = [
    f"syncline: Bilinear: {BEGINS[10:]}",
    "syncline: Bilinear: training",
    "syncline: Linear: training ended after 3",
]


@pytest.mark.parametrize(
    ("before", "around", "after", "expected"),
    [
        ("", "torch.enable_grad()", "", [BEGINS, UNDECIDED]),
        ("logging.basicConfig()", "torch.enable_grad()", "", [BEGINS, UNDECIDED]),
        ("logging.basicConfig(level=20)", "torch.enable_grad()", "", AS_RECORDS),
        ("logging.getLogger().setLevel('INFO')", "torch.enable_grad()", "", [BEGINS, UNDECIDED]),
        ("logging.basicConfig(level='ERROR')", "torch.enable_grad()", "", []),
        ("logging.getLogger('syncline').setLevel('WARNING')", "torch.enable_grad()", "", []),
        ("logging.disable()", "torch.enable_grad()", "", []),
        ("", "model.no_sync()", "", [BEGINS, "syncline: training ended without an exchange"]),
        ("", "torch.enable_grad()", FAILS[0], [BEGINS, UNDECIDED]),
        ("__import__('sys').excepthook = print", "torch.enable_grad()", FAILS[1], [BEGINS]),
        ("os.environ['SYNCLINE_RUN'] = ''", "torch.enable_grad()", "", [BEGINS, f"{ENDED}$"]),
        ("", "torch.enable_grad()", SECOND, [BEGINS, *OF_TWO]),
    ],
)
def test_a_training_that_ends_undecided_says_so_unless_logging_says_otherwise(
    mortals: Mortals, tmp_path: Path, before: str, around: str, after: str, expected: list[str]
) -> None:
    text = TRAINS.format(before=before, around=around, after=after)
    [ended] = mortals.run(script, 1, text, folder=tmp_path)
    assert ended.code == int(after in FAILS)
    for line, start in zip(ended.err.splitlines(), expected, strict=True):
        assert re.match(start, line)
