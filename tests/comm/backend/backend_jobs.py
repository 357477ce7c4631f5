"""What worker processes run on the backend, beside Gloo; most make sure of what is right there."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from syncline.comm.backend import process_group
from syncline.comm.backend.process_group import Options
from syncline.comm.groups import Transport
from syncline.errors import PeerError, SynclineError, UserError
from syncline.torch_private import all_gather_base
from tests.comm.groups.jobs import DTYPES, require_same_bits, whole_numbers
from tests.timeouts import TIMEOUT

Group = Any
Tensors = Sequence[torch.Tensor]
Place = Callable[[torch.Tensor], torch.Tensor]  # puts a tensor on a device
Op = dist.ReduceOp
LARGE = 300_007


@contextmanager
def group_of(backend: str = "syncline", options: Options | None = None) -> Iterator[Group]:
    """Return a process group beside the workers' own, which is of Gloo."""
    group = dist.new_group(backend=backend, timeout=TIMEOUT, pg_options=options)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Return whole numbers of this rank's own."""
    return whole_numbers(dist.get_rank(), shape, dtype, salt)


def require_same(found: Tensors, expected: Tensors, tolerance: float = 0.0, what: str = "") -> None:
    for a, b in zip(found, expected, strict=True):
        message = f"{what}: found {a}, expected {b}"
        torch.testing.assert_close(
            a.as_subclass(torch.Tensor), b, rtol=tolerance, atol=tolerance, msg=message
        )


def operations(group: Group, on: Place = lambda tensor: tensor) -> dict[str, list[torch.Tensor]]:
    """Run every kind of operation that Gloo has, too; return what it leaves."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found: dict[str, list[torch.Tensor]] = {}

    def kept(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(name, []).append(placed := on(tensor))
        return placed

    def each(name: str, *shape: int, **options: Any) -> list[torch.Tensor]:
        return [kept(name, torch.zeros(*shape, **options)) for _ in range(ranks)]

    for dtype in DTYPES[:-1]:  # Gloo reduces no booleans
        for op in (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT):
            dist.all_reduce(kept(f"{op}, {dtype}", numbers(101, dtype=dtype)), op, group=group)
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        dist.all_reduce(kept(f"{op}", numbers(101, dtype=torch.int32)), op, group=group)
    for name, given in {
        "complex": numbers(50, dtype=torch.complex64),
        "not contiguous": numbers(20, 30).t(),
        "scalar": numbers(1)[0],
        "large": numbers(LARGE),
        "empty": torch.empty(0),
    }.items():
        dist.all_reduce(kept(f"all_reduce, {name}", given), group=group)
    work = dist.all_reduce(kept("asynchronous", numbers(9)), group=group, async_op=True)
    assert work is not None
    work.wait()
    for root in range(ranks):
        for dtype in (torch.float32, torch.int64, torch.complex64):
            result = on(numbers(33, dtype=dtype))
            dist.reduce(result, root, group=group)
            if rank == root:
                found[f"reduce to {root}, {dtype}"] = [result]
    for dtype in (*DTYPES, torch.complex64):
        given = numbers(6, 4, dtype=dtype)
        dist.all_gather(each(f"all_gather, {dtype}", 6, 4, dtype=dtype), on(given), group=group)
        dist.broadcast(kept(f"broadcast, {dtype}", given), ranks - 1, group=group)
    dist.broadcast(kept("broadcast, turned", numbers(5, 7, salt=1).t()), 0, group=group)
    turned = [kept("all_gather, turned", torch.empty(7, 5).t()) for _ in range(ranks)]
    dist.all_gather(turned, on(numbers(7, 5, salt=2).t()), group=group)
    whole = kept("all_gather into one", torch.zeros(3 * ranks))
    all_gather_base(group, whole, on(numbers(3))).wait()
    parts = [on(numbers(3, salt=peer)) for peer in range(ranks)]
    dist.reduce_scatter(kept("reduce_scatter", torch.zeros(3)), parts, group=group)
    root = ranks - 1
    dist.gather(on(numbers(4)), each("gather", 4) if rank == root else None, root, group)
    dist.scatter(kept("scatter", torch.zeros(3)), parts if rank == 0 else None, 0, group)
    swapped = kept("all_to_all_single", torch.zeros(ranks * 2, 3))
    dist.all_to_all_single(swapped, on(numbers(ranks * 2, 3)), group=group)
    sizes = [(rank + peer) % 3 for peer in range(ranks)]  # of both; some are empty
    swapped = kept("all_to_all_single, uneven", torch.zeros(sum(sizes), 3))
    dist.all_to_all_single(swapped, on(numbers(sum(sizes), 3)), sizes, sizes, group=group)
    if ranks > 1:
        works: list[Any] = []
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        for tag, count in enumerate((9, LARGE)):
            taken = kept("messages", torch.zeros(count))
            works.append(dist.isend(on(numbers(count)), after, group=group, tag=tag))
            works.append(dist.irecv(taken, before, group=group, tag=tag))
        batch = [
            dist.P2POp(dist.isend, on(numbers(9)), after, group),
            dist.P2POp(dist.irecv, kept("batch_isend_irecv", torch.zeros(9)), before, group),
        ]
        for work in [*works, *dist.batch_isend_irecv(batch)]:
            work.wait()
    return found


def like_gloo() -> None:
    """Run operations on the backend and on Gloo."""
    with group_of() as ours, group_of("gloo") as gloos:
        expected = operations(gloos)
        for name, found in operations(ours).items():
            require_same(found, expected.pop(name), what=name)
    assert expected == {}


def averages() -> None:
    """Average, and reduce booleans, which Gloo cannot."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with group_of() as group:
        for dtype in DTYPES[:-1]:
            total = torch.arange(0 if dtype is torch.uint8 else -9, 20).to(dtype) + rank
            mean = total.clone()
            dist.all_reduce(total, group=group)
            dist.all_reduce(mean, op=Op.AVG, group=group)
            rounding = None if dtype.is_floating_point else "trunc"
            expected = torch.div(total.double(), ranks, rounding_mode=rounding)
            require_same([mean], [expected.to(dtype)], what=f"{dtype}")
        given = numbers(64, dtype=torch.bool)
        counted = given.int()
        dist.all_reduce(counted)
        for expected, ops in (
            (counted > 0, (Op.SUM, Op.MAX, Op.BOR)),
            (counted == ranks, (Op.MIN, Op.PRODUCT, Op.BAND)),
            (counted % 2 == 1, (Op.BXOR,)),
        ):
            for op in ops:
                found = given.clone()
                dist.all_reduce(found, op=op, group=group)
                require_same([found], [expected], what=f"bool {op}")
        for dtype in (torch.int16, torch.complex64, torch.float8_e4m3fn):
            part = numbers(8, dtype=dtype)
            parts = [torch.empty_like(part) for _ in range(ranks)]
            dist.all_gather(parts, part, group=group)
            dist.broadcast(part, 0, group=group)
            require_same([parts[0].view(torch.uint8)], [part.view(torch.uint8)])
        one = numbers(3).expand(5, 3)  # of which one row is in memory
        rows = torch.empty(3, 5).t()
        peer = rank ^ 1
        if peer < ranks:
            works = [dist.isend(one, peer, group=group), dist.irecv(rows, peer, group=group)]
            for work in works:
                work.wait()
            assert torch.equal(rows, rows[:1].expand(5, 3))


def shards() -> None:
    """Reduce-scatter and all-gather in all their forms."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with group_of() as group, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames these
        whole = numbers(ranks * 5, 2)
        total = whole.clone()
        dist.all_reduce(total)
        share = total[rank * 5 : rank * 5 + 5]
        for op, divisor in ((Op.SUM, 1), (Op.AVG, ranks)):
            result = torch.empty(5, 2)
            dist.reduce_scatter_tensor(result, whole, op=op, group=group)
            require_same([result], [share / divisor], what=f"{op}")
        result = torch.empty(5, 2)
        dist.reduce_scatter(result, list(whole.split(5)), group=group)
        require_same([result], [share])
        sizes = [each + 1 for each in range(ranks)]
        if ranks <= 4:
            rows = [each[: sum(sizes)].split(sizes) for each in (whole, total)]
            result = torch.empty(sizes[rank], 2)
            dist.reduce_scatter(result, list(rows[0]), group=group)
            require_same([result], [rows[1][rank]])
        parts = [torch.empty(size) for size in sizes]
        dist.all_gather(parts, torch.full((sizes[rank],), float(rank)), group=group)
        require_same(parts, [torch.full((size,), size - 1.0) for size in sizes])
        for gathered in (torch.empty(ranks * 5, 2), torch.empty(2, ranks * 5).t()):
            dist.all_gather_into_tensor(gathered, share, group=group)
            require_same([gathered], [total])
        both, halves = [whole.clone(), whole.clone() * 2], [torch.empty(5, 2), torch.empty(5, 2)]
        with _coalescing_manager(group, async_ops=True) as works:
            for each in both:
                dist.all_reduce(each, group=group)
        works.wait()
        require_same(both, [total, total * 2])
        with _coalescing_manager(group, async_ops=True) as works:
            for each in halves:
                dist.reduce_scatter_tensor(each, whole, group=group)
        works.wait()
        require_same(halves, [share, share])
        require_same([functional_all_reduce(whole, "sum", group)], [total])
        mesh = DeviceMesh.from_group(group, "cpu")
        placed = distribute_tensor(total, mesh, [Shard(0)])
        assert isinstance(placed, DTensor)
        require_same([placed.full_tensor()], [total])
        dist.barrier(group)


def futures() -> None:
    """Wait for asynchronous works, for their futures, and for what is chained to them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with group_of() as group:
        tensors = [numbers(1000 + number, salt=number) for number in range(20)]
        expected = [tensor.clone() for tensor in tensors]
        for tensor in expected:
            dist.all_reduce(tensor)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works if rank else reversed(works):
            work.wait()
        require_same(tensors, expected)
        assert all(work.is_completed() and work.is_success() for work in works)

        # Without wait(), a result that has to be copied to its place.
        turned = numbers(30, 20)[:, 3:7].t()
        whole = turned.contiguous()
        dist.all_reduce(whole)
        work = dist.all_reduce(turned, group=group, async_op=True)
        while not work.is_completed():
            pass
        require_same([turned], [whole])

        # Chains run in the order in which they were asked for, on every rank.
        order: list[int] = []
        chained = []
        for number in range(10):
            tensor = torch.ones(1000 * (number % 3) + 1)
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()

            def then(done: Any, number: int = number) -> torch.Tensor:
                order.append(number)
                second = done.value()[0] * (number + 1)
                dist.all_reduce(second, group=group)  # a collective inside
                return second

            chained.append(future.then(then))
        for number, future in enumerate(chained, start=1):
            assert torch.all(future.wait() == ranks * ranks * number)
        assert order == list(range(10))
        raised = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        failing = raised.then(lambda done: 1 // len(done.value()[:0]))
        with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
            failing.wait()
        assert torch.futures.collect_all([raised]).wait()[0].done()


def early_receive() -> None:
    """Ask first for the future of a message that comes last, and holds nothing up."""
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    with group_of() as group:
        if rank == 0:
            first = torch.zeros(3)
            early = dist.irecv(first, 1, group=group).get_future()
            dist.irecv(tensor, 2, group=group).get_future().wait()
            reduced = torch.zeros(1)
            dist.all_reduce(reduced, group=group, async_op=True).get_future().wait()
            dist.send(tensor, 1, group=group)
            early.then(lambda done: done.value()).wait()
            assert first.tolist() == [2.0] * 3
        else:
            if rank == 2:
                dist.send(tensor, 0, group=group)
            dist.all_reduce(torch.zeros(1), group=group)
            if rank == 1:
                dist.recv(tensor, 0, group=group)
                dist.send(tensor, 0, group=group)
    assert tensor.tolist() == [2.0] * 3


def prepared_or_not() -> None:
    """Call with what one rank's memory holds in order and another's does not.

    Who waits at once and has plain tensors takes a shorter way, which must do the same.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Before torch 2.13 it had another name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with group_of() as group:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int16):
            values = torch.arange(24).view(4, 6) % 5
            expected = [(values + each).to(dtype).t() for each in range(ranks)]
            given = expected[rank] if rank == 1 else expected[rank].contiguous()
            whole = torch.empty(6 * ranks, 4, dtype=dtype)
            if rank == 0:
                whole = torch.empty(4, 6 * ranks, dtype=dtype).t()
            gather(whole, given, group=group)
            require_same([whole], [torch.cat(expected)])
            given = given.clone()
            dist.broadcast(given, 1, group=group)
            require_same([given], [expected[1]])
        for count in (3, 1):  # a view of one element is contiguous
            parts = torch.ones(count), torch.full((count,), rank + 1.0)
            negated = torch.complex(*parts).conj().imag
            assert negated.is_neg()
            dist.all_reduce(negated, group=group)
            assert negated.tolist() == [-ranks * (ranks + 1) / 2] * count
        opts = dist.AllreduceOptions()
        opts.asyncOp = False
        ones = torch.ones(2)
        assert group.allreduce([ones], opts) is None  # it is waited for
        assert ones.tolist() == [ranks] * 2


def monitored_barriers() -> None:
    """Miss barriers: at the first rank 1, at the second all but rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for everyone in (False, True):
        missing = ", ".join(map(str, range(1, ranks))) if everyone else "1"
        words = f"{missing} did not reach the monitored barrier within 0.3 s"
        if rank > 1:
            words = "reached the monitored barrier, but rank 0 did not let it go on"
        with group_of() as group:
            group.monitored_barrier(wait_all_ranks=not everyone)
            if rank == 0 or (rank > 1 and not everyone):
                with pytest.raises(PeerError, match=words):
                    group.monitored_barrier(timedelta(seconds=0.3), everyone)
            dist.barrier()


def messages() -> None:
    """Send with tags and receive in another order, from anyone, and with collectives between."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    others = [peer for peer in range(ranks) if peer != rank]
    sizes = {tag: 3 + tag * 40_000 for tag in range(5)}
    transports: tuple[Transport, ...] = ("auto", "tcp", "ucx")
    for transport in transports:
        with group_of(options=Options(transport=transport)) as group:
            works = [
                dist.isend(torch.full((count,), 10.0 * rank + tag), peer, group=group, tag=tag)
                for tag, count in sizes.items()
                for peer in others
            ]
            parts = [torch.zeros(2) for _ in range(ranks)]
            # The parts of a collective are no messages of the program.
            dist.all_to_all(parts, [torch.full((2,), float(rank)) for _ in parts], group=group)
            assert [part[0].item() for part in parts] == list(range(ranks))
            for tag in (3, 1, 4):
                for peer in others:
                    taken = torch.zeros(sizes[tag])
                    assert dist.recv(taken, peer, group=group, tag=tag) == peer
                    assert (taken == 10.0 * peer + tag).all()
                dist.all_reduce(torch.ones(3), group=group)
            for tag in (2, 0):
                sources = []
                for _ in others:
                    taken = torch.zeros(sizes[tag])
                    work = dist.irecv(taken, group=group, tag=tag)
                    work.wait()
                    sources.append(work._source_rank())
                    assert (taken == 10.0 * sources[-1] + tag).all()
                assert sorted(sources) == others
            for work in works:
                work.wait()
            dist.barrier(group=group)


def interrupted() -> None:
    """Interrupt rank 0 while it waits for rank 1, which comes later."""
    with group_of() as group:

        def interrupt_once_it_waits() -> None:
            while group.flight_recorder.begun == 0:
                time.sleep(0.01)
            time.sleep(0.1)  # from the beginning of the call to that of its wait
            os.kill(os.getpid(), signal.SIGINT)

        if dist.get_rank() == 0:
            threading.Thread(target=interrupt_once_it_waits).start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(3), group=group)
            dist.barrier()
        else:
            dist.barrier()
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()  # before anybody leaves


def sequence_numbers() -> None:
    """Count some operations on both backends."""
    numbers_of = []
    three, rank = torch.ones(4), dist.get_rank()
    for backend in ("syncline", "gloo"):
        with group_of(backend) as group:
            calls: list[Callable[[], object]] = [
                lambda: None,
                lambda: dist.all_reduce(three, group=group),
                lambda: dist.all_reduce(three, group=group, async_op=True).wait(),
                lambda: dist.all_gather([three.clone(), three.clone()], three, group=group),
                lambda: dist.all_to_all_single(three.clone(), three, group=group),
                lambda: dist.barrier(group=group),
                lambda: dist.recv(three, 0, group=group) if rank else dist.send(three, 1, group),
            ]
            numbers_of += [[(call(), group._get_sequence_number_for_group())[1] for call in calls]]
    assert numbers_of[0] == numbers_of[1]


def profiled_operations() -> None:
    """See in the profiler the sizes of each call, and a range for what it began."""
    profiling = torch.profiler.profile(record_shapes=True, acc_events=True)
    with group_of() as group, profiling as profiler:
        given = torch.ones(2, 3)
        work = dist.all_reduce(given, group=group, async_op=True)
        work.wait()
        assert work.profiled.done()  # else the profiler might free its events before
        dist.barrier(group=group)
        dist.all_to_all_single(torch.ones(4), torch.ones(4), group=group)
        dist.all_gather([torch.ones(2, 3) for _ in range(2)], given, group=group)
    shapes = {event.key: event.input_shapes for event in profiler.events()}
    assert {key: shape for key, shape in shapes.items() if key.startswith("c10d::")} == {
        "c10d::allreduce_": [[2, 3]],
        "c10d::barrier": [],
        "c10d::alltoall_": [[4]],
        "c10d::allgather_": [[2, 3]],
    }
    works = sorted(event.key for event in profiler.events() if event.key.startswith("syncline:"))
    names = "all_gather", "all_reduce", "all_to_all", "barrier"
    assert works == [f"syncline:{name}" for name in names]


THREE, TWO_COMPLEX = torch.ones(3), torch.ones(2, dtype=torch.complex64)
REFUSED: dict[str, Callable[[Group], object]] = {
    "reduction 'product' is not for complex numbers": lambda g: dist.reduce_scatter_tensor(
        TWO_COMPLEX[:1], TWO_COMPLEX, op=Op.PRODUCT, group=g
    ),
    "cannot reduce elements of torch.int16": lambda g: dist.all_reduce(THREE.short(), group=g),
    "'avg' is for numbers, not for bool": lambda g: dist.all_reduce(THREE.bool(), Op.AVG, group=g),
    "not torch.sparse_coo on cpu": lambda g: dist.all_reduce(THREE.to_sparse(), group=g),
    "on meta": lambda g: dist.all_reduce(THREE.to("meta"), group=g),
    "from 0 to 4294967295, found -1": lambda g: dist.recv(THREE, 1 - g.rank(), group=g, tag=-1),
    "first dimension of 3 cannot be shared out to 2 ranks": lambda g: dist.all_to_all_single(
        THREE, THREE, group=g
    ),
    "monitored_barrier is only implemented for GLOO backend": dist.monitored_barrier,
}


def refusals() -> None:
    """Ask for what the backend cannot do; it is of use still."""
    with group_of() as group, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for words, call in REFUSED.items():
            with pytest.raises(Exception, match=words):
                call(group)
        dist.barrier(group)


def options() -> None:
    """Make groups with options; see where each is, and what is refused."""
    joined: list[tuple[tuple[int, ...], ...]] = []

    class Noted(process_group.Group):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            joined.append(self.hosts)

    near, apart = ((0, 1),), ((0,), (1,))
    for given, hosts in (
        (None, near),
        (Options(transport="shared"), near),
        (Options(transport="tcp", choices="built-in"), apart),
        (Options(transport="ucx", choices="built-in"), apart),
    ):
        with mock.patch.object(process_group, "Group", Noted), group_of(options=given) as group:
            tensor = torch.ones(LARGE)
            dist.all_reduce(tensor, group=group)
            assert tensor.unique().tolist() == [2.0]
            assert group.choices_source == "built-in"
            # What is chained to a future has a group of its own, which is to take the same way.
            chained = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
            chained.then(lambda _, g=group: dist.all_reduce(torch.ones(3), group=g)).wait()
        assert joined == [hosts, hosts]
        joined.clear()
    wrong: list[tuple[Any, str]] = [
        ({"transport": "ucx"}, "expects pg_options of syncline.comm.backend.process_group.Options"),
        ({"transport": "ucx"}, "found dict; give those, or leave them out"),
        (Options(transport="udp"), r"unknown transport 'udp' \(known: auto, shared, tcp, ucx, "),  # type: ignore[arg-type]
    ]
    for given, words in wrong:
        with pytest.raises(UserError, match=words):
            dist.new_group(backend="syncline", timeout=TIMEOUT, pg_options=given)


def timeouts() -> None:
    """Wait for a rank that does not come."""
    with group_of() as group:
        group.set_timeout(timedelta(seconds=0.5))
        assert group.timeout.total_seconds() == 0.5
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            words = "rank 0 waited in vain in all-reduce number 1 of 3 elements of float32"
            with pytest.raises(PeerError, match=words):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), SynclineError)
            with pytest.raises(RuntimeError, match="waited in vain"):
                work.get_future().wait()
        dist.barrier()


def late(transport: Transport) -> None:
    """Let rank 1 come late, after waits of rank 0 with a timeout of their own."""
    rank = dist.get_rank()
    large = 1_000_000  # more than what is sent ahead of a rank that takes nothing

    def message(tensor: torch.Tensor, *, receiver: int) -> Any:
        return (dist.irecv if rank == receiver else dist.isend)(tensor, 1 - rank, group=group)

    with group_of(options=Options(transport=transport)) as group:
        all_reduce = partial(dist.all_reduce, group=group, async_op=True)
        cases: list[tuple[Callable[[torch.Tensor], Any], int, float]] = [
            (all_reduce, 4, 3.0),
            (all_reduce, large, 3.0),
            (lambda tensor: group.allreduce(list(tensor.chunk(2))), 8, 3.0),
            (partial(message, receiver=0), 4, 2.0),
            (partial(message, receiver=1), large, 1.0),
        ]
        words = (
            "rank 0 waited in vain in .*; see that rank's output, or wait again: it is still under "
            "way"
        )
        for call, count, expected in cases:
            tensor = torch.full((count,), rank + 1.0)
            if rank == 1:
                dist.barrier()  # of the default group
            work = call(tensor)
            if rank == 0:
                for _ in range(2):
                    with pytest.raises(PeerError, match=words):
                        work.wait(timedelta(seconds=0.05))
                assert not work.is_completed()
                assert work.is_success()
                assert work.exception() is None
                dist.barrier()
            work.wait()
            assert torch.all(tensor == expected)
        dist.all_reduce(torch.ones(3), group=group)


def initialized_again(folder: str) -> None:
    """Leave the workers' group, and make it of the backend twice, with all that torch does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, ranks + 1))
    dist.barrier()  # Gloo fails on a rank that still connects to one that leaves
    dist.destroy_process_group()

    def initialize(backend: str, store: str) -> None:
        place: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": TIMEOUT}
        dist.init_process_group(backend, init_method=f"file://{folder}/{store}", **place)

    for number in range(2):
        initialize("syncline", f"store-{number}")
        assert dist.get_backend() == "syncline"
        tensor = torch.full((10,), 1.0 + rank)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [total]
        other = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(tensor, group=other)
            assert tensor.unique().tolist() == [2 * total]
        dist.barrier()
        dist.destroy_process_group()
    initialize("gloo", "store")  # what the pool expects


class Net(nn.Module):
    """A few layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(50, 300)
        self.skipped = nn.Linear(300, 300)
        self.last = nn.Linear(300, 10)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden if skip else hidden + torch.relu(self.skipped(hidden)))


def trained(
    group: Group,
    *,
    prepare: Callable[[Any], object] = lambda _: None,
    skip: bool = False,
    accumulate: int = 1,
    join: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Train under DDP; return the parameters."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    with model.join() if join else nullcontext():
        for number in range(3 + 2 * dist.get_rank() if join else 6):
            optimizer.zero_grad()
            for left in reversed(range(accumulate)):
                with model.no_sync() if left else nullcontext():
                    inputs = torch.randn(8, 50, generator=generator)
                    model(inputs, skip and number % 2 > 0).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def bf16(model: Any) -> None:
    # DDP refuses the hook itself where there is no CUDA.
    model.register_comm_hook(
        model.process_group, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    )


def power_sgd(model: Any) -> None:
    state = powerSGD_hook.PowerSGDState(
        model.process_group, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=3
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def sharded(group: Group) -> list[torch.Tensor]:
    """Train under FSDP2; return this rank's shards."""
    torch.manual_seed(0)
    net = Net()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (*net.children(), net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    shards: list[Any] = list(net.parameters())
    return [shard.to_local().detach().clone() for shard in shards]


GLOOS: list[Group] = []
"""Those that are never dropped. Gloo's group joins its threads when it is destroyed, and stock
PowerSGD's callbacks, which refer to it, may go last, on one of them: then it would join itself
("Resource deadlock avoided"), and the process aborts."""
TRAININGS: dict[str, tuple[Callable[[Group], Any], float]] = {
    "ddp": (trained, 1e-6),
    "unused": (partial(trained, skip=True, find_unused_parameters=True), 1e-6),
    "no_sync": (partial(trained, accumulate=3), 1e-6),
    "join": (partial(trained, join=True), 1e-6),
    "compiled": (partial(trained, prepare=lambda model: model.compile(backend="eager")), 1e-6),
    "views": (partial(trained, gradient_as_bucket_view=True), 1e-6),
    # Sums of bfloat16 differ by its own rounding, 2^-8, where their order does.
    "bf16": (partial(trained, prepare=bf16), 1e-2),
    "fsdp2": (sharded, 1e-6),
}


def trainings(name: str) -> None:
    """Train on the backend and on Gloo: alike, on 2 ranks to the bit, and on all ranks the same."""
    train, tolerance = TRAININGS[name]
    exact = dist.get_world_size() == 2  # there a sum has one order
    with group_of() as ours, group_of("gloo") as gloos:
        found = train(ours)
        require_same(found, train(gloos), 0.0 if exact else tolerance, name)
    if name != "fsdp2":
        for each in found:
            require_same_bits(each)


def power_sgd_of_several_buckets() -> None:
    """Train by PowerSGD on several buckets, and by Gloo on one."""
    with group_of() as ours, group_of("gloo") as gloos:
        found = trained(ours, prepare=power_sgd, bucket_cap_mb=0.1)
        expected = trained(gloos, prepare=power_sgd, bucket_cap_mb=25)
    GLOOS.append(gloos)
    require_same(found, expected, tolerance=0.1)  # other buckets, other matrices
    for each in found:
        require_same_bits(each)
