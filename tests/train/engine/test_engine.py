"""How long the training thread waits for an exchange; the engine at work is in the other tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from syncline.errors import PeerError
from syncline.train.engine.engine import SLACK_S, Engine


def waiting(messages: int, landing: int) -> tuple[Engine, list[float]]:
    """Return an engine with so many messages under way, and how long it waits for each.

    Some of them land, each just before a wait would be over.
    """
    round_ = SimpleNamespace(unsent=0, unfinished=messages, has_norms=False)
    waits_s: list[float] = []

    def wait_for(holds: Callable[[], bool], timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        round_.unfinished -= len(waits_s) <= landing
        return holds()

    engine = object.__new__(Engine)
    vars(engine).update(
        round=round_,
        layout=SimpleNamespace(touching=()),
        timeout_s=2.0,
        rank=3,
        _lock=threading.Lock(),
        _for_trainer=SimpleNamespace(wait_for=wait_for),
        _transport=SimpleNamespace(bounded=True),
        _error=None,
        _process=os.getpid(),
    )
    return engine, waits_s


def test_the_deadline_counts_from_the_last_message_that_landed() -> None:
    engine, waits_s = waiting(5, landing=5)
    engine.wait_all()
    assert waits_s == [2.0 + SLACK_S] * 5


def test_nothing_that_lands_any_more_is_a_lost_peer() -> None:
    engine, waits_s = waiting(5, landing=3)
    with pytest.raises(PeerError, match="rank 3: the exchange of the gradients did not end within"):
        engine.wait_all()
    assert len(waits_s) == 4


def test_what_has_arrived_already_is_not_waited_for() -> None:
    """Nor the norms by the end of the backward pass: they come after it, for clipping."""
    engine, waits_s = waiting(0, landing=0)
    engine.wait_all()
    assert waits_s == []
