"""Giving up deferred updates: once, by all ranks, and only where it matters."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from syncline.parallel.rank_measurements import StageResult
from syncline.parallel.watches import FlushWatch
from tests.parallel.jobs import plain_plan

NEED = msgspec.structs.replace(plain_plan(), wait="need")


class Job:
    def __init__(self, can_defer: bool) -> None:
        self.can_defer = can_defer
        self.why_not_deferred: str | None = None


def watch(*, can_defer: bool = True, heed: bool = True, others: Any = None) -> tuple[Any, Any]:
    said: list[tuple[str, int]] = []
    found = FlushWatch(
        Job(can_defer),  # type: ignore[arg-type]
        lambda own: [own, others],
        lambda text, level: said.append((text, level)),
        heed=heed,
    )
    return found, said


def test_nothing_is_given_up_while_nothing_is_read() -> None:
    flushes, said = watch()
    assert not flushes.gives_up(StageResult())
    assert flushes.defers
    assert flushes.watches
    assert said == []


@pytest.mark.parametrize(("own", "others"), [("why", None), (None, "why"), ("why", "why")])
def test_one_rank_is_enough(own: str | None, others: str | None) -> None:
    flushes, said = watch(others=others)
    assert flushes.gives_up(StageResult(flushed=own))
    assert (flushes.defers, flushes.watches) == (False, False)
    assert not flushes.gives_up(StageResult(flushed=own))
    ((text, level),) = said
    assert text.startswith("overlap gains nothing here: why; ")
    assert level == logging.WARNING


def test_a_plan_that_is_not_checked_stays() -> None:
    flushes, said = watch(heed=False)
    assert not flushes.gives_up(StageResult(flushed="why"))
    assert (flushes.defers, flushes.watches) == (True, False)
    assert flushes.as_it_can_run(NEED) is NEED
    assert not flushes.gives_up(StageResult(flushed="why"))
    assert len(said) == 1


def test_a_plan_is_run_without_what_was_given_up() -> None:
    flushes, said = watch()
    assert flushes.as_it_can_run(NEED) is NEED
    flushes.gives_up(StageResult(flushed="why"))
    assert flushes.as_it_can_run(NEED) == plain_plan()
    assert len(said) == 1  # why was said already


def test_without_an_optimizer_it_is_said_once_what_is_missing() -> None:
    flushes, said = watch(can_defer=False, others="why")
    assert not flushes.gives_up(StageResult())
    assert flushes.as_it_can_run(plain_plan()) == plain_plan()
    assert said == []
    assert flushes.as_it_can_run(NEED) == flushes.as_it_can_run(NEED) == plain_plan()
    ((text, level),) = said
    assert text.startswith("the plan of by hand leaves messages to the next forward pass, but no ")
    assert level == logging.WARNING
