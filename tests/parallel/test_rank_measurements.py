"""Tests of ``syncline.parallel.rank_measurements``."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.measure.segments import ACCUMULATING
from syncline.model.profile import Gradient, Operation, Phase, Profile
from syncline.parallel.rank_measurements import RankMeasurements, StageResult, last_batch_s


def profile(*operations: tuple[str, Phase, float]) -> Profile:
    return Profile(
        model="chain",
        device="cpu",
        workers=2,
        iterations=1,
        operations=tuple(
            Operation(name=name, phase=phase, duration_s=s, after=(i - 1,) if i else ())
            for i, (name, phase, s) in enumerate(operations)
        ),
        gradients=(Gradient(name="w", elements=1, ready_after=len(operations) - 1),),
    )


def test_the_passes_of_one_batch_are_timed_whole() -> None:
    one = profile(("read", "data", 5.0), ("a", "forward", 1.0), ("b", "backward", 2.0))
    assert last_batch_s(one) == pytest.approx(3.0)


def test_of_several_micro_batches_the_last_is_timed() -> None:
    several = profile(
        ("read", "data", 5.0),
        ("a", "forward", 1.0),
        (ACCUMULATING, "forward", 7.0),
        ("a", "forward", 1.25),
        ("b", "backward", 2.0),
    )
    assert last_batch_s(several) == pytest.approx(3.25)


class OfTwoRanks(RankMeasurements):
    """The other rank has measured 2 s."""

    def __init__(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value, [2.0, 0.0] if isinstance(value, list) else 2.0]


@pytest.mark.parametrize(("alone_s", "excess_s"), [(1.0, 1.0), (1.99, 0.0), (2.01, -0.01)])
def test_only_slower_passes_can_be_noise(alone_s: float, excess_s: float) -> None:
    one = profile(("a", "forward", 0.5), ("b", "backward", alone_s - 0.5))
    found = OfTwoRanks().excess_s(StageResult(computing_s=[1.9, 2.0, 2.1] * 4), one)
    assert found == pytest.approx(excess_s)


@pytest.mark.parametrize(("own_s", "longest_s"), [([1.0, 1.0, 9.0], 2.0), ([3.0], 3.0), ([], 2.0)])
def test_a_broadcast_takes_as_long_as_on_the_slowest_rank(
    own_s: list[float], longest_s: float
) -> None:
    assert OfTwoRanks().broadcast_s(StageResult(broadcast_s=own_s)) == longest_s


def test_waiting_for_buffers_is_not_computing() -> None:
    one = profile(("between modules", "forward", 1.5), ("b", "backward", 0.25))
    # Of 1.75 s alone, 0.5 s were a broadcast: 1.25 s of computing became 2 s.
    found = OfTwoRanks().busy_excess_s(StageResult(busy_s=[2.0]), one, broadcast_s=0.5)
    assert found == pytest.approx(0.75)
