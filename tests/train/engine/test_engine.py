"""How long the training thread waits for an exchange; the engine at work is in the other tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from syncline.errors import PeerError
from syncline.train.engine import engine as engine_module
from syncline.train.engine.engine import Engine


class Landings:
    """A condition under which so many messages land, each just before a wait would be over."""

    def __init__(self, round_: SimpleNamespace, landing: int) -> None:
        self.waits_s: list[float] = []
        self._round, self._landing = round_, landing

    def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        if self._landing:
            self._landing -= 1
            self._round.unfinished -= 1
        return holds()


def waiting(messages: int, landing: int) -> tuple[Engine, Landings, SimpleNamespace]:
    """Return an engine whose round has so many messages under way, of which some land."""
    round_ = SimpleNamespace(unsent=0, unfinished=messages)
    landings = Landings(round_, landing)
    engine = object.__new__(Engine)
    vars(engine).update(
        round=round_,
        _lock=threading.Lock(),
        _for_trainer=landings,
        _error=None,
        _process=os.getpid(),
        timeout_s=2.0,
        rank=3,
    )
    return engine, landings, round_


def test_the_deadline_counts_from_the_last_message_that_landed() -> None:
    engine, landings, round_ = waiting(5, 5)
    engine._wait_for(lambda: round_.unfinished == 0, ())
    assert landings.waits_s == [2.0 + engine_module.SLACK_S] * 5


def test_nothing_that_lands_any_more_is_a_lost_peer() -> None:
    engine, landings, round_ = waiting(5, 3)
    with pytest.raises(PeerError, match="rank 3: the exchange of the gradients did not end within"):
        engine._wait_for(lambda: round_.unfinished == 0, ())
    assert len(landings.waits_s) == 4


def test_what_has_arrived_already_is_not_waited_for() -> None:
    engine, landings, _ = waiting(5, 0)
    engine._wait_for(lambda: True, ())
    assert landings.waits_s == []


def test_nothing_to_wait_for_waits_for_no_norm() -> None:
    """The end of the backward pass comes before the norms, which clipping waits for."""
    engine, landings, round_ = waiting(5, 0)
    round_.has_norms = False
    engine.wait([])
    assert landings.waits_s == []
