"""What worker processes run to test groups; most make sure themselves of what is right."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from benchmarks.ranks import on_host
from torch._C._distributed_c10d import FileStore

from syncline.comm.collectives.table import PROGRAMS, ROOTED, Pipelined
from syncline.comm.groups import Choice, Elements, Group
from syncline.comm.groups.elements import DTYPES as NAMES_OF_DTYPES
from syncline.comm.groups.rendezvous import RankCard
from syncline.errors import MismatchError, PeerError, SynclineError, UserError
from tests.timeouts import DEADLINE_S, JOB_DEADLINE_S

TIMEOUT_S = JOB_DEADLINE_S
DTYPES = tuple(getattr(torch, name) for name in NAMES_OF_DTYPES)
COUNTS = (0, 1, 2, 5, 24, 1003)
LARGE = 300_011  # elements above what is under way at once, and no multiple of anything
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@contextmanager
def joined(
    folder: str, name: str = "group", timeout_s: float = TIMEOUT_S, route: str = "auto"
) -> Iterator[Group]:
    """Join a group of all workers; ``"mixed"``: the last is on another host."""
    # A file for each group: the last store to be closed deletes it, while others may be opening it.
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = FileStore(f"{folder}/notes of {name}", ranks)
    with on_host(1 if route == "mixed" and rank == ranks - 1 else 0):
        group = Group(
            store,
            rank,
            ranks,
            name=name,
            timeout_s=timeout_s,
            transport="auto" if route == "mixed" else route,  # type: ignore[arg-type]
        )
    try:
        yield group
    finally:
        group.close()


def elements(tensor: torch.Tensor) -> Elements:
    name = str(tensor.dtype).removeprefix("torch.")
    return Elements(tensor.data_ptr(), tensor.numel(), name, tensor)


def whole_numbers(
    rank: int, shape: int | tuple[int, ...], dtype: torch.dtype, salt: int = 0
) -> torch.Tensor:
    """Return what a rank puts in: so small that every sum and product is exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    high = 2 if dtype is torch.bool else 4
    shape = shape if isinstance(shape, tuple) else (shape,)
    made = torch.randint(low, high, shape, generator=generator)
    return torch.complex(made.float(), made.flip(0).float()) if dtype.is_complex else made.to(dtype)


def reduced(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return what ranks' tensors come to, by torch."""
    total = functools.reduce(OPERATORS[reduction], parts)
    if reduction != "avg":
        return total
    rounding = None if total.dtype.is_floating_point else "trunc"
    return torch.div(total.double(), len(parts), rounding_mode=rounding).to(total.dtype)


def exists(reduction: str, dtype: torch.dtype) -> bool:
    if reduction in ("band", "bor", "bxor"):
        return not dtype.is_floating_point
    return reduction != "avg" or dtype is not torch.bool


def choices(collective: str) -> list[Choice | None]:
    """Return every algorithm, pipelines with one block and with several, and none."""
    found: list[Choice | None] = [None]
    for name, entry in PROGRAMS[collective].items():  # type: ignore[index]
        blocks = (1, 6) if isinstance(entry, Pipelined) else (None,)
        found += [Choice(name, each) for each in blocks]
    return found


def run_collective(
    group: Group,
    collective: str,
    count: int,
    dtype: torch.dtype,
    *,
    reduction: str = "sum",
    root: int = 0,
    choice: Choice | None = None,
    in_place: bool = True,
    blocking: bool = False,
    salt: int = 0,
) -> Callable[[], None]:
    """Start a collective; return what waits for it and makes sure of its result."""
    rank, ranks = group.rank, group.ranks
    if collective in ("reduce-scatter", "all-gather"):
        count = -(-count // ranks) * ranks
    parts = [whole_numbers(each, count, dtype, salt) for each in range(ranks)]
    given, expected = parts[rank].clone(), reduced(parts, reduction)
    result = given
    if collective == "broadcast":
        expected = parts[root]
    elif collective == "all-gather":
        result, expected = torch.empty(count * ranks, dtype=dtype), torch.cat(parts)
        if in_place:
            given = result[rank * count : (rank + 1) * count].copy_(given)
    else:
        if collective == "reduce-scatter":
            share = slice(rank * count // ranks, (rank + 1) * count // ranks)
            result, expected = given[share], expected[share]
        if not in_place:
            result = torch.empty_like(result)
    arguments: list[Any] = [elements(given)]
    if collective != "broadcast":
        # Where a reduction to a root has no result, it may be memory to work in.
        arguments.append(None if collective == "reduce" and in_place else elements(result))
    if "reduce" in collective:
        arguments.append(reduction)
    options: dict[str, Any] = {"root": root} if collective in ROOTED else {}
    begin = getattr(group, collective.replace("-", "_"))
    pending = begin(*arguments, choice=choice, blocking=blocking, **options)

    def finish() -> None:
        pending.wait()
        what = collective, choice, count, dtype, reduction, root, in_place
        assert pending.done, what
        has_result = collective != "reduce" or rank == root
        if has_result:
            assert torch.equal(result, expected), (what, result[:8], expected[:8])
        if not has_result or not (in_place or collective == "broadcast"):
            assert torch.equal(given, parts[rank]), ("what was given has changed", what)

    return finish


def every_collective(folder: str) -> None:
    chance = random.Random(1)
    dtypes, counts = itertools.cycle(DTYPES), itertools.cycle(COUNTS)
    with joined(folder) as group:
        for collective in PROGRAMS:
            for choice, in_place in itertools.product(choices(collective), (True, False)):
                for count in (*(next(counts) for _ in range(3)), LARGE):
                    run_collective(
                        group,
                        collective,
                        count,
                        next(dtypes),
                        choice=choice,
                        in_place=in_place,
                        root=chance.randrange(group.ranks),
                        blocking=chance.random() < 0.5,
                    )()
        for dtype, reduction in itertools.product(DTYPES, OPERATORS):
            if exists(reduction, dtype):
                for collective in ("all-reduce", "reduce", "reduce-scatter"):
                    run_collective(group, collective, 77, dtype, reduction=reduction)()


def tangled(folder: str) -> None:
    """Give and receive parts at other places of the same memory."""
    count = 3000
    with joined(folder) as group:
        other = slice((group.rank + 1) % group.ranks * count, None)
        for choice in choices("reduce-scatter"):
            whole = count * group.ranks
            parts = [whole_numbers(each, whole, torch.float32) for each in range(group.ranks)]
            given = parts[group.rank].clone()
            result = given[other][:count]
            group.reduce_scatter(elements(given), elements(result), choice=choice).wait()
            expected = reduced(parts, "sum")[group.rank * count :][:count]
            assert torch.equal(result, expected), choice
        for choice in choices("all-gather"):
            parts = [whole_numbers(each, count, torch.float32) for each in range(group.ranks)]
            result = torch.empty(count * group.ranks)
            given = result[other][:count].copy_(parts[group.rank])
            group.all_gather(elements(given), elements(result), choice=choice).wait()
            assert torch.equal(result, torch.cat(parts)), choice


def bits(folder: str) -> None:
    """All-reduce random numbers in every way, to the same bits on all ranks."""
    with joined(folder) as group:
        generator = torch.Generator().manual_seed(group.rank)
        for choice in choices("all-reduce"):
            for dtype, count in ((torch.float32, 50_001), (torch.bfloat16, 333)):
                given = torch.randn(count, generator=generator).to(dtype)
                for reduction in ("sum", "avg", "product"):
                    result = torch.empty_like(given)
                    pair = elements(given), elements(result)
                    group.all_reduce(*pair, reduction, choice=choice).wait()
                    require_same_bits(result)


def require_same_bits(found: torch.Tensor) -> None:
    own = found.cpu().view(torch.uint8)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)


def sequence(folder: str, calls: list[dict[str, Any]], flight: int) -> None:
    """Run collectives, several in flight, waited for in an order of the rank's own."""
    with joined(folder) as group:
        own = random.Random(group.rank)
        begun: list[Callable[[], None]] = []
        for salt, call in enumerate(calls):
            given = call | {"dtype": getattr(torch, call["dtype"])}
            given["root"] %= group.ranks
            begun.append(run_collective(group, salt=salt, **given))
            while len(begun) >= flight:
                begun.pop(own.randrange(len(begun)))()
        own.shuffle(begun)
        for finish in begun:
            finish()


def sub_groups(folder: str) -> list[float]:
    """Run overlapping groups over one store at once."""
    store = FileStore(f"{folder}/notes", dist.get_world_size())
    rank, found, begun = dist.get_rank(), [], []
    for members in ([0, 1, 2], [0, 2], [2, 1]):  # not in the order of ranks
        if rank in members:
            group = Group(store, members.index(rank), len(members), name=f"of {members}")
            tensor = torch.full((10_000,), float(rank + 1))
            begun.append((group, tensor, group.all_reduce(elements(tensor))))
    for _, tensor, pending in begun:
        pending.wait()
        found.append(float(tensor.unique().item()))
    for group, _, _ in begun:
        group.close()
    return found


def exchanges(folder: str) -> None:
    """Send and receive among all pairs, between collectives."""
    with joined(folder) as group:
        for count in (0, 1, 100, LARGE):
            begun = []
            for peer in set(range(group.ranks)) - {group.rank}:
                sent = whole_numbers(group.rank, count, torch.int32, peer)
                taken = torch.empty(count, dtype=torch.int32)
                works = (
                    group.send(elements(sent), peer=peer, tag=count),
                    group.receive(elements(taken), peer=peer, tag=count),
                )
                begun.append((peer, taken, works))
            run_collective(group, "all-reduce", 100, torch.float32)()
            for peer, taken, works in begun:
                for work in works:
                    work.wait()
                assert torch.equal(taken, whole_numbers(peer, count, torch.int32, group.rank))


def said(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the text of the error that a call raises."""
    try:
        call()
    except SynclineError as error:
        return type(error).__name__, str(error)
    return "", ""


MISMATCHES: dict[str, Callable[[Group, torch.Tensor, bool], object]] = {
    "count": lambda g, t, odd: g.all_reduce(elements(t[:-1] if odd else t)),
    "dtype": lambda g, t, odd: g.all_reduce(elements(t.int() if odd else t)),
    "reduction": lambda g, t, odd: g.all_reduce(elements(t), reduction="max" if odd else "sum"),
    "collective": lambda g, t, odd: (
        g.broadcast(elements(t), root=g.rank) if odd else g.all_reduce(elements(t))
    ),
    "root": lambda g, t, odd: g.broadcast(elements(t), root=1 if odd else 0),
    "algorithm": lambda g, t, odd: g.all_reduce(
        elements(t), choice=Choice("ring" if odd else "direct")
    ),
    "part": lambda g, t, odd: (
        g.send(elements(t), peer=0, part_of="gather")
        if odd
        else g.receive(elements(t), peer=1, part_of="scatter")
    ),
}


def mismatch(folder: str, route: str) -> list[str]:
    """Let rank 1 call something else; return what each rank says."""
    found = []
    for name, call in MISMATCHES.items():
        with joined(folder, name, route=route) as group:
            with pytest.raises(MismatchError) as error:
                _call_and_go_on(group, call, pair=name == "part")
            found.append(str(error.value))
            assert found[-1].startswith("the ranks called different collectives: ")
            dist.barrier()  # before anybody leaves
    return found


def _call_and_go_on(group: Group, call: Callable[..., Any], *, pair: bool) -> None:
    """Call, and all-reduce: who only sends may be done before anybody can object."""
    tensor = torch.ones(100)
    if not pair or group.rank < 2:
        call(group, tensor, group.rank == 1).wait(DEADLINE_S)
    group.all_reduce(elements(tensor)).wait(DEADLINE_S)


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def refused(*args: object, **kwargs: object) -> NoReturn:
    raise PermissionError(1, "Operation not permitted")


def no_thread(*args: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def free_descriptor() -> int:
    """Return the next descriptor that this process would get."""
    descriptor = os.open("/", os.O_PATH)
    os.close(descriptor)
    return descriptor


REFUSALS: dict[str, tuple[str, Callable[[], Any]]] = {
    "permission": ("auto", lambda: mock.patch.object(os, "memfd_create", refused)),
    "memory": ("auto", lambda: limited(resource.RLIMIT_FSIZE, 64 * 1024)),
    "descriptors": ("auto", lambda: limited(resource.RLIMIT_NOFILE, free_descriptor() + 6)),
    "a descriptor": ("auto", lambda: limited(resource.RLIMIT_NOFILE, free_descriptor() + 1)),
    "threads": ("auto", lambda: mock.patch.object(threading.Thread, "start", no_thread)),
    "sockets": ("auto", lambda: mock.patch.object(RankCard, "own", refused)),
    "ucx": ("ucx", lambda: mock.patch.dict(os.environ, {"UCX_TLS": "carrier-pigeon"})),
    "interface": ("tcp", lambda: mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "none0"})),
}
REASONS = {
    "permission": "rank 1: .* bytes of shared memory cannot be allocated: .*not permitted",
    "memory": "rank 1: .* bytes of shared memory cannot be allocated: .*too large",
    "descriptors": "rank 1 has run out of file descriptors .*limit of its process is .*ulimit",
    "a descriptor": "rank 1 has run out of file descriptors .*limit of its process is .*ulimit",
    "threads": "rank 1: .*can.t start new thread; see the limits of this process .*ulimit",
    "sockets": "rank 1: processes of this host are not allowed to meet .*not permitted",
    "ucx": "rank 1: UCX could not begin: .*; this transport needs UCX",
    "interface": "rank 1: no interface 'none0' is up .found: .*GLOO_SOCKET_IFNAME",
}


def refusing(folder: str, name: str) -> None:
    """Let rank 1 not be allowed to join; every rank hears why, and before its timeout."""
    route, refusal = REFUSALS[name]
    words = REASONS[name]
    began_s = time.monotonic()
    is_refused = dist.get_rank() == 1
    if not is_refused:
        # Who is refused when all have met leaves again; its peer is in the group then.
        words = f"rank 0: (rank 1 (does not join|has left) the group: )?{words}"

    def take_part() -> None:
        with joined(folder, route=route) as group:
            group.all_reduce(elements(torch.ones(1))).wait()

    # A FileStore opens its file as it goes, and ends the process where it cannot: the limit holds
    # for no store of an earlier group, and is lifted before the error, which holds this one, goes.
    gc.collect()
    with (
        pytest.raises((PeerError, UserError) if is_refused else PeerError, match=f"^{words}"),
        refusal() if is_refused else nullcontext(),
    ):
        take_part()
    assert time.monotonic() - began_s < DEADLINE_S < TIMEOUT_S


def leaving_after_the_last(folder: str) -> None:
    """Let every rank leave as soon as it is done, again and again."""
    for number in range(20):
        with joined(folder, f"group {number}") as group:
            count = LARGE if number % 5 == 0 else 50
            run_collective(group, "reduce", count, torch.int32)()
            run_collective(group, "broadcast", 50, torch.int32, root=number % group.ranks)()
