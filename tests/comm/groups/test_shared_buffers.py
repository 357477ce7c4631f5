"""Buffers of a group that its ranks read without a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from syncline.comm.groups import Choice, Elements, Group
from syncline.errors import MismatchError, PeerError, UserError
from tests.comm.groups.one_process import joined, on_each
from tests.timeouts import DEADLINE_S


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_on_shared_buffers(ranks: int) -> None:
    count = 50_000

    def job(group: Group) -> None:
        with group.allocate(4 * count) as buffer:
            values = np.frombuffer(buffer.memory, np.float32)
            for algorithm in ("ring", "direct", "recursive-doubling", "minimum-spanning-tree"):
                values[:] = np.arange(count) + group.rank
                group.all_reduce(buffer.elements("float32"), choice=Choice(algorithm)).wait()
                expected = np.arange(count) * ranks + ranks * (ranks - 1) / 2
                assert np.array_equal(values, expected)
            values[:] = group.rank
            group.broadcast(buffer.elements("float32"), root=ranks - 1).wait()
            assert (values == ranks - 1).all()

    for each in on_each(job, ranks):
        each.result()


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

    for each in on_each(job):
        each.result()


def test_buffers_come_and_go_beside_collectives() -> None:
    """What a peer has closed is forgotten, while ordinary memory goes on; views stay."""

    def job(group: Group) -> None:
        plain = np.ones(10_000, np.float32)
        elements = Elements(plain.ctypes.data, plain.size, "float32", plain)
        for number in range(20):
            pending = group.all_reduce(elements)
            with group.allocate(40_000) as buffer:
                values = np.frombuffer(buffer.memory, np.float32)
                values[:] = number
                group.all_reduce(buffer.elements("float32")).wait()
            buffer.close()
            assert (values == 2 * number).all()
            pending.wait()
        assert (plain == 2.0**20).all()

    for each in on_each(job):
        each.result()


def test_other_sizes_are_refused() -> None:
    for rank, each in enumerate(on_each(lambda group: group.allocate(100 + group.rank))):
        words = (
            f"rank {rank}, shared buffer 1 of {100 + rank} bytes: rank {1 - rank} allocates "
            f"{101 - rank} bytes; all ranks must allocate the same"
        )
        with pytest.raises(MismatchError, match=words):
            each.result()


def test_a_rank_that_does_not_allocate_is_named_in_time() -> None:
    first, _ = on_each(lambda group: group.close() if group.rank else group.allocate(100))
    with pytest.raises(PeerError, match="rank 1 has left the group"):
        first.result()


def test_leaving_ends_the_wait_of_another_thread() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:syncline")

    with ThreadPoolExecutor(1) as pool, joined(timeout_s=2 * DEADLINE_S) as groups:
        before = mapped()
        waiting = pool.submit(groups[0].allocate, 100)
        while mapped() < before + 2:  # by rank 0, and by rank 1, which has been told
            time.sleep(0.001)
        groups[0].close()
        with pytest.raises(PeerError, match="rank 0 itself has left the group"):
            waiting.result(DEADLINE_S)


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
    with joined(1) as [group], pytest.raises(UserError, match=said):
        call(group)
