"""Tests of ``syncline.train.shutdown``; tests of lost peers are in ``test_faults``."""

from pathlib import Path

import pytest

from tests.mortal import Mortals, script
from tests.words import assert_tells

ENDS_WITH_A_THREAD_THAT_HOLDS_A_WORK = """
import threading
from multiprocessing.util import Finalize

import torch
from syncline import DistributedDataParallel

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
DistributedDataParallel(torch.nn.Linear(1, 1))
ended = threading.Event()
release = lambda: (ended.wait(), print("released", flush=True))
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
import torch
import torch.distributed as dist
from syncline.train.ddp import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{before}
model = DistributedDataParallel(torch.nn.Linear(4, 4), cache=False)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("before", "facts"),
    [
        ("", ["measuring the first iterations", "after 3 iterations, while measuring DDP: "]),
        ("logging.basicConfig(level='WARNING')", []),
        ("logging.getLogger('syncline').setLevel('WARNING')", []),
        ("logging.disable()", []),
    ],
)
def test_a_training_that_ends_undecided_says_so_unless_logging_says_otherwise(
    mortals: Mortals, tmp_path: Path, before: str, facts: list[str]
) -> None:
    [ended] = mortals.run(script, 1, TRAINS.format(before=before), folder=tmp_path)
    assert ended.code == 0
    for line, fact in zip(ended.err.splitlines(), facts, strict=True):
        assert_tells(line, "syncline: ", fact)
