"""Tests of ``syncline.parallel.shutdown``; tests of lost peers are in ``test_faults``."""

from pathlib import Path

from tests.mortal import Mortals, script

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
