"""A worker process of the benchmark: ``python -m syncline.lab.bench.worker SOCKET TEAM [RANK]``.

It runs one lap after another, as ordered. Between laps it waits for the next order, and leaves the
processors to the contestant that is measured. A worker that an MPI started has the MPI's rank.
"""

from __future__ import annotations

import importlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives import Collective
from syncline.comm.groups import Elements, Group, Transport
from syncline.comm.groups.tcp import own_addresses
from syncline.errors import InternalError, SynclineError, UserError
from syncline.lab.bench.messages import LapTimes, Order, Ready, Refused, Setup
from syncline.lab.bench.result import (
    COPY,
    ELEMENT_BYTES,
    GLOO,
    OURS,
    STREAM,
    TORCH,
    UCX,
    bus_factor,
)
from syncline.lab.workers import leave, serve

if TYPE_CHECKING:
    import torch.distributed as dist

SMALL_BYTES = 1 << 16  # which a socket takes at once
WARM_SHARE = 0.1  # iterations before those measured, as a share of them

Vector = NDArray[np.float32]
Run = Callable[[], object]  # does the collective once, and returns when its result is in place


@dataclass(frozen=True, slots=True)
class Vectors:
    """Memory of one rank; the two are the same where the collective works in place."""

    given: Vector
    result: Vector


def sizes_of(collective: Collective, ranks: int, size_bytes: int) -> tuple[int, int]:
    """Return how many elements of a whole vector a rank gives, and how many it gets."""
    whole = size_bytes // ELEMENT_BYTES
    if collective == "reduce-scatter":
        return whole, whole // ranks
    if collective == "all-gather":
        return whole // ranks, whole
    return whole, whole


def require_result(collective: Collective, vectors: Vectors, rank: int, ranks: int) -> None:
    """Raise an InternalError if the result is wrong; every rank gave its number plus one."""
    result = vectors.result
    if collective == "reduce" and rank != 0:
        return
    expected: Any = ranks * (ranks + 1) / 2
    if collective == "broadcast":
        expected = 1.0
    elif collective == "all-gather":
        expected = np.arange(1, ranks + 1, dtype=np.float32)[:, None]
        result = result.reshape(ranks, -1)
    if not bool((result == expected).all()):
        raise InternalError(f"rank {rank}: {collective} of {vectors.given.size} elements is wrong")


Contestant = Callable[[Order], tuple[Vectors, Run]]
"""Returns memory for an order, and the call to measure. All ranks must call it together."""


def memory_of(order: Order, ranks: int) -> Vectors:
    """Return memory for an order."""
    given, result = sizes_of(order.collective, ranks, order.size_bytes)
    vector = np.zeros(given, np.float32)
    return Vectors(vector, vector if given == result else np.zeros(result, np.float32))


def by_memcpy(order: Order) -> tuple[Vectors, Run]:
    """Measure the speed of memory: every rank copies a vector, without communication."""
    count = order.size_bytes // ELEMENT_BYTES
    source, target = np.zeros(count, np.float32), np.zeros(count, np.float32)
    return Vectors(source, target), lambda: np.copyto(target, source)


def by_group(group: Group, order: Order) -> tuple[Vectors, Run]:
    """Measure a group's collective."""
    vectors = memory_of(order, group.ranks)
    collective = getattr(group, order.collective.replace("-", "_"))
    given, result = _elements(vectors.given), _elements(vectors.result)
    if order.collective in ("reduce-scatter", "all-gather"):
        return vectors, lambda: collective(given, result, choice=order.choice, blocking=True).wait()
    return vectors, lambda: collective(given, choice=order.choice, blocking=True).wait()


def _elements(vector: Vector) -> Elements:
    return Elements(vector.ctypes.data, vector.size, "float32", vector)


def by_mpi(mpi: Any, order: Order) -> tuple[Vectors, Run]:
    """Measure a collective of MPI's world, in place if it can be; ``mpi`` is ``mpi4py.MPI``."""
    world = mpi.COMM_WORLD
    vectors = memory_of(order, world.Get_size())
    given, result = [vectors.given, mpi.FLOAT], [vectors.result, mpi.FLOAT]
    runs: dict[Collective, Run] = {
        "all-reduce": lambda: world.Allreduce(mpi.IN_PLACE, given),
        "broadcast": lambda: world.Bcast(given, 0),
        "reduce": lambda: world.Reduce(given, None, root=0),
        "reduce-scatter": lambda: world.Reduce_scatter_block(given, result),
        "all-gather": lambda: world.Allgather(given, result),
    }
    if world.Get_rank() == 0:
        runs["reduce"] = lambda: world.Reduce(mpi.IN_PLACE, given, root=0)
    return vectors, runs[order.collective]


def by_torch(group: dist.ProcessGroup, order: Order) -> tuple[Vectors, Run]:
    """Measure a collective of a process group, as a program would call it."""
    import torch  # here: the workers of an MPI do without it
    import torch.distributed as dist

    vectors = memory_of(order, group.size())
    given: Any = torch.from_numpy(vectors.given)
    result: Any = torch.from_numpy(vectors.result)
    runs: dict[Collective, Run] = {
        "all-reduce": lambda: dist.all_reduce(given, group=group),
        "broadcast": lambda: dist.broadcast(given, 0, group=group),
        "reduce": lambda: dist.reduce(given, 0, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(result, given, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(result, given, group=group),
    }
    return vectors, runs[order.collective]


def by_stream(store: Any, rank: int, ranks: int) -> Contestant:
    """Connect to the next rank, and from the previous one, to measure plain TCP.

    It moves the bytes of a collective's busiest link; those of a broadcast go along a chain.
    """
    address = str(own_addresses(rank, None)[0].ip)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
        store.set(f"stream/{rank}", f"{address} {listening.getsockname()[1]}")
        host, port = store.get(f"stream/{(rank + 1) % ranks}").decode().split()
        after, (before, _) = socket.create_connection((host, int(port))), listening.accept()
    after.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def measured(order: Order) -> tuple[Vectors, Run]:
        count = round(order.size_bytes * bus_factor(order.collective, ranks)) // ELEMENT_BYTES
        is_chain = order.collective in ("broadcast", "reduce")
        given = np.zeros(0 if is_chain and rank == ranks - 1 else count, np.float32)
        result = np.zeros(0 if is_chain and rank == 0 else count, np.float32)
        sent, received = given.view(np.uint8).data, result.view(np.uint8).data
        is_small = len(sent) <= SMALL_BYTES

        def run() -> None:
            sending = threading.Thread(target=after.sendall, args=(sent,))
            begin = sending.run if is_small else sending.start
            begin()
            if received:
                before.recv_into(received, flags=socket.MSG_WAITALL)
            if not is_small:
                sending.join()

        return Vectors(given, result), run

    return measured


class Member(NamedTuple):
    """This rank in its team."""

    rank: int
    ranks: int
    contestants: Mapping[str, Contestant]
    barrier: Callable[[], object]


def lap(member: Member, order: Order) -> LapTimes:
    """Run a collective as often as ordered, after checking its result once."""
    vectors, run = member.contestants[order.contestant](order)
    vectors.given.fill(member.rank + 1)
    run()
    if order.contestant not in (COPY, STREAM):
        require_result(order.collective, vectors, member.rank, member.ranks)
    vectors.given.fill(0)  # otherwise repeated sums in place would overflow
    for _ in range(math.ceil(order.iterations * WARM_SHARE)):
        run()
    member.barrier()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for _ in range(order.iterations):
        run()
    took = LapTimes(wall_s=time.perf_counter() - began_s, cpu_s=time.process_time() - cpu_s)
    member.barrier()
    return took


def torch_member(setup: Setup, rank: int) -> tuple[Member, Ready]:
    """Join the team of Syncline's groups and torch's backends."""
    import torch
    import torch.distributed as dist

    from syncline.comm.backend.process_group import Options

    torch.set_num_threads(1)
    store = dist.FileStore(setup.store, setup.ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=setup.timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.ranks, timeout=timeout)
    gloo: Any = dist.group.WORLD
    options = Options(transport=setup.transport, choices=setup.choices)
    ours: Any = dist.new_group(backend="syncline", timeout=timeout, pg_options=options)
    ranks, timeout_s, choices = setup.ranks, setup.timeout_s, setup.choices

    @cache
    def group_over(way: Transport) -> Group:
        return Group(
            store, rank, ranks, name=way, timeout_s=timeout_s, transport=way, choices=choices
        )

    stream = cache(partial(by_stream, store, rank, ranks))
    group = group_over(setup.transport)
    element = _elements(np.zeros(1, np.float32))
    contestants: dict[str, Contestant] = {
        OURS: partial(by_group, group),
        TORCH: partial(by_torch, ours),
        GLOO: partial(by_torch, gloo),
        UCX: lambda order: by_group(group_over("ucx"), order),
        COPY: by_memcpy,
        STREAM: lambda order: stream()(order),
    }
    ready = Ready(
        version=f"torch {torch.__version__}", site=group.site, choices=group.chooser.source
    )
    member = Member(
        rank, ranks, contestants, lambda: group.all_reduce(element, blocking=True).wait()
    )
    return member, ready


def mpi_member(mpi: Any, name: str, setup: Setup) -> tuple[Member, Ready]:
    """Join the team of an MPI, whose mpiexec has started this process."""
    world = mpi.COMM_WORLD
    if world.Get_size() != setup.ranks:
        raise UserError(f"mpiexec started {world.Get_size()} ranks of {setup.ranks}")
    version = mpi.Get_library_version().strip("\0").splitlines()[0]
    member = Member(world.Get_rank(), setup.ranks, {name: partial(by_mpi, mpi)}, world.Barrier)
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
