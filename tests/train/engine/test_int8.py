"""Gradients in 8 bits: the format, what rounding leaves, and averages over real process groups."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.planners.compressed import compressed
from syncline.train.engine import int8
from syncline.train.engine import ring as ring_module
from syncline.train.engine.dense_transport import DenseTransport, RingDenseTransport, Slice
from syncline.train.engine.layout import shares_of
from tests.timeouts import TIMEOUT
from tests.train.engine.conftest import Each
from tests.train.engine.test_ring import plan_of

SIZES = st.sampled_from([1.0, 1e-3, 1e30, 1e-38, 1e-44])


def drawn(elements: int, seed: int, size: float) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * size


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, as NaN are whatever their bits."""
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | (one != one)).all())


@given(
    elements=st.integers(0, 400),
    seed=st.integers(0, 1000),
    size=SIZES,
    share=SIZES,
    factor=st.sampled_from([1.0, 0.5, 0.25, 1 / 3]),
    zeros=st.integers(0, 300),
    odd=st.sampled_from([None, math.inf, -math.inf, math.nan]),
)
def test_operations_of_torch_give_the_bits_of_native_code(
    elements: int,
    seed: int,
    size: float,
    share: float,
    factor: float,
    zeros: int,
    odd: float | None,
) -> None:
    values, residual = drawn(elements, seed, size), drawn(elements, seed + 1, size * share) + 0.0
    values[:zeros] = 0
    if odd is not None and elements:
        values[seed % elements] = odd
    for taking in (True, False):
        found, expected = ([values.clone(), residual.clone()] for _ in range(2))
        if taking:
            int8.take(*found, factor)
            int8.take_by_torch(*expected, factor)
        else:
            encoded, again = int8.encode(*found, factor), int8.space_for(values)
            int8.encode_by_torch(*expected, factor, again)
            assert encoded.equal(again)
            for add in (True, False):
                one, other = torch.ones(elements), torch.ones(elements)
                int8.decode(encoded, one, add=add)
                int8.decode_by_torch(encoded, other, add=add)
                assert same_bits(one, other)
            assert same_bits(one, found[0])  # what is left here is what arrives elsewhere
        assert all(map(same_bits, found, expected))


@given(
    elements=st.integers(1, 400),
    seed=st.integers(0, 1000),
    size=SIZES,
    share=st.sampled_from([1e-3, 1.0]),
)
def test_nothing_is_lost(elements: int, seed: int, size: float, share: float) -> None:
    """What is sent and what is kept add up exactly, and no error is above half a step or so."""
    values, residual = drawn(elements, seed, size), drawn(elements, seed + 1, size * share)
    due = values + residual
    int8.encode(values, residual)
    assert (values.double() + residual.double()).equal(due.double())
    for start in range(0, elements, int8.BLOCK):
        block = slice(start, start + int8.BLOCK)
        step = max(float(due[block].abs().max()) / 2**int8.LEAST_EXPONENT, 2.0**-126)
        assert float(residual[block].abs().max()) <= step
    again, left = values.clone(), residual.clone()
    int8.encode(again, left)  # as the all-gather does with what the reduce-scatter has rounded
    assert again.equal(values)
    assert left.equal(residual)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_as_nan_and_leaves_no_residual(odd: float) -> None:
    values, residual = torch.ones(300), torch.full((300,), 0.25)
    values[200] = odd
    encoded = int8.encode(values, residual)
    int8.decode(encoded, values)
    assert values[128:256].isnan().all()
    assert not residual[128:256].any()
    assert values.isfinite().sum() == 300 - 128


def test_zeros_leave_their_residuals() -> None:
    values, residual = torch.zeros(300), torch.full((300,), 0.25)
    values[:64] = values[256:] = 1.0
    for change in (int8.encode, lambda v, r: int8.take(v, r, 1.0)):
        change(values, residual)
        assert not values[64:256].any()
        assert residual[64:256].equal(torch.full((192,), 0.25))
    assert not residual[:64].any()


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    together=st.booleans(),
    segment_bytes=st.sampled_from([64, 500, 1 << 20]),
    rings=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ranks_are_alike_and_residuals_hold_the_rest(
    each: Each,
    lengths: list[int],
    together: bool,
    segment_bytes: int,
    rings: bool,
    seed: int,
) -> None:
    """However messages are cut: sums of averages and residuals are those of the gradients."""
    steps, total = 3, sum(lengths)

    def exchanged(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor]:
        transport = (RingDenseTransport if rings else DenseTransport)(group)
        ends = [] if together else list(itertools.accumulate(lengths))
        plan = compressed(plan_of(lengths, ends, group.size()), "int8")
        residual, found = torch.zeros(total), []
        for step in range(steps):
            buffer, sums = gradient_of(rank, step), list[tuple[torch.Tensor, torch.Tensor]]()
            for message, shares in zip(plan.messages, shares_of(plan), strict=True):
                part = slice(message.start, message.stop)
                kind = message.collective
                sent = Slice(buffer[part], torch.int8, kind, shares, residual[part])
                transport.prepare(sent)
                transport.send(sent, [], lambda: None).wait()
                if message.collective == "reduce-scatter":
                    sums += [
                        (buffer[part][a:b], buffer[part][a:b].clone()) for a, b in shares[rank]
                    ]
            # Norms are computed from the sums, before they are gathered.
            assert all(after.equal(before) for after, before in sums)
            found.append(buffer)
        return found, residual

    def gradient_of(rank: int, step: int) -> torch.Tensor:
        return drawn(total, seed + 100 * rank + step, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "SEGMENT_BYTES", segment_bytes)
        found = each(exchanged)
    ranks = len(found)
    for averages, _ in found[1:]:
        assert all(map(same_bits, averages, found[0][0]))
    expected = sum(
        gradient_of(rank, step).double() for rank in range(ranks) for step in range(steps)
    )
    delivered = sum(average.double() for average in found[0][0])
    kept = sum(residual.double() for _, residual in found)
    error = (delivered + kept - expected / ranks).abs().max()
    assert float(error) < 1e-5


def test_a_shorter_last_share_holds_nobody_up() -> None:
    """Nine ranks, of which the last has one segment to add and the others two."""
    store, ranks, elements = dist.HashStore(), 9, 68

    def exchanged(rank: int) -> torch.Tensor:
        group = dist.ProcessGroupGloo(store, rank, ranks, TIMEOUT)
        transport = RingDenseTransport(group)
        plan = compressed(plan_of([elements], [], ranks), "int8")
        buffer, residual = torch.full((elements,), float(rank)), torch.zeros(elements)
        for message, shares in zip(plan.messages, shares_of(plan), strict=True):
            sent = Slice(buffer, torch.int8, message.collective, shares, residual)
            transport.prepare(sent)
            transport.send(sent, [], lambda: None).wait()
        return buffer

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as threads:
        patch.setattr(ring_module, "SEGMENT_BYTES", 16)
        for average in threads.map(exchanged, range(ranks)):
            assert average.sub(4).abs().max() < 0.1
