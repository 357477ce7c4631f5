"""What reads of a program mean for its plans: said once, and only where it matters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from syncline.plan.profile import Norm
from syncline.train.reads import Reads
from syncline.train.stages import Deferring, Findings, LogLine, Measurement, Notebook, Settings
from tests.train.jobs import plain_plan
from tests.words import assert_tells

NEED = replace(plain_plan(), wait="need")
DEFERRING = Deferring(can_defer=True, was_asked=True)
EARLY = Measurement(read_early="why", deferring=DEFERRING)


def reads(deferring: Deferring = DEFERRING, **more: Any) -> tuple[Reads, list[LogLine]]:
    notes = Notebook(Findings())
    return Reads(Settings(**more), deferring, notes), notes.log_lines


def test_nothing_is_given_up_while_nothing_is_read() -> None:
    found, said = reads()
    assert not found.learn(Measurement(deferring=DEFERRING))
    assert found.state == (True, None)
    assert found.watches
    assert found.as_it_can_run(NEED) is NEED
    assert said == []


@pytest.mark.parametrize(
    ("check", "then"), [(True, "under the backward pass only"), (False, "the plan stays")]
)
def test_reads_that_wait_for_all_are_said_once(check: bool, then: str) -> None:
    found, said = reads(check=check)
    assert found.learn(EARLY) is check
    assert (found.defers, found.watches) == (not check, False)
    assert not found.learn(EARLY)
    assert found.as_it_can_run(NEED) == (plain_plan() if check else NEED)
    ((text, level, _),) = said
    assert_tells(text, "overlap gains nothing here: why; ", then)
    assert level == logging.WARNING


@pytest.mark.parametrize(
    ("given", "states"), [(None, [(True, "2"), (False, "2")]), (NEED, [(False, None)])]
)
def test_a_norm_is_planned_for_once_unless_the_plan_is_given(
    given: Any, states: list[tuple[bool, Norm | None]]
) -> None:
    found, said = reads(plan=given)
    for state in states:
        assert found.learn(replace(EARLY, norm="2"))
        assert found.state == state
    assert [line.level for line in said] == [logging.INFO, logging.WARNING][-len(states) :]


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
