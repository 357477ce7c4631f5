"""Tests of ``syncline.parallel.rank_measurements``."""

from __future__ import annotations

import pytest

from syncline.measure.segments import ACCUMULATING
from syncline.model.profile import Gradient, Operation, Phase, Profile
from syncline.parallel.rank_measurements import last_batch_s


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
