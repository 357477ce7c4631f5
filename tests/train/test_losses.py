"""When a plan counts as slower than stock DDP was."""

from __future__ import annotations

import pytest

from syncline.plan.run import Rate
from syncline.train.watches import LossWatch

BASELINE = Rate(name="stock DDP", iteration_s=1.0, noise_s=0.01, iterations=20)


def windows(watch: LossWatch, *seconds: float, noise_s: float = 0.01) -> list[bool]:
    return [watch.close_window(BASELINE, [(s, noise_s), (s, noise_s)]) for s in seconds]


@pytest.mark.parametrize(
    ("seconds", "noise_s", "slower"),
    [
        (0.5, 0.0, False),
        (1.0, 0.0, False),
        (1.015, 0.0, False),  # 2 standard errors of the baseline are 0.02
        (1.025, 0.0, True),
        (1.025, 0.02, False),  # 2 errors of the difference are 0.045
        (1.05, 0.02, True),
    ],
)
def test_it_must_be_slower_beyond_noise(seconds: float, noise_s: float, slower: bool) -> None:
    assert windows(LossWatch(), 1.0, seconds, seconds, noise_s=noise_s)[-1] is slower


def test_what_is_small_does_not_matter() -> None:
    exact = Rate(name="stock DDP", iteration_s=1.0, noise_s=0.0, iterations=20)
    watch = LossWatch()
    assert not any(watch.close_window(exact, [(1.019, 0.0)]) for _ in range(5))
    assert any(watch.close_window(exact, [(1.021, 0.0)]) for _ in range(5))


def test_two_windows_in_a_row_must_be_slower() -> None:
    assert not any(windows(LossWatch(), *[2.0, 1.0] * 5))
    assert windows(LossWatch(), 2.0, 2.0) == [False, True]


def test_each_comparison_doubles_the_patience() -> None:
    found = windows(LossWatch(), *[2.0] * 30)
    assert [number for number, slower in enumerate(found, 1) if slower] == [2, 5, 10, 19]


def test_the_median_of_the_ranks_counts() -> None:
    watch = LossWatch()
    one_slow = [(1.0, 0.0), (1.0, 0.0), (9.0, 0.0)]
    assert not any(watch.close_window(BASELINE, one_slow) for _ in range(4))


def test_without_a_baseline_nothing_is_compared() -> None:
    watch = LossWatch()
    assert not any(watch.close_window(None, [(9.0, 0.0)]) for _ in range(4))
