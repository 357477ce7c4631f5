"""When a plan's assumptions count as changed, and when it counts as slower than DDP was."""

from __future__ import annotations

import pytest

from syncline.plan.run import Rate
from syncline.train.watches import DriftWatch, LossWatch, Sample


def window(watch: DriftWatch, computation_s: float, *communication_s: float) -> bool:
    """Close a window of these samples, in turns; a single one five times."""
    for each_s in communication_s * (5 if len(communication_s) == 1 else 1):
        watch.add(Sample(computation_s, each_s))
    return watch.close_window([watch.take_summary()])


@pytest.mark.parametrize(
    ("before_s", "now_s", "drifted"),
    [
        ((1.0, 0.5), (1.19, 0.5), False),
        ((1.0, 0.5), (1.21, 0.5), True),
        ((1.0, 0.5), (0.79, 0.5), True),
        ((1.0, 0.5), (1.0, 0.61), True),
        ((1.0, 0.5), (1.0, 0.39), True),
        ((1.0, 0.01), (1.0, 0.02), False),  # what is small does not matter
    ],
)
def test_a_fifth_is_the_limit(
    before_s: tuple[float, float], now_s: tuple[float, float], drifted: bool
) -> None:
    watch = DriftWatch()
    found = [window(watch, *each_s) for each_s in (before_s, before_s, now_s, now_s)]
    assert found == [False, False, False, drifted]


def test_a_change_must_last() -> None:
    watch = DriftWatch()
    assert not any(window(watch, each_s, 0.5) for each_s in (1.0, 2.0) * 4)


def test_one_slow_sample_is_no_drift() -> None:
    watch = DriftWatch()
    window(watch, 1.0, 0.5)
    for _ in range(2):
        watch.add(Sample(9.0, 9.0))
        assert not window(watch, 1.0, 0.5)


def test_what_varies_by_itself_is_no_drift() -> None:
    watch = DriftWatch()
    for samples in ((0.3, 0.9, 0.4, 1.1, 0.5), (0.5, 1.3, 0.4, 0.9, 0.8)) * 2:
        assert not window(watch, 1.0, *samples)


def test_patience_doubles() -> None:
    watch = DriftWatch()
    now_s = (1, 2, 2, *(2, 4, 4), *(4, 8, 8, 8, 8))
    drifted = [number for number, each_s in enumerate(now_s) if window(watch, each_s, 0.5)]
    assert drifted == [2, 5, 10]


def test_ranks_agree_by_their_median() -> None:
    watch = DriftWatch()
    everyone = [[1.0, 0.5, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0], [5.0, 0.5, 0.0, 0.0]]
    for _ in range(3):
        watch.add(Sample(5.0, 0.5))
        assert not watch.close_window(everyone)


def slower(*seconds: float, noise_s: float = 0.01, baseline_noise_s: float = 0.01) -> list[bool]:
    """Return after which windows a plan counts as slower than a baseline of one second."""
    watch = LossWatch()
    baseline = Rate(name="DDP", iteration_s=1.0, noise_s=baseline_noise_s, iterations=20)
    return [watch.close_window(baseline, [(s, noise_s), (s, noise_s)]) for s in seconds]


@pytest.mark.parametrize(
    ("seconds", "noise_s", "baseline_noise_s", "expected"),
    [
        (0.5, 0.0, 0.01, False),
        (1.015, 0.0, 0.01, False),  # 2 standard errors of the baseline are 0.02
        (1.025, 0.0, 0.01, True),
        (1.025, 0.02, 0.01, False),  # 2 errors of the difference are 0.045
        (1.05, 0.02, 0.01, True),
        (1.019, 0.0, 0.0, False),  # what is small does not matter
        (1.021, 0.0, 0.0, True),
    ],
)
def test_it_must_be_slower_beyond_noise(
    seconds: float, noise_s: float, baseline_noise_s: float, expected: bool
) -> None:
    noise = {"noise_s": noise_s, "baseline_noise_s": baseline_noise_s}
    assert slower(1.0, seconds, seconds, **noise)[-1] is expected


def test_two_windows_in_a_row_must_be_slower() -> None:
    assert not any(slower(*[2.0, 1.0] * 5))
    assert slower(2.0, 2.0) == [False, True]


def test_each_comparison_doubles_the_patience() -> None:
    found = slower(*[2.0] * 30)
    assert [number for number, each in enumerate(found, 1) if each] == [2, 5, 10, 19]


@pytest.mark.parametrize(
    "baseline", [Rate(name="DDP", iteration_s=1, noise_s=0, iterations=9), None]
)
def test_the_median_of_the_ranks_is_compared_with_the_baseline(baseline: Rate | None) -> None:
    watch = LossWatch()
    now = [(1.0, 0.0), (1.0, 0.0), (9.0, 0.0)] if baseline else [(9.0, 0.0)]
    assert not any(watch.close_window(baseline, now) for _ in range(4))
