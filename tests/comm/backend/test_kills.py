"""Kills at random moments of a training: every survivor names the rank that has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import first_few
from tests.comm.backend.kills import Kill, Route, Wrapper, drawn, run
from tests.mortal import Mortals

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
