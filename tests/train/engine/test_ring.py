"""Reduce-scatter and all-gather as rings: sums of all workers, several messages in flight."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.train.engine import ring as ring_module
from syncline.train.engine.layout import shares_of
from syncline.train.engine.ring import Ring
from tests.train.engine.conftest import Each
from tests.train.engine.plans import plan_of, rows_to


def nothing() -> None:
    """Ignore that everything was sent."""


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    gathers=st.lists(st.integers(0, 200), max_size=3),
    segment_bytes=st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    factor=st.sampled_from([1.0, 0.5]),
    wire=st.sampled_from([None, torch.bfloat16, torch.float16]),
)
def test_every_worker_ends_with_the_sums(
    each: Each,
    lengths: list[int],
    gathers: list[int],
    segment_bytes: int,
    dtype: torch.dtype,
    factor: float,
    wire: torch.dtype | None,
) -> None:
    """In 16 bits, too: these small sums are exact. All-gathers end where the others do not."""
    wire = wire if wire is not None and dtype == torch.float32 else dtype
    workers, total = len(each(lambda rank, _: rank)), sum(lengths)
    scattered = rows_to(itertools.accumulate(lengths), "reduce-scatter")
    gathered = rows_to(sorted({end % total for end in gathers} - {0} | {total}), "all-gather")
    plan = plan_of([total], [*scattered, *gathered], workers)
    everyones = [torch.randint(-9, 9, (total,)).to(dtype) for _ in range(workers)]

    def exchanged(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ring, own = Ring(group), everyones[rank].clone()
        parts = [own[m.start : m.stop] for m in plan.messages]
        slices = [*zip(parts, shares_of(plan), strict=True)]
        summing = [ring.reduce_scatter(*s, factor, wire, nothing) for s in slices[: len(lengths)]]
        for complete in summing:
            complete()
        gathering = [ring.all_gather(*s, wire, nothing) for s in slices[len(lengths) :]]
        for complete in gathering:
            complete()
        return own

    with mock.patch.object(ring_module, "SEGMENT_BYTES", segment_bytes):
        found = each(exchanged)
    for own in found:
        assert own.equal(torch.stack(everyones).sum(0).to(dtype) * factor)


@given(
    elements=st.integers(0, 100),
    segment_bytes=st.integers(1, 64),
    factor=st.sampled_from([1.0, 0.5]),
    wire=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_an_all_reduce_gives_all_sums_to_every_worker(
    each: Each, elements: int, segment_bytes: int, factor: float, wire: torch.dtype
) -> None:
    workers = len(each(lambda rank, _: rank))
    everyones = torch.randint(-9, 9, (workers, elements)).float()

    def exchanged(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[str]]:
        own = everyones[rank].clone()
        sent: list[str] = []
        Ring(group).all_reduce(own, factor, wire, lambda: sent.append("all"))()
        return own, sent

    with mock.patch.object(ring_module, "SEGMENT_BYTES", segment_bytes):
        for own, sent in each(exchanged):
            assert own.equal(everyones.sum(0) * factor)
            assert sent == ["all"]


def test_every_worker_gets_the_rows_of_all(each: Each) -> None:
    def exchanged(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        ring = Ring(group)
        own = [torch.full((2, 3), 10.0 * number + rank) for number in range(3)]
        rows = [torch.zeros(ring.workers, 2, 3) for _ in own]
        under_way = [ring.gather_rows(*pair) for pair in zip(own, rows, strict=True)]
        for complete in under_way:
            complete()
        return rows

    found = each(exchanged)
    for rows in found:
        for number, row in enumerate(rows):
            expected = 10.0 * number + torch.arange(len(found))
            assert row.equal(expected.view(-1, 1, 1).expand_as(row))


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-gather", "8 bits"])
def test_a_worker_says_once_when_all_that_it_sends_is_under_way(each: Each, kind: str) -> None:
    def exchanged(rank: int, group: dist.ProcessGroup) -> tuple[list[int], int]:
        sent, said = list[int](), list[int]()

        class Counting:
            def send(self, *arguments: Any) -> Any:
                sent.append(1)
                return group.send(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(group, name)

        ring = Ring(Counting())  # type: ignore[arg-type]
        shares = tuple(((10 * i, 10 * i + 10),) for i in range(group.size()))
        own = torch.zeros(10 * group.size())

        def on_sent() -> None:
            said.append(len(sent))

        {
            "reduce-scatter": lambda: ring.reduce_scatter(own, shares, 1.0, own.dtype, on_sent),
            "all-gather": lambda: ring.all_gather(own, shares, own.dtype, on_sent),
            "8 bits": lambda: ring.gather_encoded(own, torch.zeros_like(own), shares, on_sent),
        }[kind]()()
        return said, len(sent)

    with mock.patch.object(ring_module, "SEGMENT_BYTES", 16):  # three segments a share
        found = each(exchanged)
    all_sent = 3 * (len(found) - 1)
    assert found == [([all_sent], all_sent)] * len(found)


@pytest.mark.parametrize("each", [2], indirect=True)
def test_two_workers_add_as_an_all_reduce_does(each: Each) -> None:
    """Also zeros, of which two negative ones stay negative."""
    everyones = [torch.tensor([-0.0, -0.0, 0.1, 1e-40]), torch.tensor([-0.0, 0.0, 0.2, 1e-40])]

    def exchanged(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ring, own, whole = Ring(group), everyones[rank].clone(), everyones[rank].clone()
        shares = (((0, 2),), ((2, 4),))
        ring.reduce_scatter(own, shares, 1.0, own.dtype, nothing)()
        ring.all_gather(own, shares, own.dtype, nothing)()
        group.allreduce([whole]).wait()
        return own, whole

    for own, whole in each(exchanged):
        assert own.view(torch.int32).equal(whole.view(torch.int32))


@pytest.mark.parametrize("each", [3], indirect=True)
def test_equal_gradients_of_opposite_signs_cancel(each: Each) -> None:
    """Products are rounded before they are added: otherwise 1e-8 of a gradient remains."""

    def exchanged(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        own = torch.arange(1.0, 31.0) * (1.0, -1.0, 0.0)[rank]
        shares = (((0, 10),), ((10, 20),), ((20, 30),))
        Ring(group).reduce_scatter(own, shares, 1 / 3, own.dtype, nothing)()
        return own[10 * rank : 10 * rank + 10]

    for share in each(exchanged):
        assert not share.any()
