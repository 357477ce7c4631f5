"""A worker process of the benchmark: ``python -m syncline.bench.worker SOCKET TEAM [RANK]``.

It does one lap after the other, as its orders say. Between laps it waits for the next order, so
that it takes nothing from others whose turn it is. Where an MPI has started it, the rank is the
MPI's.
"""

from __future__ import annotations

import importlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.bench.messages import LapTimes, Order, Ready, Refused, Setup
from syncline.bench.result import ELEMENT_BYTES
from syncline.collectives import Collective
from syncline.errors import InternalError, SynclineError, UserError
from syncline.groups import Choice, Elements, Group, SharedBuffer
from syncline.workers import leave, serve

if TYPE_CHECKING:
    import torch.distributed as dist

Vector = NDArray[np.float32]
Run = Callable[[], object]
"""Does the collective once, and returns when its result is in place."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Memory of one rank; the two are the same where the collective works in place."""

    given: Vector
    result: Vector
    keep: Any = None
    """What the memory belongs to."""


def sizes_of(collective: Collective, ranks: int, size_bytes: int) -> tuple[int, int]:
    """Return how many elements of a whole vector a rank gives, and how many it gets."""
    whole = size_bytes // ELEMENT_BYTES
    if collective == "reduce-scatter":
        return whole, whole // ranks
    if collective == "all-gather":
        return whole // ranks, whole
    return whole, whole


def require_result(collective: Collective, vectors: Vectors, rank: int, ranks: int) -> None:
    """Check the result of ranks that gave their number plus one.

    Raises:
        InternalError: it is wrong.
    """
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


class Implementation(ABC):
    """One implementation of the collectives. All ranks make the same calls in the same order."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def vectors(self, order: Order) -> Vectors:
        """Return memory for the order; by default memory of this process."""
        given, result = sizes_of(order.collective, self.ranks, order.size_bytes)
        vector = np.zeros(given, np.float32)
        return Vectors(vector, vector if given == result else np.zeros(result, np.float32))

    @abstractmethod
    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the call to measure.

        Raises:
            SynclineError: this implementation cannot do it.
        """

    def release(self, vectors: Vectors) -> None:  # noqa: B027 - memory of this process needs none
        """Free the memory; memory of this process is freed with its last reference."""


class Memcpy(Implementation):
    """The speed of memory: every rank copies a vector, without communication."""

    def vectors(self, order: Order) -> Vectors:
        """Return a source and a target."""
        count = order.size_bytes // ELEMENT_BYTES
        return Vectors(np.zeros(count, np.float32), np.zeros(count, np.float32))

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the copy."""
        del order
        return lambda: np.copyto(vectors.result, vectors.given)


class Native(Implementation):
    """Collectives of a group on memory of this process."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.ranks)
        self.group = group

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the group's collective under the algorithm that is asked for."""
        collective = getattr(self.group, order.collective.replace("-", "_"))
        given, result = _elements(vectors.given), _elements(vectors.result)
        choice = None if order.algorithm is None else Choice(order.algorithm, order.blocks)
        if order.collective in ("reduce-scatter", "all-gather"):
            return lambda: collective(given, result, choice=choice, attended=True).wait()
        return lambda: collective(given, choice=choice, attended=True).wait()


class ZeroCopy(Native):
    """The same on buffers that the group has allocated, which peers read where they are."""

    def vectors(self, order: Order) -> Vectors:
        """Return memory that all ranks of the host have mapped."""
        given, result = sizes_of(order.collective, self.ranks, order.size_bytes)
        total = given if given == result else given + result
        buffer = self.group.allocate(total * ELEMENT_BYTES)
        whole = np.frombuffer(buffer.memory, np.float32)
        return Vectors(whole[:given], whole[total - result :], buffer)

    def release(self, vectors: Vectors) -> None:
        """Unmap the memory, here and on the peers."""
        buffer: SharedBuffer = vectors.keep
        buffer.close()


def _elements(vector: Vector) -> Elements:
    return Elements(vector.ctypes.data, vector.size, "float32", vector)


class Mpi(Implementation):
    """Collectives of MPI's world, in place where MPI has that."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        """The module ``mpi4py.MPI``."""
        self._world = mpi.COMM_WORLD
        super().__init__(self._world.Get_size())

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the call, with the type of the elements, so that mpi4py need not look it up."""
        world, in_place = self._world, self._mpi.IN_PLACE
        given = [vectors.given, self._mpi.FLOAT]
        result = [vectors.result, self._mpi.FLOAT]
        match order.collective:
            case "all-reduce":
                return lambda: world.Allreduce(in_place, given)
            case "broadcast":
                return lambda: world.Bcast(given, 0)
            case "reduce":
                if world.Get_rank() == 0:
                    return lambda: world.Reduce(in_place, given, root=0)
                return lambda: world.Reduce(given, None, root=0)
            case "reduce-scatter":
                return lambda: world.Reduce_scatter_block(given, result)
            case "all-gather":
                return lambda: world.Allgather(given, result)


class TorchGroup(Implementation):
    """Collectives of a process group of torch's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.size())
        self._group = group

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the call that a program would make."""
        import torch  # here: the workers of an MPI do without it
        import torch.distributed as dist

        group = self._group
        given: Any = torch.from_numpy(vectors.given)
        result: Any = torch.from_numpy(vectors.result)
        if order.algorithm is not None:
            raise UserError("torch.distributed has no argument for an algorithm")
        match order.collective:
            case "all-reduce":
                return lambda: dist.all_reduce(given, group=group)
            case "broadcast":
                return lambda: dist.broadcast(given, 0, group=group)
            case "reduce":
                return lambda: dist.reduce(given, 0, group=group)
            case "reduce-scatter":
                return lambda: dist.reduce_scatter_tensor(result, given, group=group)
            case "all-gather":
                return lambda: dist.all_gather_into_tensor(result, given, group=group)


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
