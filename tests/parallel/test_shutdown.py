"""Tests of ``syncline.parallel.shutdown``; tests of lost peers are in ``test_faults``."""

import subprocess
import sys

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


def test_threads_release_what_they_hold_before_the_interpreter_exits():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_A_THREAD_THAT_HOLDS_A_WORK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "released\n"), ended.stderr
