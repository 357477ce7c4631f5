"""What ranks that may die run in groups; see :mod:`tests.mortal`."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize

import pytest
import torch
import torch.distributed as dist

from syncline.comm.backend.process_group import Options, register
from syncline.comm.groups import Group, Pending, Transport
from syncline.comm.groups.group import LEAVING
from syncline.comm.groups.ucx import new_worker
from syncline.errors import PeerError, UserError
from tests.comm.groups.jobs import elements
from tests.mortal import Place
from tests.timeouts import DEADLINE_S, TIMEOUT

LATE_S = 0.3
LONG_S = 3600.0


def store_of(place: Place) -> dist.Store:
    return dist.FileStore(str(place.folder / "notes"), place.ranks)


def initialize(
    place: Place, transport: Transport | None = "auto", timeout: timedelta = TIMEOUT
) -> None:
    """Make torch's default group of all ranks; without a transport, over Gloo."""
    register()
    dist.init_process_group(
        "syncline" if transport else "gloo",
        store=store_of(place),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timeout,
        pg_options=Options(transport=transport) if transport else None,
    )


def all_reduce(group: Group, count: int = 1000) -> Pending:
    values = torch.ones(count)
    return group.all_reduce(elements(values))


def join(place: Place, transport: Transport = "auto") -> Group:
    """Join a group of all ranks, all of which are in it then."""
    store = store_of(place)
    group = Group(store, place.rank, place.ranks, timeout_s=DEADLINE_S, transport=transport)
    all_reduce(group).wait()
    return group


def hear(group: Group) -> None:
    """Print why the next collective fails."""
    with pytest.raises(PeerError) as error:
        all_reduce(group).wait()
    print(error.value)


def falls_off(place: Place) -> None:
    """End as scripts do, without a word to the group; the root comes late to what was sent."""
    group = join(place)
    if place.rank == 0:
        time.sleep(LATE_S)
    values = torch.ones(1000)
    group.reduce(elements(values)).wait()
    assert place.rank != 0 or values.unique().tolist() == [place.ranks]
    globals()["kept_until_the_end"] = group
    print("done")


def raises(place: Place) -> None:
    """Let rank 1 end by an error of its own while the others wait for it."""
    group = join(place)
    if place.rank == 1:
        raise ValueError("an error of rank 1")
    all_reduce(group).wait()


def ends_with_work_under_way(place: Place) -> None:
    """End, or forget the group, while exchanges run that nobody waits for."""
    group = join(place)
    begun = [all_reduce(group, 100_000) for _ in range(10)]
    if place.rank == 1:
        return
    del group
    begun[0].wait()
    begun.clear()
    gc.collect()


def ends_in_its_group(place: Place) -> None:
    """Let rank 1 end in its group, and say what then still runs; the other says what it hears."""
    group = join(place)
    if place.rank == 1:
        globals()["kept_until_the_end"] = group

        def running() -> None:
            print(*(each.name for each in threading.enumerate()))

        Finalize(None, running, exitpriority=LEAVING - 1)
        return
    hear(group)


def forks(place: Place, transport: Transport) -> None:
    """Have children that live on, or end, while in a group; none of them takes part in it."""
    group = join(place, transport)
    begun = all_reduce(group)
    sleeping = os.fork()
    if sleeping == 0:
        time.sleep(LONG_S)
    child = os.fork()
    if child == 0:
        values = torch.ones(1000)
        refused(lambda: all_reduce(group))
        refused(lambda: group.send(elements(values), peer=1 - place.rank))
        if not begun.done:
            refused(begun.wait)
        assert begun.ended
        group.close()
        if transport == "ucx":
            with pytest.raises(UserError, match="UCX does not work in forks"):
                new_worker(place.rank)
        else:
            alone = Group(dist.HashStore(), 0, 1, transport="shared")
            all_reduce(alone).wait()
            alone.close()
        del group, begun
        gc.collect()
        sys.exit(0)  # through everything that runs at exit
    assert os.waitpid(child, 0)[1] == 0
    begun.wait()
    all_reduce(group).wait()
    group.close()  # though a child has copies of all descriptors
    os.kill(sleeping, signal.SIGKILL)
    os.waitpid(sleeping, 0)
    print("done")


def forks_of_torch(place: Place, transport: Transport) -> None:
    """Let a child, and workers of a data loader, use a group of torch's, and destroy it."""
    initialize(place, transport)
    values = torch.ones(1000)
    dist.all_reduce(values)
    work = dist.all_reduce(values, async_op=True)
    future = work.get_future()
    without_future = dist.all_reduce(torch.ones(3), async_op=True)

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> int:
            refused(lambda: dist.all_reduce(torch.ones(3)))
            if number == 1:
                dist.destroy_process_group()
            return number

    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == [0, 1]
    child = os.fork()
    if child == 0:
        refused(dist.barrier)
        refused(lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future())
        refused(lambda: without_future.get_future().wait())
        dist.destroy_process_group()
        del work, future, without_future
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    future.wait()
    without_future.wait()
    dist.all_reduce(values)
    assert values.unique().tolist() == [place.ranks**3]
    dist.destroy_process_group()
    print("done")


def refused(call: Callable[[], object]) -> None:
    """Make sure that a fork may not do something, and is told what to do instead."""
    with pytest.raises(UserError, match="in the parent, or make a new group in the fork"):
        call()


def dies_with_a_child(place: Place) -> None:
    """Kill rank 1, of which a child lives on."""
    group = join(place)
    if place.rank == 1:
        child = os.fork()
        if child == 0:
            os.close(1)
            os.close(2)
            place.await_("noticed")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    hear(group)
    place.tell("noticed")
