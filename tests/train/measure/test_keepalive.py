"""A process ends only after it has back what it has lent, or has waited for long enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syncline.train.measure.keepalive import keepalive
from tests.mortal import Mortals, script

LENDING = """
import os, sys, threading, time
import torch
from syncline.train.measure import keepalive

held = [keepalive.keepalive(torch.ones(3))]
keepalive.PATIENCE_S = 1e9
"""
RETURNED_LATE = """
ending = threading.Event()

def return_it():
    ending.wait()
    time.sleep(0.1)
    print("returned", flush=True)
    held.clear()

returning = threading.Thread(target=return_it, daemon=True)
returning.start()
keepalive.Finalize(None, ending.set, exitpriority=keepalive.BEFORE_RELEASED)

def after_the_wait():
    print(len(held))
    returning.join()  # a thread that is freeing a tensor when Python ends would abort the process

keepalive.Finalize(None, after_the_wait, exitpriority=keepalive.RELEASED - 1)
"""
LENT_BY_A_FORK = """
child = os.fork()
if child == 0:
    keepalive.keepalive(torch.ones(1))
    sys.exit()
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
held.clear()
"""
MANY = """
for _ in range(100):
    keepalive.keepalive(torch.ones(1))
print(len(keepalive._aliases))
held.clear()
keepalive.keepalive(torch.ones(1))
print(len(keepalive._aliases))
"""


def test_what_is_lent_is_the_same_memory() -> None:
    values = torch.zeros(4)
    keepalive(values[1:3]).fill_(1)
    assert values.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(RETURNED_LATE, "returned\n0\n", id="waits for what is returned late"),
        pytest.param(LENT_BY_A_FORK, "0\n", id="only the lender waits"),
        pytest.param(
            "keepalive.PATIENCE_S = 0.01", "", id="what never comes", marks=pytest.mark.slow
        ),
        pytest.param(MANY, "101\n1\n", id="forgets what was returned", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_process(mortals: Mortals, tmp_path: Path, text: str, said: str) -> None:
    [done] = mortals.run(script, 1, LENDING + text, folder=tmp_path)
    assert (done.code, done.err, done.out) == (0, "", said)
