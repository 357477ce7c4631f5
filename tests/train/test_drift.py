"""When a plan's assumptions count as changed."""

from __future__ import annotations

import pytest

from syncline.train.watches import DriftWatch, Sample


def window(watch: DriftWatch, computation_s: float, communication_s: float) -> bool:
    for _ in range(5):
        watch.add(Sample(computation_s, communication_s))
    return watch.close_window([watch.take_summary()])


@pytest.mark.parametrize(
    ("sample", "drifted"),
    [
        ((1.0, 0.5), False),
        ((1.19, 0.5), False),
        ((1.21, 0.5), True),
        ((0.79, 0.5), True),
        ((1.0, 0.61), True),
        ((1.0, 0.39), True),
    ],
)
def test_a_fifth_is_the_limit(sample: tuple[float, float], drifted: bool) -> None:
    watch = DriftWatch()
    assert not window(watch, 1.0, 0.5)
    assert not window(watch, 1.0, 0.5)
    assert not window(watch, *sample)
    assert window(watch, *sample) is drifted


def test_a_change_must_last() -> None:
    watch = DriftWatch()
    window(watch, 1.0, 0.5)
    for _ in range(3):
        assert not window(watch, 2.0, 0.5)
        assert not window(watch, 1.0, 0.5)


def test_what_is_small_does_not_matter() -> None:
    watch = DriftWatch()
    assert not window(watch, 1.0, 0.01)
    assert not window(watch, 1.0, 0.01)
    assert not window(watch, 1.0, 0.02)
    assert not window(watch, 1.0, 0.02)


def test_one_slow_sample_is_no_drift() -> None:
    watch = DriftWatch()
    window(watch, 1.0, 0.5)
    watch.add(Sample(9.0, 9.0))
    assert not window(watch, 1.0, 0.5)


def test_what_varies_by_itself_is_no_drift() -> None:
    watch = DriftWatch()
    for samples in ((0.3, 0.9, 0.4, 1.1, 0.5), (0.5, 1.3, 0.4, 0.9, 0.8)) * 2:
        for communication_s in samples:
            watch.add(Sample(1.0, communication_s))
        assert not watch.close_window([watch.take_summary()])


def test_patience_doubles() -> None:
    watch = DriftWatch()
    speed = 1.0
    waits = []
    for _ in range(3):
        window(watch, speed, 0.5)
        speed *= 2
        windows = 1
        while not window(watch, speed, 0.5):
            windows += 1
            assert windows < 20
        waits.append(windows)
    assert waits == [2, 2, 4]


def test_ranks_agree_by_their_median() -> None:
    watch = DriftWatch()
    everyone = [[1.0, 0.5, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0], [5.0, 0.5, 0.0, 0.0]]
    for _ in range(3):
        watch.add(Sample(5.0, 0.5))
        assert not watch.close_window(everyone)
