"""Who is slower, and who is simulated apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.simulator.workers import ALIKE, Workers, parse_stragglers
from tests import strategies as some


def test_equal_workers_are_one_class() -> None:
    assert ALIKE.classes(2048) == [(1.0, 2048, 0)]
    assert Workers(stragglers=((2, 1.5), (3, 1.5))).classes(8) == [(1.0, 6, 0), (1.5, 2, 2)]
    assert Workers(stragglers=((0, 2.0), (0, 0.5))).classes(3) == [(1.0, 3, 0)]


@some.few
@given(st.integers(1, 300), st.floats(0, 2), st.integers(0, 1000))
def test_classes_hold_every_worker_once(count: int, spread: float, seed: int) -> None:
    workers = Workers(spread=spread, seed=seed)
    classes = workers.classes(count)
    assert sum(c.size for c in classes) == count
    assert sorted(c.factor for c in classes) == sorted(set(workers.factors(count).tolist()))
    assert workers.classes(count) == classes
    for one in classes:
        assert workers.factors(count)[one.first] == one.factor


def test_a_spread_is_log_normal_about_one() -> None:
    logarithms = np.log(Workers(spread=0.1, seed=3).factors(100_000))
    assert logarithms.mean() == pytest.approx(0, abs=0.002)
    assert logarithms.std() == pytest.approx(0.1, rel=0.02)


def test_jitter_is_drawn_for_each_worker_and_iteration() -> None:
    workers = Workers(stragglers=((1, 2.0),), jitter=0.2, seed=5)
    classes = workers.classes(3)
    assert [c.size for c in classes] == [1, 1, 1]
    draws = workers.draws(classes, 1000)
    assert draws.shape == (1000, 3)
    assert np.median(draws, axis=0) == pytest.approx([1, 2, 1], rel=0.05)
    # More iterations leave the first ones as they were.
    assert (workers.draws(classes, 10) == draws[:10]).all()
    fixed = Workers(stragglers=((0, 1.5),))
    assert fixed.draws(fixed.classes(1), 2).tolist() == [[1.5], [1.5]]


@pytest.mark.parametrize(
    ("text", "pairs"), [("1.2@3", ((3, 1.2),)), (" 2@0 , .5@17", ((0, 2.0), (17, 0.5)))]
)
def test_stragglers_as_text(text: str, pairs: tuple[tuple[int, float], ...]) -> None:
    assert parse_stragglers(text) == pairs


@pytest.mark.parametrize("text", ["", "3", "1.2@", "@3", "1.2@-1", "x@3", "1.2@3;2@4", "nan@1"])
def test_what_is_no_straggler(text: str) -> None:
    with pytest.raises(UserError, match=r"expected FACTOR@RANK, such as 1\.2@3"):
        parse_stragglers(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stragglers": ((-1, 1.0),)}, "rank must be at least 0"),
        ({"stragglers": ((0, 0.0),)}, "factor of rank 0 must be between 0.001 and 1000, found 0"),
        ({"stragglers": ((0, float("nan")),)}, "factor of rank 0"),
        ({"spread": -0.1}, "spread must be between 0 and 2"),
        ({"jitter": 3.0}, "jitter must be between 0 and 2"),
        ({"jitter": float("inf")}, "jitter must be between 0 and 2"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Workers(**fields)  # type: ignore[arg-type]


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no rank 8 among 8 workers \(0 to 7\)"):
        Workers(stragglers=((8, 1.1),)).factors(8)
