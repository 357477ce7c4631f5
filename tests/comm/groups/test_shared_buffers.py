"""Buffers of a group that its ranks read without a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import numpy as np
import pytest
import torch.distributed as dist

from syncline.comm.collectives import PROGRAMS
from syncline.comm.groups import Choice, Elements, Group
from syncline.errors import MismatchError, PeerError, UserError
from tests.timeouts import DEADLINE_S

T = TypeVar("T")


def on_all_ranks(ranks: int, job: Callable[[Group], T], timeout_s: float = DEADLINE_S) -> list[T]:
    """Run something with a group on every rank, each in a thread of its own."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=DEADLINE_S))

    def one(rank: int) -> T:
        group = Group(store, rank, ranks, timeout_s=timeout_s)
        try:
            return job(group)
        finally:
            group.close()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(ranks)]
        return [future.result(DEADLINE_S) for future in futures]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_on_shared_buffers(ranks: int) -> None:
    count = 50_000

    def job(group: Group) -> None:
        with group.allocate(4 * count) as buffer:
            values = np.frombuffer(buffer.memory, np.float32)
            for algorithm in ("ring", "direct", "recursive-doubling", "minimum-spanning-tree"):
                if algorithm not in PROGRAMS["all-reduce"]:
                    continue
                values[:] = np.arange(count) + group.rank
                group.all_reduce(buffer.elements("float32"), choice=Choice(algorithm)).wait()
                expected = np.arange(count) * ranks + ranks * (ranks - 1) / 2
                assert np.array_equal(values, expected)
            values[:] = group.rank
            group.broadcast(buffer.elements("float32"), root=ranks - 1).wait()
            assert (values == ranks - 1).all()

    on_all_ranks(ranks, job)


def test_a_part_of_a_buffer_and_memory_of_the_process_together() -> None:
    def job(group: Group) -> None:
        with group.allocate(4000) as buffer:
            values = np.frombuffer(buffer.memory, np.float32)
            values[:] = group.rank + 1
            result = np.zeros(500, np.float32)
            group.all_reduce(
                buffer.elements("float32", 500, start=250),
                Elements(result.ctypes.data, 500, "float32", result),
            ).wait()
            assert (result == 3).all()
            assert (values == group.rank + 1).all()

    on_all_ranks(2, job)


def test_buffers_come_and_go_beside_collectives() -> None:
    """What a peer has closed is forgotten, while ordinary memory goes on."""

    def job(group: Group) -> None:
        plain = np.ones(10_000, np.float32)
        elements = Elements(plain.ctypes.data, plain.size, "float32", plain)
        for number in range(20):
            pending = group.all_reduce(elements)
            with group.allocate(40_000) as buffer:
                values = np.frombuffer(buffer.memory, np.float32)
                values[:] = number
                group.all_reduce(buffer.elements("float32")).wait()
                assert (values == 2 * number).all()
            pending.wait()
        assert (plain == 2.0**20).all()

    on_all_ranks(2, job)


def test_views_outlive_their_buffer() -> None:
    def job(group: Group) -> float:
        buffer = group.allocate(400)
        values = np.frombuffer(buffer.memory, np.float32)
        values[:] = 7
        buffer.close()
        buffer.close()
        return float(values.sum())

    assert on_all_ranks(2, job) == [700.0, 700.0]


def test_other_sizes_are_refused() -> None:
    def job(group: Group) -> str:
        with pytest.raises(MismatchError) as error:
            group.allocate(100 + group.rank)
        return str(error.value)

    said = on_all_ranks(2, job)
    assert said[0] == (
        "rank 0, shared buffer 1 of 100 bytes: rank 1 allocates 101 bytes; all ranks must allocate "
        "the same"
    )


def test_a_rank_that_does_not_allocate_is_named_in_time() -> None:
    def job(group: Group) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(PeerError) as error:
            group.allocate(100)
        return str(error.value)

    assert "rank 1 has left the group" in on_all_ranks(2, job)[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: group.allocate(0), "at least 1 byte, found 0"),
        (lambda group: group.allocate(1 << 50), "no memory for a shared buffer of .* are free"),
        (lambda group: group.allocate(8).elements("float32", 3), "elements 0 to 3 of float32"),
        (lambda group: group.allocate(8).elements("float23"), "float23"),
    ],
)
def test_mistakes(call: Callable[[Group], object], said: str) -> None:
    def job(group: Group) -> None:
        with pytest.raises(UserError, match=said):
            call(group)

    on_all_ranks(1, job)
