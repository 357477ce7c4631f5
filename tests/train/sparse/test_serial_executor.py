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


@pytest.fixture
def executor() -> SerialExecutor:
    return SerialExecutor("an executor", timeout_s=DEADLINE_S)


def nothing() -> None:
    pass


def raises(error: Exception) -> None:
    raise error


def test_jobs_run_in_order_on_a_thread_of_their_own(executor: SerialExecutor) -> None:
    executor.check()
    executor.join()  # without jobs
    done: list[tuple[int, str]] = []
    for number in range(50):
        executor.put(lambda n=number: done.append((n, threading.current_thread().name)), nothing)
    executor.join()
    assert done == [(number, "an executor") for number in range(50)]


def test_no_job_runs_after_one_that_failed(executor: SerialExecutor) -> None:
    done: list[int] = []
    ended: list[int] = []
    executor.put(partial(raises, ValueError("the first")), lambda: ended.append(1))
    executor.put(lambda: done.append(2), lambda: ended.append(2))
    for ends in (executor.join, executor.join, executor.check):
        with pytest.raises(ValueError, match="the first"):
            ends()
    assert done == []
    assert ended == [1, 2]


def test_what_follows_a_job_may_fail_too(executor: SerialExecutor) -> None:
    executor.put(nothing, partial(raises, ValueError("afterwards")))
    with pytest.raises(ValueError, match="afterwards"):
        executor.join()


def test_a_line_that_waits_keeps_nothing_of_its_last_job(executor: SerialExecutor) -> None:
    class State:
        def work(self) -> None:
            pass

    state = State()
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
    executor: SerialExecutor, made: Callable[[], Exception], again: type[Exception], said: str
) -> None:
    class Tensor:
        pass

    seen: list[weakref.ref[Tensor]] = []

    def fails() -> None:
        held = Tensor()
        seen.append(weakref.ref(held))
        try:
            raise KeyError("its context")
        except KeyError:
            raise made() from None

    executor.put(fails, nothing)
    with pytest.raises(type(made())):
        executor.join()
    for _ in range(2):
        with pytest.raises(again, match=said):
            executor.check()
    gc.collect()
    assert seen[0]() is None


def test_waiting_for_a_job_ends() -> None:
    executor = SerialExecutor("an executor", timeout_s=0.05)
    began, release = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    done: list[int] = []

    def waits() -> None:
        threads.append(threading.current_thread())
        began.set()
        release.wait(DEADLINE_S)

    executor.put(waits, lambda: done.append(1))
    assert began.wait(DEADLINE_S)
    executor.put(lambda: done.append(2), lambda: done.append(3))
    for _ in range(2):
        with pytest.raises(PeerError, match=r"not ended within .* resume all ranks"):
            executor.join()
    executor.close()
    release.set()
    threads[0].join(DEADLINE_S)
    assert not threads[0].is_alive()
    assert done == [1, 3]
