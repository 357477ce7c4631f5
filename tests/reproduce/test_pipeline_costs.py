"""Linear pipelines: the formulas against counted steps, and what the paper prints; PACE."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.paper_costs import (
    best_block_bytes,
    pace_ring_line,
    pipeline_curve,
    pipeline_steps,
)

from syncline.errors import UserError
from syncline.plan.collective_costs import all_reduce_line
from tests import strategies as some
from tests.plan import steps

ALPHA, BETA, GAMMA = 2e-5, 8e-10, 3e-10
COUNTS = [(p, m) for p in range(2, 10) for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 25)]


# Counted steps


def test_steps_are_those_counted() -> None:
    for workers, blocks in COUNTS:
        through = steps.chain_broadcast(workers, blocks)
        assert pipeline_steps("broadcast", workers, blocks) == (0, through)
        assert pipeline_steps("reduce", workers, blocks) == (through, 0)
        total, sums = steps.ring_pipeline_all_reduce(workers, blocks)
        assert pipeline_steps("all-reduce", workers, blocks) == (sums, total - sums)


def test_the_erratum_of_the_pipelines_length() -> None:
    """Table 1 has p - 1 + n / b steps; its own example has 5 a pass on 3 GPUs with 4 blocks."""
    workers, blocks = 3, 4
    counted = steps.chain_broadcast(workers, blocks)
    assert 2 * counted == 10  # the paper's text
    assert workers - 1 + blocks == counted + 1  # the paper's table
    # Two workers, one block: one message, for which the table has twice the time.
    one = pipeline_curve("broadcast", 2, ALPHA, BETA, block_bytes=1000).seconds(1000)
    assert one == pytest.approx(ALPHA + 1000 * BETA)


def test_the_erratum_of_the_all_reduce() -> None:
    """The text has 9 steps for its example, the table 12, and 8 are enough."""
    assert steps.ring_pipeline_all_reduce(3, 4, to_the_last=True)[0] == 9
    assert steps.ring_pipeline_all_reduce(3, 4)[0] == 8
    assert 2 * (3 - 1 + 4) == 12


@pytest.mark.parametrize(("workers", "blocks"), [(3, 4), (3, 6), (4, 3), (4, 5)])
def test_there_and_back_on_a_chain_saves_one_step_only(workers: int, blocks: int) -> None:
    """The other way to read the paper's 9 steps: then the pipeline is filled twice all the same."""
    fewest = steps.chain_all_reduce_optimum(workers, blocks)
    assert fewest == 2 * (workers - 2 + blocks) - 1
    assert fewest >= steps.ring_pipeline_all_reduce(workers, blocks)[0]


@pytest.mark.parametrize("workers", [3, 4, 8, 64])
def test_one_fill_is_cheaper_than_two(workers: int) -> None:
    for blocks in (workers, 2 * workers, 100 * workers):
        total = sum(pipeline_steps("all-reduce", workers, blocks))
        assert 2 * (workers - 2 + blocks) - total == workers - 1


def test_the_cost_is_not_invariant_to_the_workers() -> None:
    """Claimed "regardless of message length"; it holds while (p - 2) b is far below n."""
    block = 64 * 1024

    def ratio(size: int) -> float:
        return pipeline_curve("broadcast", 8, 0.0, BETA, block_bytes=block).seconds(
            size
        ) / pipeline_curve("broadcast", 2, 0.0, BETA, block_bytes=block).seconds(size)

    assert ratio(block) == pytest.approx(7)
    for size in (10 * block, 1000 * block):
        assert ratio(size) == pytest.approx(1 + 6 * block / size)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_proposition_1_does_not_hold_for_all_reduce(workers: int) -> None:
    exchange = all_reduce_line(
        "halving-doubling", workers=workers, alpha_s=0, beta_s_per_byte=BETA
    ).seconds(10**9)
    blocks = 1 << 20
    adding, passing = pipeline_steps("all-reduce", workers, blocks)
    pipeline = (adding + passing) * BETA * 10**9 / blocks
    if workers == 2:
        assert pipeline == pytest.approx(exchange, rel=1e-5)
    else:
        assert pipeline > exchange
    printed = 2 * BETA * (10**9 / blocks * (workers - 1) + 10**9)
    assert printed > exchange


# Costs


def test_a_curve_of_whole_blocks_is_the_formula() -> None:
    for workers, blocks in COUNTS:
        block = 1000
        size = blocks * block
        through = workers - 2 + blocks
        sums, copies = ALPHA + (BETA + GAMMA) * block, ALPHA + BETA * block
        given_block = {"block_bytes": block}
        found = pipeline_curve("broadcast", workers, ALPHA, BETA, **given_block).seconds(size)
        assert found == pytest.approx(through * copies)
        found = pipeline_curve("reduce", workers, ALPHA, BETA, GAMMA, **given_block).seconds(size)
        assert found == pytest.approx(through * sums)
        total, adding = steps.ring_pipeline_all_reduce(workers, blocks)
        found = pipeline_curve("all-reduce", workers, ALPHA, BETA, GAMMA, **given_block).seconds(
            size
        )
        assert found == pytest.approx(adding * sums + (total - adding) * copies)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all-reduce"])
@pytest.mark.parametrize("workers", [2, 3, 4, 16, 300])
@pytest.mark.parametrize("size", [1, 1000, 300_000, 10**7, 10**9])
def test_the_best_block_is_the_best(collective: str, workers: int, size: int) -> None:
    def cost(blocks: float) -> float:
        adding, passing = pipeline_steps(collective, workers, blocks)
        gamma = GAMMA if collective != "broadcast" else 0.0
        moved = adding * (BETA + gamma) + passing * BETA
        return (adding + passing) * ALPHA + moved * size / blocks

    block = best_block_bytes(collective, size, workers, ALPHA, BETA, GAMMA)
    best = cost(size / block)
    assert all(
        best <= cost(m) * (1 + 1e-9) for m in {*range(1, min(size, 3000) + 1), min(size, 9999)}
    )
    curve = {
        "broadcast": pipeline_curve("broadcast", workers, ALPHA, BETA),
        "reduce": pipeline_curve("reduce", workers, ALPHA, BETA, GAMMA),
        "all-reduce": pipeline_curve("all-reduce", workers, ALPHA, BETA, GAMMA),
    }[collective]
    whole = min(cost(m) for m in {1, *(int(size / block) + d for d in (0, 1))} if m >= 1)
    assert best * (1 - 1e-9) <= curve.seconds(size) <= whole * 1.021


def test_the_closed_form_by_hand() -> None:
    # sqrt(n alpha / ((p - 2) beta)) = sqrt(100 * 4 / (4 * 1)).
    assert best_block_bytes("broadcast", 100, 6, 4.0, 1.0) == pytest.approx(10)
    assert best_block_bytes("reduce", 100, 6, 4.0, 0.5, 0.5) == pytest.approx(10)


@pytest.mark.parametrize("blocked", [None, 4096])
@some.few
@given(st.integers(1, 300), st.lists(st.integers(0, 1 << 32), min_size=2, max_size=9))
def test_curves_do_not_decrease(blocked: int | None, workers: int, sizes: list[int]) -> None:
    for curve in (
        pipeline_curve("broadcast", workers, ALPHA, BETA, block_bytes=blocked),
        pipeline_curve("reduce", workers, ALPHA, BETA, GAMMA, block_bytes=blocked),
        pipeline_curve("all-reduce", workers, ALPHA, BETA, GAMMA, block_bytes=blocked),
    ):
        costs = [curve.seconds(size) for size in sorted(sizes)]
        assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


def test_one_worker_needs_no_pipeline() -> None:
    assert pipeline_curve("all-reduce", 1, ALPHA, BETA).seconds(10**9) == 0


def test_without_latency_blocks_are_as_small_as_may_be() -> None:
    assert best_block_bytes("broadcast", 1000, 4, 0.0, BETA) == 1
    assert math.isclose(
        pipeline_curve("broadcast", 4, 0.0, BETA).seconds(10**9), BETA * 10**9, rel_tol=1e-5
    )


# Mistakes


def test_an_unknown_collective() -> None:
    with pytest.raises(UserError, match="no linear pipeline for 'scatter'"):
        pipeline_steps("scatter", 4, 4)


def test_a_block_without_bytes() -> None:
    with pytest.raises(UserError, match="at least 1 byte, found 0"):
        pipeline_curve("broadcast", 4, ALPHA, BETA, block_bytes=0)


@pytest.mark.parametrize(("size", "workers"), [(0, 4), (10, 1)])
def test_no_best_block(size: int, workers: int) -> None:
    with pytest.raises(UserError, match="at least 2 workers and a message of at least 1 byte"):
        best_block_bytes("reduce", size, workers, ALPHA, BETA)


# PACE


def test_pace_is_the_ring_without_latency() -> None:
    # W = 4, B = 2, G = 3: 8 / 4 * 6 / 2 + 8 / 4 * 3 / 3.
    assert pace_ring_line(4, 2.0, 3.0).seconds(8) == pytest.approx(6 + 2)
    assert pace_ring_line(4, 2.0, math.inf).latency_s == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_pace_needs_a_bandwidth(rate: float) -> None:
    with pytest.raises(UserError, match="bandwidth must be above 0"):
        pace_ring_line(4, rate, 1.0)
