"""Gradients in 8 bits: the format, what rounding leaves, and averages over real process groups."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.planners.compressed import compressed
from syncline.train.engine import int8
from syncline.train.engine import ring as ring_module
from syncline.train.engine.dense_transport import DenseTransport, RingDenseTransport
from tests.train.engine.conftest import Each
from tests.train.engine.plans import exchange, plan_of, rows_to

SIZES = st.sampled_from([1.0, 1e-3, 1e30, 1e-38, 1e-44])


def drawn(elements: int, seed: int, size: float) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * size


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, as NaN are whatever their bits."""
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | (one != one)).all())


@st.composite
def pairs(
    draw: st.DrawFn, least: int = 0, shares: st.SearchStrategy[float] = SIZES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw values, and a residual that is smaller or larger by one of some factors."""
    elements, seed, size = draw(st.integers(least, 400)), draw(st.integers(0, 1000)), draw(SIZES)
    return drawn(elements, seed, size), drawn(elements, seed + 1, size * draw(shares)) + 0.0


@given(
    pair=pairs(),
    factor=st.sampled_from([1.0, 0.5, 0.25, 1 / 3]),
    zeros=st.integers(0, 300),
    odd=st.sampled_from([None, math.inf, -math.inf, math.nan]),
)
def test_operations_of_torch_give_the_bits_of_native_code(
    pair: tuple[torch.Tensor, torch.Tensor], factor: float, zeros: int, odd: float | None
) -> None:
    values, residual = pair
    values[:zeros] = 0
    if odd is not None and len(values):
        values[zeros % len(values)] = odd
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
                one, other = torch.ones_like(values), torch.ones_like(values)
                int8.decode(encoded, one, add=add)
                int8.decode_by_torch(encoded, other, add=add)
                assert same_bits(one, other)
            assert same_bits(one, found[0])  # what is left here is what arrives elsewhere
        assert all(map(same_bits, found, expected))


@given(pairs(1, st.sampled_from([1e-3, 1.0])))
def test_nothing_is_lost(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What is sent and what is kept add up exactly, and no error is above half a step or so."""
    values, residual = pair
    due = values + residual
    int8.encode(values, residual)
    assert (values.double() + residual.double()).equal(due.double())
    for start in range(0, len(values), int8.BLOCK):
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
    normed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ranks_are_alike_and_residuals_hold_the_rest(
    each: Each,
    lengths: list[int],
    together: bool,
    segment_bytes: int,
    rings: bool,
    normed: bool,
    seed: int,
) -> None:
    """However messages are cut: sums of averages and residuals are those of the gradients."""
    steps, total = 3, sum(lengths)
    ends = list(itertools.accumulate(lengths))
    gathered = rows_to(ends[-1:] if together else ends, "all-gather")

    def gradient_of(rank: int, step: int) -> torch.Tensor:
        return drawn(total, seed + 100 * rank + step, 1.0)

    def exchanged(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor]:
        transport = (RingDenseTransport if rings else DenseTransport)(group)
        plan = plan_of([total], [*rows_to(ends, "reduce-scatter"), *gathered], group.size())
        residual, found = torch.zeros(total), [gradient_of(rank, step) for step in range(steps)]
        for buffer in found:
            lossy = compressed(plan, "int8")
            sums = exchange(transport, lossy, buffer, torch.int8, residual, normed=normed)
            # Norms are computed from the sums, before they are gathered.
            assert all(after.equal(before) for after, before in sums) or not normed
        return found, residual

    with mock.patch.object(ring_module, "SEGMENT_BYTES", segment_bytes):
        found = each(exchanged)
    ranks = range(len(found))
    for averages, _ in found[1:]:
        assert all(map(same_bits, averages, found[0][0]))
    expected = sum(gradient_of(rank, step).double() for rank in ranks for step in range(steps))
    delivered = sum(average.double() for average in found[0][0])
    kept = sum(residual.double() for _, residual in found)
    assert float((delivered + kept - expected / len(ranks)).abs().max()) < 1e-5


@pytest.mark.parametrize("each", [1], indirect=True)
@pytest.mark.parametrize("transport", [DenseTransport, RingDenseTransport])
def test_a_single_worker_rounds_as_several_do(each: Each, transport: type[DenseTransport]) -> None:
    rows = [(0, 300, "reduce-scatter"), (0, 300, "all-gather")]
    plan = compressed(plan_of([300], rows, 1), "int8")

    def exchanged(_: int, group: dist.ProcessGroup) -> torch.Tensor:
        buffer = drawn(300, 1, 1.0)
        exchange(transport(group), plan, buffer, torch.int8, torch.zeros(300), normed=False)
        return buffer

    expected = drawn(300, 1, 1.0)
    int8.encode(expected, torch.zeros(300))
    assert same_bits(each(exchanged)[0], expected)


@pytest.mark.parametrize("each", [9], indirect=True)
def test_a_shorter_last_share_holds_nobody_up(each: Each) -> None:
    """Nine ranks, of which the last has one segment to add and the others two."""
    rows = [(0, 68, "reduce-scatter"), (0, 68, "all-gather")]
    plan = compressed(plan_of([68], rows, 9), "int8")

    def exchanged(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        buffer = torch.full((68,), float(rank))
        exchange(RingDenseTransport(group), plan, buffer, torch.int8, torch.zeros(68))
        return buffer

    with mock.patch.object(ring_module, "SEGMENT_BYTES", 16):
        for average in each(exchanged):
            assert average.sub(4).abs().max() < 0.1
