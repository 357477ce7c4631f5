"""A process group may end on any thread and at any moment: no process aborts or hangs for it.

Gloo's group joins its threads when it is destroyed, so a process aborts ("Resource deadlock
avoided") where one of them drops the last reference, as stock PowerSGD's callbacks may.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline import _native
from syncline.comm.backend.process_group import Options, ProcessGroup
from tests.comm.groups.mortal_jobs import initialize, store_of
from tests.mortal import Mortals, Place
from tests.timeouts import DEADLINE_S, TIMEOUT

COUNT = 1000
LONG = 1_000_000
BUSY_S = 0.5


def dropped_in_a_callback(place: Place) -> None:
    """Let the last reference to a group go on the thread that completes its futures."""
    group: Any = ProcessGroup(store_of(place), place.rank, place.ranks, TIMEOUT, Options())
    entered, dropped = threading.Event(), threading.Event()
    gone = threading.Event()
    values = torch.ones(COUNT)

    def callback(kept: ProcessGroup) -> Callable[[Any], str]:
        def run(future: Any) -> str:
            entered.set()
            assert dropped.wait(DEADLINE_S)
            # A collective of its own has a group of its own, which ends here as well.
            kept.allreduce(future.value()).wait()
            return threading.current_thread().name

        return run

    class Trace:
        """Goes with the callback, and after what that refers to."""

        def __init__(self, run: Callable[[Any], str]) -> None:
            self.run: Callable[[Any], str] | None = run

        def __call__(self, future: Any) -> str:
            assert self.run is not None
            return self.run(future)

        def __del__(self) -> None:
            self.run = None  # the last reference to the group
            gone.set()

    work = group.allreduce([values])
    after = work.get_future().then(Trace(callback(group)))
    assert entered.wait(DEADLINE_S)
    group = work = None
    dropped.set()
    print(after.wait())
    del after
    assert gone.wait(DEADLINE_S)
    gc.collect()
    print(values.unique().tolist())
    names = {"syncline futures", "syncline watch"}
    for thread in [each for each in threading.enumerate() if each.name in names]:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread


def ends_with_a_callback_to_come(place: Place) -> None:
    """End the script while futures wait for a rank that never calls."""
    initialize(place)
    values = torch.ones(COUNT)
    dist.all_reduce(values)
    if place.rank == 1:
        place.await_("begun")
        place.await_("ended")
        return
    works = [dist.all_reduce(values, async_op=True), dist.irecv(values.clone(), 1)]
    globals()["kept_until_the_end"] = [
        work.get_future().then(lambda done: done.value()) for work in works
    ]
    place.tell("begun")
    place.tell("ended")


class SlowToGo:
    """Keeps the interpreter busy with its own end."""

    def __init__(self) -> None:
        self.sleep = time.sleep  # modules may be gone by then

    def __del__(self) -> None:
        self.sleep(BUSY_S)


def ends_with_a_thread_in_native_code(_: Place) -> None:
    """End the script while a thread goes in and out of native code that releases Python's lock."""
    source, target = torch.ones(LONG), torch.ones(LONG)
    begun = threading.Event()

    def copy_for_ever() -> None:
        while True:
            _native.move(target.data_ptr(), source.data_ptr(), source.nbytes)
            begun.set()

    threading.Thread(target=copy_for_ever, daemon=True).start()
    assert begun.wait(DEADLINE_S)
    sys.slow_to_go = SlowToGo()  # type: ignore[attr-defined]


def destroyed_in_a_callback(place: Place) -> None:
    """Destroy a group of torch's on the thread that completes its futures."""
    initialize(place)
    group = dist.new_group()
    values = torch.ones(COUNT)

    def run(future: Any) -> str:
        dist.destroy_process_group(group)
        return f"{future.value()[0].unique().tolist()}"

    print(dist.all_reduce(values, group=group, async_op=True).get_future().then(run).wait())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize(
    ("job", "ranks", "out"),
    [
        (dropped_in_a_callback, 2, "syncline futures\n[4.0]\n"),
        (destroyed_in_a_callback, 2, "[2.0]\n"),
        (ends_with_a_thread_in_native_code, 1, ""),
    ],
    ids=["last reference", "destroyed", "native code"],
)
def test_nothing_is_said_of_a_group_that_ends_like_that(
    mortals: Mortals, tmp_path: Path, job: Callable[..., None], ranks: int, out: str
) -> None:
    for ended in mortals.run(job, ranks, folder=tmp_path):
        assert (ended.code, ended.out, ended.err) == (0, out, "")


@pytest.mark.slow
def test_a_script_may_end_with_a_callback_to_come(mortals: Mortals, tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        for ended in mortals.run(ends_with_a_callback_to_come, 2, folder=folder):
            assert ended.code == 0, ended
