"""A process ends only after it has back what it has lent, or has waited for long enough."""

from __future__ import annotations

from collections.abc import Callable
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
"""


@pytest.fixture
def output_of(mortals: Mortals, tmp_path: Path) -> Callable[[str], str]:
    """Run what follows the lending in a process of its own; return what it has printed."""

    def run(text: str) -> str:
        [done] = mortals.run(script, 1, LENDING + text, folder=tmp_path)
        assert (done.code, done.err) == (0, "")
        return done.out

    return run


def test_what_is_lent_is_the_same_memory() -> None:
    values = torch.zeros(4)
    keepalive(values[1:3]).fill_(1)
    assert values.tolist() == [0, 1, 1, 0]


def test_the_end_waits_for_what_is_returned_late(output_of: Callable[[str], str]) -> None:
    assert (
        output_of(
            """
keepalive.PATIENCE_S = 1e9
ending = threading.Event()

def return_it():
    ending.wait()
    time.sleep(0.1)
    print("returned", flush=True)
    held.clear()

threading.Thread(target=return_it, daemon=True).start()
keepalive.Finalize(None, ending.set, exitpriority=keepalive.BEFORE_RELEASED)
"""
        )
        == "returned\n"
    )


@pytest.mark.slow
def test_the_end_does_not_wait_for_what_never_comes(output_of: Callable[[str], str]) -> None:
    assert output_of("keepalive.PATIENCE_S = 0.01") == ""


def test_only_the_lender_waits(output_of: Callable[[str], str]) -> None:
    said = output_of(
        """
keepalive.PATIENCE_S = 1e9
child = os.fork()
if child == 0:
    keepalive.keepalive(torch.ones(1))
    sys.exit()
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
held.clear()
"""
    )
    assert said == "0\n"


@pytest.mark.slow
def test_what_was_returned_is_forgotten(output_of: Callable[[str], str]) -> None:
    said = output_of(
        """
for _ in range(100):
    keepalive.keepalive(torch.ones(1))
print(len(keepalive._aliases))
held.clear()
keepalive.keepalive(torch.ones(1))
print(len(keepalive._aliases))
"""
    )
    assert said == "101\n1\n"
