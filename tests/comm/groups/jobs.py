"""What worker processes run to test groups; each returns what the tests compare."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.ranks import on_host
from torch._C._distributed_c10d import FileStore

from syncline.comm.collectives.table import PROGRAMS, ROOTED, Pipelined
from syncline.comm.groups import Choice, Elements, Group
from syncline.comm.groups.rendezvous import RankCard
from syncline.errors import SynclineError
from tests.timeouts import DEADLINE_S, JOB_DEADLINE_S

TIMEOUT_S = JOB_DEADLINE_S
SHORT_TIMEOUT_S = 0.5
JOINING_S = 2.0
"""Long enough for ranks that begin together, on a busy machine, too."""
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
COUNTS = (0, 1, 2, 5, 24, 1003)
LARGE = 300_011
"""Elements above what is under way at once, and no multiple of anything."""
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
    """Return a tensor's elements."""
    name = str(tensor.dtype).removeprefix("torch.")
    return Elements(tensor.data_ptr(), tensor.numel(), name, tensor)


def whole_numbers(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return what a rank puts in: so small that every sum and product is exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    high = 2 if dtype is torch.bool else 4
    return torch.randint(low, high, (count,), generator=generator).to(dtype)


def reduced(parts: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return what ranks' tensors come to, by torch."""
    total = parts[0].clone()
    for part in parts[1:]:
        if total.dtype is torch.bool and reduction in ("sum", "max", "product", "min"):
            both = torch.logical_or if reduction in ("sum", "max") else torch.logical_and
            total = both(total, part)
        else:
            total = OPERATORS[reduction](total, part)
    if reduction == "avg" and total.dtype.is_floating_point:
        total = (total.double() / len(parts)).to(total.dtype)
    elif reduction == "avg":
        total = torch.div(total, len(parts), rounding_mode="trunc")
    return total


def exists(reduction: str, dtype: torch.dtype) -> bool:
    if reduction in ("band", "bor", "bxor"):
        return not dtype.is_floating_point
    return reduction != "avg" or dtype is not torch.bool


def choices(collective: str) -> list[Choice | None]:
    """Return every algorithm, pipelines with one block and with several, and none."""
    found: list[Choice | None] = [None]
    for name, entry in PROGRAMS[collective].items():  # type: ignore[index]
        if isinstance(entry, Pipelined):
            found += [Choice(name, 1), Choice(name, 6)]
        else:
            found.append(Choice(name))
    return found


# ---------------------------------------------------------------------- right results


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
) -> Callable[[], list[str]]:
    """Start a collective; return what waits for it and says what is wrong with its result."""
    rank, ranks = group.rank, group.ranks
    if collective in ("reduce-scatter", "all-gather"):
        count = -(-count // ranks) * ranks
    parts = [whole_numbers(each, count, dtype, salt) for each in range(ranks)]
    given = parts[rank].clone()
    kwargs: dict[str, Any] = {"choice": choice, "blocking": blocking}
    expected: torch.Tensor | None
    if collective == "all-reduce":
        result = given if in_place else torch.empty_like(given)
        expected = reduced(parts, reduction)
        pending = group.all_reduce(elements(given), elements(result), reduction, **kwargs)
    elif collective == "broadcast":
        result, expected = given, parts[root]
        pending = group.broadcast(elements(given), root=root, **kwargs)
    elif collective == "reduce":
        result = given if in_place else torch.empty_like(given)
        expected = reduced(parts, reduction) if rank == root else None
        # Where there is no result, it may be memory to work in.
        place = None if in_place else elements(result)
        pending = group.reduce(elements(given), place, reduction, root=root, **kwargs)
    elif collective == "reduce-scatter":
        share = slice(rank * count // ranks, (rank + 1) * count // ranks)
        result = given[share] if in_place else torch.empty_like(given[share])
        expected = reduced(parts, reduction)[share]
        pending = group.reduce_scatter(elements(given), elements(result), reduction, **kwargs)
    else:
        result = torch.empty(count * ranks, dtype=dtype)
        if in_place:
            result[rank * count : (rank + 1) * count] = given
            given = result[rank * count : (rank + 1) * count]
        expected = torch.cat(parts)
        pending = group.all_gather(elements(given), elements(result), **kwargs)

    def finish() -> list[str]:
        pending.wait()
        wrong = []
        if not pending.done:
            wrong.append("not done")
        if expected is not None and not torch.equal(result, expected):
            wrong.append(f"found {result[:8]}, expected {expected[:8]}")
        kept = given if collective != "broadcast" else None
        if kept is not None and expected is not None and not in_place:
            wrong += [] if torch.equal(kept, parts[rank]) else ["what was given has changed"]
        if collective == "reduce" and rank != root and not torch.equal(given, parts[rank]):
            wrong.append("what a rank that is not the root gave has changed")
        what = f"{collective} {choice} {count} {dtype} {reduction} root {root} in place {in_place}"
        return [f"{what}: {each}" for each in wrong]

    return finish


def every_collective(folder: str) -> list[str]:
    """Run all algorithms, sizes, dtypes and reductions; return what is wrong."""
    chance = random.Random(1)
    wrong: list[str] = []
    dtypes, counts = itertools.cycle(DTYPES), itertools.cycle(COUNTS)
    with joined(folder) as group:
        for collective in PROGRAMS:
            for choice, in_place in itertools.product(choices(collective), (True, False)):
                for count in (*(next(counts) for _ in range(3)), LARGE):
                    dtype = next(dtypes)
                    root = chance.randrange(group.ranks) if collective in ROOTED else 0
                    wrong += run_collective(
                        group,
                        collective,
                        count,
                        dtype,
                        choice=choice,
                        in_place=in_place,
                        root=root,
                        blocking=chance.random() < 0.5,
                    )()
        for dtype, reduction in itertools.product(DTYPES, OPERATORS):
            if exists(reduction, dtype):
                for collective in ("all-reduce", "reduce", "reduce-scatter"):
                    wrong += run_collective(group, collective, 77, dtype, reduction=reduction)()
    return wrong


def bits(folder: str) -> dict[str, str]:
    """All-reduce random numbers in every way; return digests of the results."""
    found = {}
    with joined(folder) as group:
        generator = torch.Generator().manual_seed(group.rank)
        for choice in choices("all-reduce"):
            for dtype, count in ((torch.float32, 50_001), (torch.bfloat16, 333)):
                given = torch.randn(count, generator=generator).to(dtype)
                for reduction in ("sum", "avg", "product"):
                    result = torch.empty_like(given)
                    group.all_reduce(
                        elements(given), elements(result), reduction, choice=choice
                    ).wait()
                    key = f"{choice} {dtype} {reduction}"
                    raw = result.view(torch.uint8).numpy().tobytes()
                    found[key] = hashlib.sha256(raw).hexdigest()
    return found


def sequence(folder: str, calls: list[dict[str, Any]], flight: int) -> list[str]:
    """Run collectives, several in flight, waited for in an order of the rank's own."""
    wrong: list[str] = []
    with joined(folder) as group:
        own = random.Random(group.rank)
        begun: list[Callable[[], list[str]]] = []
        for salt, call in enumerate(calls):
            given = dict(call)
            given["dtype"] = getattr(torch, given["dtype"])
            given["root"] = given["root"] % group.ranks if given["collective"] in ROOTED else 0
            begun.append(run_collective(group, salt=salt, **given))
            while len(begun) >= flight:
                wrong += begun.pop(own.randrange(len(begun)))()
        own.shuffle(begun)
        for finish in begun:
            wrong += finish()
    return wrong


def sub_groups(folder: str) -> list[float]:
    """Run overlapping groups over one store at once."""
    store = FileStore(f"{folder}/notes", dist.get_world_size())
    rank, found = dist.get_rank(), []
    groups = {}
    for members in ([0, 1, 2], [0, 2], [2, 1]):  # not in the order of ranks
        if rank in members:
            name = f"of {members}"
            groups[name] = Group(store, members.index(rank), len(members), name=name)
    begun = []
    for group in groups.values():
        tensor = torch.full((10_000,), float(rank + 1))
        begun.append((tensor, group.all_reduce(elements(tensor))))
    for tensor, pending in begun:
        pending.wait()
        found.append(float(tensor.unique().item()))
    for group in groups.values():
        group.close()
    return found


def exchanges(folder: str) -> list[str]:
    """Send and receive among all pairs, between collectives."""
    wrong = []
    with joined(folder) as group:
        for count in (0, 1, 100, LARGE):
            begun = []
            for peer in range(group.ranks):
                if peer == group.rank:
                    continue
                sent = whole_numbers(group.rank, count, torch.int32, peer)
                taken = torch.empty(count, dtype=torch.int32)
                begun.append((sent, peer, group.send(elements(sent), peer=peer, tag=count)))
                begun.append((taken, peer, group.receive(elements(taken), peer=peer, tag=count)))
            wrong += run_collective(group, "all-reduce", 100, torch.float32)()
            for number, (tensor, peer, pending) in enumerate(begun):
                pending.wait()
                expected = whole_numbers(peer, count, torch.int32, group.rank)
                if number % 2 and not torch.equal(tensor, expected):
                    wrong.append(f"{count} from {peer}")
    return wrong


# ---------------------------------------------------------------------- what goes wrong


def said(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the text of the error that a call raises."""
    try:
        call()
    except SynclineError as error:
        return type(error).__name__, str(error)
    return "", ""


def bad_input(folder: str) -> dict[str, tuple[str, str]]:
    """Return what is said to input that cannot be used; the group must go on."""
    three, four = torch.ones(3), torch.ones(4)
    found = {}
    with joined(folder) as group:
        e = elements
        ranks = group.ranks
        calls: dict[str, Callable[[], object]] = {
            "count": lambda: group.all_reduce(e(three), e(four)),
            "dtypes": lambda: group.all_reduce(e(three), e(three.double())),
            "gather": lambda: group.all_gather(e(three), e(four)),
            "scatter": lambda: group.reduce_scatter(e(three), e(three)),
            "dtype": lambda: group.all_reduce(Elements(0, 1, "float8")),
            "reduction": lambda: group.all_reduce(e(three), reduction="som"),
            "average": lambda: group.all_reduce(e(three.bool()), reduction="avg"),
            "bitwise": lambda: group.all_reduce(e(three), reduction="bor"),
            "root": lambda: group.broadcast(e(three), root=ranks),
            "negative root": lambda: group.reduce(e(three), root=-1),
            "algorithm": lambda: group.all_reduce(e(three), choice=Choice("rings")),
            "blocks": lambda: group.all_reduce(e(three), choice=Choice("ring", 3)),
            "no blocks": lambda: group.all_reduce(e(three), choice=Choice("linear-pipeline")),
            "itself": lambda: group.send(e(three), peer=group.rank),
            "peer": lambda: group.receive(e(three), peer=ranks),
        }
        for name, call in calls.items():
            found[name] = said(call)
        group.all_reduce(e(three)).wait()
        assert torch.equal(three, torch.full((3,), float(ranks)))
    found["closed"] = said(lambda: group.all_reduce(e(three)))
    return found


MISMATCHES: dict[str, Callable[[Group, torch.Tensor, bool], object]] = {
    "count": lambda group, t, odd: group.all_reduce(elements(t[:-1] if odd else t)),
    "dtype": lambda group, t, odd: group.all_reduce(elements(t.int() if odd else t)),
    "reduction": lambda group, t, odd: group.all_reduce(
        elements(t), reduction="max" if odd else "sum"
    ),
    "collective": lambda group, t, odd: (
        group.broadcast(elements(t), root=group.rank) if odd else group.all_reduce(elements(t))
    ),
    "root": lambda group, t, odd: group.broadcast(elements(t), root=1 if odd else 0),
    "algorithm": lambda group, t, odd: group.all_reduce(
        elements(t), choice=Choice("ring" if odd else "direct")
    ),
    "part": lambda group, t, odd: (
        group.send(elements(t), peer=0, part_of="gather")
        if odd
        else group.receive(elements(t), peer=1, part_of="scatter")
    ),
}


def mismatch(folder: str, route: str) -> dict[str, tuple[str, str]]:
    """Let rank 1 call something else; return what each rank says."""
    found = {}
    for name, call in MISMATCHES.items():
        with joined(folder, name, route=route) as group:
            found[name] = said(partial(_call_and_go_on, group, call, pair=name == "part"))
            dist.barrier()  # before anybody leaves
    return found


def _call_and_go_on(group: Group, call: Callable[..., Any], *, pair: bool) -> None:
    """Call, and all-reduce: who only sends may be done before anybody can object."""
    tensor = torch.ones(100)
    if not pair or group.rank < 2:
        call(group, tensor, group.rank == 1).wait(DEADLINE_S)
    group.all_reduce(elements(tensor)).wait(DEADLINE_S)


def absent(folder: str) -> tuple[tuple[str, str], float]:
    """Let rank 1 never join."""
    dist.barrier()  # those that join begin together
    began_s = time.monotonic()
    outcome = ("", "")
    if dist.get_rank() != 1:
        outcome = said(lambda: joined(folder, timeout_s=JOINING_S).__enter__())
    return outcome, time.monotonic() - began_s


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a limit of this process."""
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
    "processes": ("auto", lambda: mock.patch.object(os, "pidfd_open", refused)),
    "threads": ("auto", lambda: mock.patch.object(threading.Thread, "start", no_thread)),
    "sockets": ("auto", lambda: mock.patch.object(RankCard, "own", refused)),
    "ucx": ("ucx", lambda: mock.patch.dict(os.environ, {"UCX_TLS": "carrier-pigeon"})),
    "interface": ("tcp", lambda: mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "none0"})),
}


def refusing(folder: str, name: str) -> tuple[tuple[str, str], float]:
    """Let rank 1 not be allowed to join; return what each rank says, and after how long."""
    route, refusal = REFUSALS[name]
    began_s = time.monotonic()

    def take_part() -> None:
        with joined(folder, route=route) as group:
            group.all_reduce(elements(torch.ones(1))).wait()

    with refusal() if dist.get_rank() == 1 else nullcontext():
        found = said(take_part)
    return found, time.monotonic() - began_s


def silent(folder: str, route: str) -> tuple[str, str]:
    """Let rank 1 never call."""
    with joined(folder, route=route) as group:
        outcome = ("", "")
        if group.rank != 1:
            tensor = torch.ones(4)
            pending = group.all_reduce(elements(tensor))
            group.timeout_s = SHORT_TIMEOUT_S
            outcome = said(pending.wait)
            assert pending.ended
            assert not pending.done
        dist.barrier()
        return outcome


def leaving_early(folder: str) -> tuple[str, str]:
    """Let rank 1 leave while the others wait for it."""
    with joined(folder) as group:
        if group.rank == 1:
            return "", ""
        tensor = torch.ones(4)
        return said(lambda: group.all_reduce(elements(tensor)).wait())


def leaving_after_the_last(folder: str) -> list[str]:
    """Let every rank leave as soon as it is done, again and again."""
    wrong = []
    for number in range(20):
        with joined(folder, f"group {number}") as group:
            wrong += run_collective(
                group, "reduce", LARGE if number % 5 == 0 else 50, torch.int32
            )()
            wrong += run_collective(
                group, "broadcast", 50, torch.int32, root=number % group.ranks
            )()
    return wrong
