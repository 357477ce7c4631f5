"""Groups whose ranks are all in this process, each with a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from syncline.comm.groups import Group
from syncline.comm.groups.rendezvous import Members, RankCard, Rendezvous
from tests.comm.groups.jobs import elements
from tests.timeouts import DEADLINE_S

T = TypeVar("T")


def join(ranks: int = 2, store: Any = None, **options: Any) -> list[Group]:
    """Return all ranks of a group."""
    return [each.result() for each in _on_each(lambda group: group, ranks, store, options)]


@contextmanager
def joined(ranks: int = 2, store: Any = None, **options: Any) -> Iterator[list[Group]]:
    """Let there be all ranks of a group, and let them leave."""
    groups = join(ranks, store, **options)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_each(
    job: Callable[[Group], T], ranks: int = 2, store: Any = None, **options: Any
) -> list[Future[T]]:
    """Let every rank join, run a job and leave; return what came of it."""

    def run(group: Group) -> T:
        with closing(group):
            return job(group)

    return _on_each(run, ranks, store, options)


def _on_each(
    job: Callable[[Group], T], ranks: int, store: Any, options: dict[str, Any]
) -> list[Future[T]]:
    shared = dist.HashStore() if store is None else store
    given = {"timeout_s": DEADLINE_S, **options}
    with ThreadPoolExecutor(ranks) as pool:
        return [
            pool.submit(lambda rank: job(Group(shared, rank, ranks, **given)), rank)
            for rank in range(ranks)
        ]


def add_up(groups: Sequence[Group], count: int = 5, **options: Any) -> None:
    """All-reduce something, and make sure of the sum."""
    values = [torch.full((count,), group.rank + 1.0) for group in groups]
    pairs = zip(groups, values, strict=True)
    pending = [group.all_reduce(elements(value), **options) for group, value in pairs]
    for each in pending:
        each.wait(DEADLINE_S)
    total = float(sum(range(len(groups) + 1)))
    assert all(torch.equal(value, torch.full((count,), total)) for value in values)


class VisitedStore:
    """A store of which strangers read each note before any rank does."""

    def __init__(self, visit: Callable[[str, str], object]) -> None:
        store = dist.HashStore()
        self.check, self.get, self._set = store.check, store.get, store.set
        self._visit = visit

    def set(self, key: str, value: str) -> None:
        self._visit(key, value)
        self._set(key, value)


def noting(key: str, note: str) -> Callable[[Members, dist.Store], object]:
    """Return what sets a note of a group in its store."""
    return lambda members, store: store.set(f"{members.prefix}/{key}", note)


FAR = RankCard(host=("b", "n"), name="far", machine="", socket="", nonce="far")  # of another host


def join_with(
    card: RankCard,
    then: Callable[[Members, dist.Store], object] = lambda *_: None,
    *,
    answering: int = 1,
    **options: Any,
) -> Future[Group]:
    """Join a group of 2 whose other rank answers with a card, and then does only this."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        other = Rendezvous(store, "default", answering, 2)
        answer = pool.submit(other.join, card, time.monotonic() + DEADLINE_S)
        given = {"timeout_s": DEADLINE_S, **options}
        joining = pool.submit(Group, store, 1 - answering, 2, **given)
        then(answer.result(DEADLINE_S), store)
    return joining
