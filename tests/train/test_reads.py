"""What reads of a program mean for its plans: said once, and only where it matters."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from syncline.train.reads import Reads
from syncline.train.stages import Deferring, Findings, LogLine, Measurement, Notebook, Settings
from tests.train.jobs import plain_plan

NEED = msgspec.structs.replace(plain_plan(), wait="need")
DEFERRING = Deferring(can_defer=True, was_asked=True)
EARLY = Measurement(read_early="why", deferring=DEFERRING)
CLIPPING = Measurement(read_early="why", norm="2", deferring=DEFERRING)


def reads(deferring: Deferring = DEFERRING, **more: Any) -> tuple[Reads, list[LogLine]]:
    notes = Notebook(Findings())
    return Reads(Settings(**more), deferring, notes), notes.log_lines


def test_nothing_is_given_up_while_nothing_is_read() -> None:
    found, said = reads()
    assert not found.learn(Measurement(deferring=DEFERRING))
    assert found.state == (True, None)
    assert found.watches
    assert said == []


def test_reads_that_wait_for_all_are_said_once() -> None:
    found, said = reads()
    assert found.learn(EARLY)
    assert (found.defers, found.watches) == (False, False)
    assert not found.learn(EARLY)
    ((text, level, _),) = said
    assert text.startswith("overlap gains nothing here: why; ")
    assert level == logging.WARNING


def test_a_norm_is_planned_for_once_and_then_reads_are_given_up_for() -> None:
    found, said = reads()
    assert found.learn(CLIPPING)
    assert found.state == (True, "2")
    assert found.learn(CLIPPING)
    assert found.state == (False, "2")
    assert [line.level for line in said] == [logging.INFO, logging.WARNING]


def test_a_plan_that_is_given_gets_no_norm() -> None:
    found, said = reads(plan=NEED)
    assert found.learn(CLIPPING)
    assert found.state == (False, None)
    assert len(said) == 1


def test_a_plan_that_is_not_checked_stays() -> None:
    found, said = reads(check=False)
    assert not found.learn(EARLY)
    assert (found.defers, found.watches) == (True, False)
    assert found.as_it_can_run(NEED) is NEED
    assert not found.learn(EARLY)
    assert len(said) == 1


def test_a_plan_is_run_without_what_was_given_up() -> None:
    found, said = reads()
    assert found.as_it_can_run(NEED) is NEED
    found.learn(EARLY)
    assert found.as_it_can_run(NEED) == plain_plan()
    assert len(said) == 1  # why was said already


def test_what_defers_may_change_while_training() -> None:
    found, said = reads()
    compiled = Deferring(can_defer=False, why_not="the model is compiled", was_asked=True)
    assert not found.learn(Measurement(deferring=compiled))
    assert not found.defers
    assert found.as_it_can_run(NEED) == plain_plan()
    ((_, level, _),) = said
    assert level == logging.INFO  # the wrapper has said why


def test_without_an_optimizer_it_is_said_once_what_is_missing() -> None:
    found, said = reads(Deferring())
    assert not found.learn(Measurement(read_early="why"))
    assert found.as_it_can_run(plain_plan()) == plain_plan()
    assert said == []
    assert found.as_it_can_run(NEED) == found.as_it_can_run(NEED) == plain_plan()
    ((text, level, _),) = said
    assert text.startswith("the plan of by hand overlaps messages with the next forward pass, ")
    assert level == logging.WARNING
