"""Linear pipelines: the formulas against counted steps, and what the paper prints; PACE."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.paper_costs import best_block_bytes, pace_ring_line, pipeline_curve, pipeline_steps

from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from tests import strategies as some
from tests.plan import steps

ALPHA, BETA, GAMMA = 2e-5, 8e-10, 3e-10
COLLECTIVES = ("broadcast", "reduce", "all-reduce")
every_collective = pytest.mark.parametrize("collective", COLLECTIVES)
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
    """The text has 9 steps for its example, the table 2 * (3 - 1 + 4), and 8 are enough."""
    assert steps.ring_pipeline_all_reduce(3, 4, to_the_last=True)[0] == 9
    assert steps.ring_pipeline_all_reduce(3, 4)[0] == 8


@pytest.mark.parametrize(("workers", "blocks"), [(3, 4), (3, 6), (4, 3), (4, 5)])
def test_there_and_back_on_a_chain_saves_one_step_only(workers: int, blocks: int) -> None:
    """The other way to read the paper's 9 steps: then the pipeline is filled twice all the same."""
    fewest = steps.chain_all_reduce_optimum(workers, blocks)
    assert fewest == 2 * (workers - 2 + blocks) - 1
    assert fewest >= steps.ring_pipeline_all_reduce(workers, blocks)[0]


# Costs


def curve_of(collective: str, workers: int, block_bytes: int | None = None) -> CostCurve:
    gamma = 0.0 if collective == "broadcast" else GAMMA
    return pipeline_curve(collective, workers, ALPHA, BETA, gamma, block_bytes=block_bytes)


@every_collective
def test_a_curve_of_whole_blocks_is_the_formula(collective: str) -> None:
    for workers, blocks in COUNTS:
        adding, passing = pipeline_steps(collective, workers, blocks)
        expected = adding * (ALPHA + (BETA + GAMMA) * 1000) + passing * (ALPHA + BETA * 1000)
        found = curve_of(collective, workers, 1000).seconds(blocks * 1000)
        assert found == pytest.approx(expected)


@every_collective
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
    whole = min(cost(m) for m in {1, *(int(size / block) + d for d in (0, 1))} if m >= 1)
    assert best * (1 - 1e-9) <= curve_of(collective, workers).seconds(size) <= whole * 1.021


def test_the_closed_form_by_hand() -> None:
    # sqrt(n alpha / ((p - 2) beta)) = sqrt(100 * 4 / (4 * 1)).
    assert best_block_bytes("broadcast", 100, 6, 4.0, 1.0) == pytest.approx(10)
    assert best_block_bytes("reduce", 100, 6, 4.0, 0.5, 0.5) == pytest.approx(10)


@pytest.mark.parametrize("blocked", [None, 4096])
@some.few
@given(st.integers(1, 300), st.lists(st.integers(0, 1 << 32), min_size=2, max_size=9))
def test_curves_do_not_decrease(blocked: int | None, workers: int, sizes: list[int]) -> None:
    for collective in COLLECTIVES:
        curve = curve_of(collective, workers, blocked)
        costs = [curve.seconds(size) for size in sorted(sizes)]
        assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


def test_one_worker_needs_no_pipeline() -> None:
    assert curve_of("all-reduce", 1).seconds(10**9) == 0


def test_without_latency_blocks_are_as_small_as_may_be() -> None:
    assert best_block_bytes("broadcast", 1000, 4, 0.0, BETA) == 1
    assert math.isclose(
        pipeline_curve("broadcast", 4, 0.0, BETA).seconds(10**9), BETA * 10**9, rel_tol=1e-5
    )


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="no linear pipeline for 'scatter'"):
        pipeline_steps("scatter", 4, 4)
    with pytest.raises(UserError, match="at least 1 byte, found 0"):
        curve_of("broadcast", 4, 0)
    for size, workers in ((0, 4), (10, 1)):
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
