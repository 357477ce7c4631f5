"""The thread that does one job after the other."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from syncline.errors import InternalError, PeerError
from syncline.train.sparse.serial_executor import SerialExecutor
from tests.timeouts import DEADLINE_S


def test_jobs_run_in_order_on_a_thread_of_their_own() -> None:
    executor, done = SerialExecutor("an executor", timeout_s=DEADLINE_S), []
    for number in range(50):
        executor.put(
            lambda n=number: done.append((n, threading.current_thread().name)), lambda: None
        )
    executor.join()
    assert done == [(number, "an executor") for number in range(50)]


def test_no_job_runs_after_one_that_failed() -> None:
    executor, done, ended = SerialExecutor("an executor", timeout_s=DEADLINE_S), [], []

    def fails() -> None:
        raise ValueError("the first")

    executor.put(fails, lambda: ended.append(1))
    executor.put(lambda: done.append(2), lambda: ended.append(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="the first"):
            executor.join()
    with pytest.raises(ValueError, match="the first"):
        executor.check()
    assert done == []
    assert ended == [1, 2]


def test_a_line_without_jobs() -> None:
    executor = SerialExecutor("an executor", timeout_s=DEADLINE_S)
    executor.check()
    executor.join()


def test_a_line_that_waits_keeps_nothing_of_its_last_job() -> None:
    class State:
        def work(self) -> None:
            pass

    executor, state = SerialExecutor("an executor", timeout_s=DEADLINE_S), State()
    gone = weakref.ref(state)
    executor.put(state.work, state.work)
    executor.join()
    del state
    assert gone() is None


class Two(Exception):
    """Cannot be copied: it is made of two values and keeps one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


@pytest.mark.parametrize(
    ("made", "again", "said"),
    [
        (partial(ValueError, "no"), ValueError, "no"),
        (partial(PeerError, "lost"), PeerError, "lost"),
        (partial(Two, 1, 2), InternalError, r"an exchange has failed before: Two\(3\)"),
    ],
)
def test_a_failure_keeps_no_frames(
    made: Callable[[], Exception], again: type[Exception], said: str
) -> None:
    class Tensor:
        pass

    executor, seen = SerialExecutor("an executor", timeout_s=DEADLINE_S), []

    def fails() -> None:
        held = Tensor()
        seen.append(weakref.ref(held))
        try:
            raise KeyError("its context")
        except KeyError:
            raise made() from None

    executor.put(fails, lambda: None)
    with pytest.raises(type(made())):
        executor.join()
    for _ in range(2):
        with pytest.raises(again, match=said):
            executor.check()
    gc.collect()
    assert seen[0]() is None


def test_waiting_for_a_job_ends() -> None:
    executor, release = SerialExecutor("an executor", timeout_s=0.05), threading.Event()
    done: list[int] = []
    executor.put(lambda: (release.wait(DEADLINE_S), None)[1], lambda: done.append(1))
    executor.put(lambda: done.append(2), lambda: done.append(3))
    for _ in range(2):
        with pytest.raises(PeerError, match=r"not ended within .* resume all ranks"):
            executor.join()
    thread = executor._thread
    assert thread is not None
    executor.close()
    release.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert done == [1, 3]


def test_what_follows_a_job_may_fail_too() -> None:
    executor = SerialExecutor("an executor", timeout_s=DEADLINE_S)

    def fails() -> None:
        raise ValueError("afterwards")

    executor.put(lambda: None, fails)
    with pytest.raises(ValueError, match="afterwards"):
        executor.join()
