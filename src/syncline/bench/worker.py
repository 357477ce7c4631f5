"""A worker process of the benchmark: ``python -m syncline.bench.worker SOCKET CREW [RANK]``.

It does one lap after the other, as it is told through the socket, and ends when that is closed.
Between laps it sleeps there, so that it takes nothing from others whose turn it is.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from syncline.bench.implementations import Implementation, Memcpy, require_result
from syncline.bench.messages import (
    Failed,
    Hello,
    Lap,
    Order,
    Ready,
    Setup,
    connected,
    receive,
    received_orders,
    send,
)
from syncline.errors import SynclineError, UserError

__all__ = ["Team", "lap", "main"]

HELLO_S = 120.0


class Team(NamedTuple):
    """This rank among those of its crew."""

    rank: int
    ranks: int
    contestants: Mapping[str, Implementation]
    barrier: Callable[[], object]


def lap(team: Team, order: Order) -> Lap:
    """Do a collective so many times, after checking its result once.

    Raises:
        SynclineError: the contestant cannot do it, or its result is wrong.
    """
    contestant = team.contestants[order.contestant]
    vectors = contestant.vectors(order)
    try:
        run = contestant.prepared(order, vectors)
        vectors.given.fill(team.rank + 1)
        run()
        if not isinstance(contestant, Memcpy):
            require_result(order.collective, vectors, team.rank, team.ranks)
        vectors.given.fill(0)  # sums of sums stay finite
        for _ in range(order.warmup):
            run()
        team.barrier()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(order.iterations):
            run()
        took = Lap(wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - cpu_s)
        team.barrier()
    finally:
        contestant.release(vectors)
    return took


def main(arguments: list[str]) -> int:
    """Do as the leading process says; return the exit code."""
    path, crew, *rest = arguments
    try:
        with connected(path, HELLO_S) as connection:
            team = torch_team(connection, int(rest[0])) if rest else mpi_team(connection, crew)
            for order in received_orders(connection):
                send(connection, _answer(team, order))
    except SynclineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _answer(team: Team, order: Order) -> Lap | Failed:
    try:
        return lap(team, order)
    except (SynclineError, RuntimeError) as error:  # torch's refusals are RuntimeErrors
        return Failed(reason=str(error).splitlines()[0])


def torch_team(connection: socket.socket, rank: int) -> Team:
    """Join the crew of Syncline's groups and torch's backends."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from syncline.bench.implementations import Native, TorchGroup, ZeroCopy
    from syncline.groups import Elements, Group
    from syncline.parallel.backend import Options

    torch.set_num_threads(1)
    setup = _introduced(connection, rank, f"torch {torch.__version__}")
    store: Any = FileStore(setup.store, setup.ranks)
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
    send(connection, Ready(site=group.site, choices=group.chooser.source))
    native = Native(group)
    flag = np.zeros(1, np.float32)
    element = Elements(flag.ctypes.data, 1, "float32", flag)
    return Team(
        rank,
        setup.ranks,
        {
            "syncline": native,
            "zero-copy": ZeroCopy(group),
            "torch": TorchGroup(ours),
            "gloo": TorchGroup(gloo),
            "memcpy": Memcpy(setup.ranks),
        },
        lambda: group.all_reduce(element, attended=True).wait(),
    )


def mpi_team(connection: socket.socket, crew: str) -> Team:
    """Join the crew of an MPI, whose mpiexec has started this process."""
    mpi: Any = importlib.import_module("mpi4py.MPI")  # of an environment of its own

    from syncline.bench.implementations import Mpi

    world = mpi.COMM_WORLD
    version = mpi.Get_library_version().strip("\0").splitlines()[0]
    setup = _introduced(connection, world.Get_rank(), version)
    if world.Get_size() != setup.ranks:
        raise UserError(f"mpiexec started {world.Get_size()} ranks of {setup.ranks}")
    send(connection, Ready())
    return Team(world.Get_rank(), setup.ranks, {crew: Mpi(mpi)}, world.Barrier)


def _introduced(connection: socket.socket, rank: int, version: str) -> Setup:
    send(connection, Hello(rank=rank, version=version))
    return receive(connection, Setup, HELLO_S)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.argv[3:]:  # an MPI is finalized at the end of the interpreter
        # At once: threads of a process group whose peers are gone would hold up the interpreter.
        os._exit(code)
    sys.exit(code)
