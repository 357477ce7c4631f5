"""A worker process of the benchmark: ``python -m syncline.bench.worker SOCKET TEAM [RANK]``.

It does one lap after the other, as its orders say. Between laps it waits for the next order, so
that it takes nothing from others whose turn it is. Where an MPI has started it, the rank is the
MPI's.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from syncline.bench.implementations import Implementation, Memcpy, Mpi, require_result
from syncline.bench.messages import LapTimes, Order, Ready, Refused, Setup
from syncline.errors import SynclineError, UserError
from syncline.workers import leave, serve

__all__ = ["Member", "lap", "main"]


class Member(NamedTuple):
    """This rank in its team."""

    rank: int
    ranks: int
    contestants: Mapping[str, Implementation]
    barrier: Callable[[], object]


def lap(member: Member, order: Order) -> LapTimes:
    """Run a collective as often as ordered, after checking its result once.

    Raises:
        SynclineError: the contestant cannot do it, or its result is wrong.
    """
    contestant = member.contestants[order.contestant]
    vectors = contestant.vectors(order)
    try:
        run = contestant.prepared(order, vectors)
        vectors.given.fill(member.rank + 1)
        run()
        if not isinstance(contestant, Memcpy):
            require_result(order.collective, vectors, member.rank, member.ranks)
        vectors.given.fill(0)  # sums of sums stay finite
        for _ in range(order.warmup):
            run()
        member.barrier()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(order.iterations):
            run()
        took = LapTimes(wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - cpu_s)
        member.barrier()
    finally:
        contestant.release(vectors)
    return took


def torch_member(setup: Setup, rank: int) -> tuple[Member, Ready]:
    """Join the team of Syncline's groups and torch's backends."""
    import torch
    import torch.distributed as dist

    from syncline.backend.process_group import Options
    from syncline.bench.implementations import Native, TorchGroup, ZeroCopy
    from syncline.groups import Elements, Group

    torch.set_num_threads(1)
    store = dist.FileStore(setup.store, setup.ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=setup.timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.ranks, timeout=timeout)
    gloo: Any = dist.group.WORLD
    options = Options(transport=setup.transport, choices=setup.choices)
    ours: Any = dist.new_group(backend="syncline", timeout=timeout, pg_options=options)
    group = Group(
        store,
        rank,
        setup.ranks,
        name="bench",
        timeout_s=setup.timeout_s,
        transport=setup.transport,
        choices=setup.choices,
    )
    flag = np.zeros(1, np.float32)
    element = Elements(flag.ctypes.data, 1, "float32", flag)
    contestants = {
        "syncline": Native(group),
        "zero-copy": ZeroCopy(group),
        "torch": TorchGroup(ours),
        "gloo": TorchGroup(gloo),
        "memcpy": Memcpy(setup.ranks),
    }
    ready = Ready(
        version=f"torch {torch.__version__}", site=group.site, choices=group.chooser.source
    )
    barrier = lambda: group.all_reduce(element, attended=True).wait()  # noqa: E731
    return Member(rank, setup.ranks, contestants, barrier), ready


def mpi_member(mpi: Any, name: str, setup: Setup) -> tuple[Member, Ready]:
    """Join the team of an MPI, whose mpiexec has started this process."""
    world = mpi.COMM_WORLD
    if world.Get_size() != setup.ranks:
        raise UserError(f"mpiexec started {world.Get_size()} ranks of {setup.ranks}")
    version = mpi.Get_library_version().strip("\0").splitlines()[0]
    member = Member(world.Get_rank(), setup.ranks, {name: Mpi(mpi)}, world.Barrier)
    return member, Ready(version=version)


def main(path: str, team: str, *rest: str) -> None:
    """Carry out the orders of the leading process."""
    # mpi4py is installed in an environment of its own.
    mpi: Any = None if rest else importlib.import_module("mpi4py.MPI")
    rank = int(rest[0]) if rest else mpi.COMM_WORLD.Get_rank()
    members: list[Member] = []

    def act(order: Setup | Order, _: object) -> Ready | LapTimes | Refused:
        if isinstance(order, Setup):
            member, ready = (
                torch_member(order, rank) if mpi is None else mpi_member(mpi, team, order)
            )
            members.append(member)
            return ready
        try:
            return lap(members[0], order)
        except (SynclineError, RuntimeError) as error:  # torch's refusals are RuntimeErrors
            return Refused(reason=str(error).splitlines()[0])

    serve(path, rank, Setup | Order, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
    if sys.argv[3:]:  # an MPI is finalized at the end of the interpreter
        leave()
