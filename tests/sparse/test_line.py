"""The thread that does one job after the other."""

from __future__ import annotations

import threading

import pytest

from syncline.sparse.line import Line


def test_jobs_run_in_order_on_a_thread_of_their_own() -> None:
    line, done = Line("a line"), []
    for number in range(50):
        line.put(lambda n=number: done.append((n, threading.current_thread().name)), lambda: None)
    line.join()
    assert done == [(number, "a line") for number in range(50)]


def test_no_job_runs_after_one_that_failed() -> None:
    line, done, ended = Line("a line"), [], []

    def fails() -> None:
        raise ValueError("the first")

    line.put(fails, lambda: ended.append(1))
    line.put(lambda: done.append(2), lambda: ended.append(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="the first"):
            line.join()
    with pytest.raises(ValueError, match="the first"):
        line.check()
    assert done == []
    assert ended == [1, 2]


def test_a_line_without_jobs() -> None:
    line = Line("a line")
    line.check()
    line.join()
