"""A peer dies, is killed or falls silent: whatever waits in torch raises an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.backend import lost_peer_jobs as jobs
from tests.comm.backend.kills import Kill, Route, Wrapper, drawn, run
from tests.mortal import Ended, Mortals

FIRST = ["DDP", "hook, PowerSGD", "future, then then", "functional, several", "new_group"]
"""Those that wait in different places of torch."""
DIES = [*FIRST, *(name for name in jobs.CASES if name not in FIRST)]
OVER_TCP = ["DDP", "DDP, buffers", "DDP, first step", "join", "FSDP2", "ours", *FIRST[1:4]]
"""The tests of kills draw more trainings over TCP."""


def names_the_victim(ended: Ended, words: str) -> None:
    """Check that a survivor's script ended by an uncaught error that names the rank."""
    assert ended.code == 1, ended
    # An error with a cause prints the cause first.
    *_, error = [line for line in ended.err.splitlines() if "syncline.errors.PeerError: " in line]
    assert f"rank {jobs.VICTIM} {words}" in error, ended.err


LOST = [
    *first_few(((name, "dies", "auto") for name in DIES), len(FIRST)),
    *first_few((name, "is silent", "auto") for name in jobs.CASES),
    *first_few(((name, how, "tcp") for name in OVER_TCP for how in ("dies", "is silent")), 0),
]


@pytest.mark.parametrize(("name", "how", "transport"), LOST)
def test_a_peer_is_lost(
    mortals: Mortals, tmp_path: Path, name: str, how: jobs.How, transport: jobs.Transport
) -> None:
    survivor, _ = mortals.run(jobs.loses_a_peer, 2, name, how, transport, folder=tmp_path)
    # Not "did not connect in time".
    dies = "" if name == "monitored_barrier" else "has ended"
    names_the_victim(survivor, dies if how == "dies" else "did not")


def test_a_peer_of_another_host_dies_before_a_group(mortals: Mortals, tmp_path: Path) -> None:
    survivor, _ = mortals.run(jobs.loses_a_peer, 2, "new_group", "dies", "tcp", folder=tmp_path)
    names_the_victim(survivor, "has ended, or cannot be reached any more, and so does not join")


NUMBERS = range(15)  # ``tools/kill-ranks`` runs more
BOTH: tuple[Wrapper, ...] = ("torch", "syncline")


@pytest.mark.parametrize("number", first_few(NUMBERS, 2))
@pytest.mark.parametrize("wrapper", BOTH)
def test_after_a_kill(mortals: Mortals, tmp_path: Path, wrapper: Wrapper, number: int) -> None:
    kill = drawn(number, wrapper)
    assert run(mortals, kill, tmp_path).failures == [], kill


@pytest.mark.slow
@pytest.mark.parametrize("route", ["shared", "mixed"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_after_a_silence(mortals: Mortals, tmp_path: Path, wrapper: Wrapper, route: Route) -> None:
    kill = Kill(wrapper=wrapper, route=route, how="SIGSTOP")
    assert run(mortals, kill, tmp_path).failures == []
