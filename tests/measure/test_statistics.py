import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.measure.statistics import median, standard_error, typical

TIMES_S = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60)


def test_an_iteration_that_holds_something_else_does_not_move_the_median() -> None:
    times_s = [0.9, 0.95, 1.0, 1.05, 1.1]
    assert typical([*times_s, 11.0, 12.0]) == typical(times_s)
    assert median([*times_s, 11.0, 12.0]) > 1.0


def test_one_slow_iteration_in_three_counts() -> None:
    assert typical([1.0, 1.0, 1.8]) == (1.0, 0.0)
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
