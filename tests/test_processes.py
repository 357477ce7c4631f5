"""What launchers share."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from syncline.processes import (
    end_of,
    exit_code_of,
    place_variables,
    received_signals,
    restored_signals,
)


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (0, "ended with exit code 0", 0),
        (3, "ended with exit code 3", 3),
        (-9, "was ended by SIGKILL (signal 9)", 137),
        (-40, "was ended by signal 40", 168),
    ],
)
def test_how_a_process_ended(code: int, words: str, exit_code: int) -> None:
    assert end_of(code) == words
    assert exit_code_of(code) == exit_code


def test_ranks_fill_one_host_after_the_other() -> None:
    variables = place_variables(rank=5, workers=6, workers_per_host=2)
    assert variables == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
    }


def test_signals_are_read_instead_of_acting_and_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with received_signals() as received:
        received.settimeout(10)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        read = received.recv(1) + received.recv(1)
    assert sorted(read) == [signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_replaced_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with contextlib.suppress(KeyError), restored_signals():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyError
    assert signal.getsignal(signal.SIGHUP) == before
