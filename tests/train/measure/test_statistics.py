import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.train.measure.statistics import compare, median, standard_error, typical

TIMES_S = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60)


def test_an_iteration_that_holds_something_else_does_not_move_the_median() -> None:
    times_s = [0.9, 0.95, 1.0, 1.05, 1.1]
    assert typical([*times_s, 11.0, 12.0]) == typical(times_s)
    assert median([*times_s, 11.0, 12.0]) > 1.0


def test_one_slow_iteration_in_three_counts() -> None:
    value_s, error_s = typical([1.0, 1.0, 1.8])
    assert value_s == 1.0
    assert error_s > 0.25  # of three values the median absolute deviation would be 0
    assert typical([1.0, 1.8, 1.8])[0] == 1.8


@given(TIMES_S)
def test_the_typical_time_lies_between_the_times(times_s: list[float]) -> None:
    value_s, error_s = typical(times_s)
    assert min(times_s) <= value_s <= median(times_s)
    assert 0 <= error_s < math.inf


@given(TIMES_S)
def test_times_that_differ_by_less_than_a_factor_of_two_all_count(times_s: list[float]) -> None:
    near_s = [1.5 + 0.4 * math.tanh(time_s) for time_s in times_s]
    assert typical(near_s) == (median(near_s), pytest.approx(standard_error(near_s)))


@pytest.mark.parametrize(
    ("times_s", "others_s", "expected"),
    [
        ([0.8, 0.81, 0.79], [1.0, 1.01, 0.99], 1),
        ([1.0, 1.01, 0.99], [0.8, 0.81, 0.79], -1),
        ([1.0, 1.01, 0.99], [1.0, 1.01, 0.99], 0),
        ([0.8, 0.8], [1.0, 1.0], 0),  # two are too few
        ([0.99] * 3, [1.0] * 3, 0),  # alike by accident
        ([0.99] * 48, [1.0] * 48, 1),
        ([0.7, 1.0, 0.7], [1.0, 1.3, 0.9], 0),
        ([0.8, 0.81, 0.79, 9.0], [1.0, 1.01, 0.99], 1),  # one holds something else
    ],
)
def test_a_difference_counts_once_it_is_significant(
    times_s: list[float], others_s: list[float], expected: int
) -> None:
    assert compare(times_s, others_s) == expected
    assert compare(others_s, times_s) == -expected


def test_looking_again_and_again_rarely_finds_a_difference_that_is_not_there() -> None:
    """At most 4 % over all looks, on either side, as its docstring says."""
    draw = random.Random(0)
    wrong = 0
    for _ in range(500):
        times_s, others_s = ([draw.gauss(1.0, 0.03) for _ in range(48)] for _ in range(2))
        looks = (3, 5, 7, 10, 15, 22, 33, 48)
        wrong += any(compare(times_s[:n], others_s[:n]) > 0 for n in looks)
    assert wrong <= 0.04 * 500


def test_a_gain_of_a_fifth_is_seen_after_a_few_iterations() -> None:
    draw = random.Random(0)
    seen = 0
    for _ in range(200):
        times_s, others_s = ([draw.gauss(m, 0.015 * m) for _ in range(4)] for m in (0.8, 1.0))
        seen += compare(times_s, others_s) == 1
    assert seen >= 190
