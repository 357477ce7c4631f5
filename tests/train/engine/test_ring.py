"""Reduce-scatter and all-gather as rings: sums of all workers, several messages in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.engine import ring as ring_module
from syncline.train.engine.layout import shares_of
from syncline.train.engine.ring import Ring
from tests.timeouts import TIMEOUT
from tests.train.engine.conftest import Each


def plan_of(lengths: list[int], gathers: list[int], workers: int) -> Plan:
    """Return reduce-scatters of some lengths, and all-gathers that end where the others do not."""
    total = sum(lengths)
    ends = [*sorted({end % total for end in gathers} - {0}), total]
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return Plan(
        planner="drawn",
        model="m",
        workers=workers,
        tensors=(Tensor(name="a", elements=total),),
        messages=(
            *(
                Message(start=a, stop=b, collective="reduce-scatter")
                for a, b in zip([0, *stops], stops, strict=False)
            ),
            *(
                Message(start=a, stop=b, collective="all-gather")
                for a, b in zip([0, *ends], ends, strict=False)
            ),
        ),
    )


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
    """In 16 bits, too: these small sums are exact."""
    wire = wire if dtype == torch.float32 else None
    workers = len(each(lambda rank, _: rank))
    plan = plan_of(lengths, gathers, workers)
    everyones = [torch.randint(-9, 9, (sum(lengths),)).to(dtype) for _ in range(workers)]

    def exchanged(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ring, own = Ring(group), everyones[rank].clone()
        for kind in ("reduce-scatter", "all-gather"):
            under_way = [
                ring.reduce_scatter(own[m.start : m.stop], shares, factor, wire=wire)
                if kind == "reduce-scatter"
                else ring.all_gather(own[m.start : m.stop], shares, wire=wire)
                for m, shares in zip(plan.messages, shares_of(plan), strict=True)
                if m.collective == kind
            ]
            for complete in under_way:
                complete()
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "SEGMENT_BYTES", segment_bytes)
        found = each(exchanged)
    for own in found:
        assert own.equal(torch.stack(everyones).sum(0).to(dtype) * factor)


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
    def exchanged(rank: int, group: dist.ProcessGroup) -> list[int]:
        sent: list[int] = []

        class Counting:
            """The group, which counts what is sent."""

            def send(self, *arguments: Any) -> Any:
                sent.append(1)
                return group.send(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(group, name)

        counting = Ring(Counting())  # type: ignore[arg-type]
        workers = group.size()
        shares = tuple(((10 * i, 10 * i + 10),) for i in range(workers))
        said: list[int] = []
        own = torch.zeros(10 * workers)

        def on_sent() -> None:
            said.append(len(sent))

        complete = {
            "reduce-scatter": lambda: counting.reduce_scatter(own, shares, on_sent=on_sent),
            "all-gather": lambda: counting.all_gather(own, shares, on_sent=on_sent),
            "8 bits": lambda: counting.gather_encoded(own, torch.zeros_like(own), shares, on_sent),
        }[kind]()
        complete()
        assert len(sent) == 3 * (workers - 1)
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "SEGMENT_BYTES", 16)  # three segments a share
        found = each(exchanged)
    assert found == [[3 * (len(found) - 1)]] * len(found)


def test_two_workers_add_as_an_all_reduce_does() -> None:
    """Also zeros, of which two negative ones stay negative."""
    store = dist.HashStore()
    everyones = [torch.tensor([-0.0, -0.0, 0.1, 1e-40]), torch.tensor([-0.0, 0.0, 0.2, 1e-40])]

    def exchanged(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
        ring, own, whole = Ring(group), everyones[rank].clone(), everyones[rank].clone()
        shares = (((0, 2),), ((2, 4),))
        ring.reduce_scatter(own, shares)()
        ring.all_gather(own, shares)()
        group.allreduce([whole]).wait()
        return own, whole

    with ThreadPoolExecutor(2) as threads:
        for own, whole in threads.map(exchanged, range(2)):
            assert own.view(torch.int32).equal(whole.view(torch.int32))


def test_equal_gradients_of_opposite_signs_cancel() -> None:
    """Products are rounded before they are added: otherwise 1e-8 of a gradient remains."""
    store = dist.HashStore()
    gradient = torch.arange(1.0, 31.0)

    def exchanged(rank: int) -> torch.Tensor:
        group = dist.ProcessGroupGloo(store, rank, 3, TIMEOUT)
        own = gradient * (1.0, -1.0, 0.0)[rank]
        Ring(group).reduce_scatter(own, (((0, 10),), ((10, 20),), ((20, 30),)), 1 / 3)()
        return own[10 * rank : 10 * rank + 10]

    with ThreadPoolExecutor(3) as threads:
        for share in threads.map(exchanged, range(3)):
            assert not share.any()
