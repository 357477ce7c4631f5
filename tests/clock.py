"""Time that passes because a test says so: what it measures does not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from syncline.plan.quantities import NS_PER_S


@contextmanager
def added_time() -> Iterator[Callable[[float], None]]:
    """Yield a function that puts the performance counters ahead by so many seconds.

    They go on besides. So what lasts long by this function is many times longer than anything that
    a busy machine holds up.
    """
    ahead_s = 0.0
    seconds, nanoseconds = time.perf_counter, time.perf_counter_ns

    def add(more_s: float) -> None:
        nonlocal ahead_s
        ahead_s += more_s

    def later() -> float:
        return seconds() + ahead_s

    def later_ns() -> int:
        return nanoseconds() + round(ahead_s * NS_PER_S)

    with (
        mock.patch.object(time, "perf_counter", later),
        mock.patch.object(time, "perf_counter_ns", later_ns),
    ):
        yield add
