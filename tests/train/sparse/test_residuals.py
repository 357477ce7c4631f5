"""Residuals: adding, saving, loading, sharing out."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import MismatchError, UserError
from syncline.hooks import Recipe, resharded
from syncline.train.sparse.memory import HostMemory
from syncline.train.sparse.residuals import Residuals
from tests.train.sparse.vectors import dense_vectors, entries_of

RECIPE = Recipe(density=0.1, momentum=0.9)
ELEMENTS = {"a": 3, "none": 0, "b": 5, "c": 2}


def residuals_of(rows: Any) -> Residuals:
    """Return residuals and velocities; a row is all of them one after the other."""
    made = Residuals(RECIPE, ELEMENTS, HostMemory())
    parts = torch.from_numpy(np.asarray(rows)).split(list(ELEMENTS.values()), dim=1)
    for name, part in zip(ELEMENTS, parts, strict=True):
        for tensor, values in zip(made.tensors_of(name), part, strict=True):
            tensor.copy_(values)
    return made


def state_of(
    residuals: Residuals, *, rank: int = 0, ranks: int = 1, step: int = 4
) -> dict[str, Any]:
    """Return what a rank saves."""
    place = {"version": 1, "recipe": {}, "ranks": ranks, "rank": rank, "step": step}
    return {**place, **residuals.state_dict()}


def row_of(state: dict[str, Any]) -> np.ndarray:
    kept = [torch.cat([state[what][n] for n in ELEMENTS]) for what in ("residuals", "velocities")]
    return torch.stack(kept).numpy()


@given(dense_vectors(length=10, exact=True), dense_vectors(length=10, exact=True))
def test_adding_reaches_the_right_parameters(before: np.ndarray, added: np.ndarray) -> None:
    residuals = residuals_of([before, before])
    residuals.add(list(ELEMENTS), entries_of(added))
    np.testing.assert_array_equal(row_of(residuals.state_dict())[0], before + added)
    residuals.add(["c", "a"], entries_of(np.array([1, 2, 3, 4, 5], np.float32)))
    expected = (before + added)[8:] + np.array([1, 2], np.float32)
    assert residuals.of("c").tolist() == expected.tolist()


@given(st.lists(dense_vectors(length=10, exact=True), min_size=1, max_size=9), st.integers(1, 9))
def test_sharing_out_keeps_the_sum(rows: list[np.ndarray], ranks: int) -> None:
    states = [
        state_of(residuals_of([row, row + 1]), rank=rank, ranks=len(rows))
        for rank, row in enumerate(rows)
    ]
    found = [row_of(state) for state in resharded(states, ranks)]
    assert len(found) == ranks
    np.testing.assert_array_equal(np.sum(found, axis=0), np.sum([*map(row_of, states)], axis=0))
    if ranks == len(rows):
        np.testing.assert_array_equal(found, [*map(row_of, states)])


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.25, 0.5, 1.0, 3.0]), max_size=9), st.integers(0, 8))
def test_what_waits_moves_weights_as_far_at_every_rate(rates: list[float], saved: int) -> None:
    """Also through a checkpoint, and with a rate of 0 now and then."""
    residuals = residuals_of(np.ones((2, 10)))
    residuals.follow("a", 0.5)
    for number, rate in enumerate(rates):
        if number == saved:
            state = state_of(residuals)
            residuals = residuals_of(np.zeros((2, 10)))
            residuals.load_state_dict(resharded([state], 2)[0])
        residuals.follow("a", rate)
        if rate:
            expected = torch.full((3,), 0.5 / rate)
            torch.testing.assert_close(residuals.of("a"), expected, rtol=1e-5, atol=0)
    assert row_of(residuals.state_dict())[1].tolist() == [1.0] * 10
    assert residuals.of("b").tolist() == [1.0] * 5


def test_saved_tensors_are_copies() -> None:
    residuals = residuals_of(np.ones((2, 10)))
    state = residuals.state_dict()
    residuals.of("a").zero_()
    assert state["residuals"]["a"].tolist() == [1, 1, 1]
    residuals.load_state_dict(state)
    assert residuals.of("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("elements", "velocities", "said"),
    [
        ({"a": 3}, True, "'b' has 5 elements there, none here"),
        ({**ELEMENTS, "d": 1}, True, "'d' has none of the elements there, 1 here"),
        ({**ELEMENTS, "a": 4}, True, "'a' has 3 elements there, 4 here"),
        (ELEMENTS, False, "the velocities of a checkpoint are of another model or recipe"),
    ],
)
def test_states_of_something_else(elements: dict[str, int], velocities: bool, said: str) -> None:
    state = residuals_of(np.ones((2, 10))).state_dict()
    recipe = RECIPE if velocities else Recipe(density=0.1)
    other = Residuals(recipe, elements, HostMemory())
    with pytest.raises(MismatchError, match=said):
        other.load_state_dict(state)
    assert not any(other.of(name).any() for name in elements)


def test_states_that_do_not_belong_together() -> None:
    state = functools.partial(state_of, residuals_of(np.zeros((2, 10))), ranks=2)
    one, other = state(rank=0), state(rank=1)
    shared = resharded([other, one], 3)
    assert [(s["rank"], s["ranks"], s["step"]) for s in shared] == [(n, 3, 4) for n in range(3)]
    for wrong in ([one], [one, one], [one, state(rank=1, step=5)], []):
        with pytest.raises(MismatchError, match="expected the states of ranks 0 to"):
            resharded(wrong, 2)
    with pytest.raises(UserError, match="at least 1 rank, found 0"):
        resharded([one, other], 0)
    with pytest.raises(UserError, match="16 bits leave none"):
        resharded([{"compression": "bfloat16", "steps": 4}] * 2, 3)
