"""Recipes: what is refused, and what follows from one."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from syncline.errors import UserError
from syncline.plan.recipe import ALGORITHMS, PAPER_WARMUP, Recipe, SparseAlgorithm
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"density": 0.0}, "a density is above 0 and at most 1, found 0.0"),
        ({"density": 1.5}, "found 1.5"),
        ({"density": float("nan")}, "found nan"),
        ({"density": "0.1"}, "found '0.1'"),
        ({"warmup": 0.25, "warmup_steps": 1}, "warmup is a tuple, found 0.25"),
        ({"dense_names": "*.bias"}, r"dense_names is a tuple, found '\*.bias'"),
        ({"warmup": (0.5, 2.0), "warmup_steps": 1}, "found 2.0"),
        ({"warmup": (0.5,)}, "found 1 densities and 0 steps"),
        ({"warmup_steps": 10}, "found 0 densities and 10 steps"),
        ({"warmup": (0.5,), "warmup_steps": -1}, "and -1 steps"),
        ({"algorithm": "gtop-k-butterfl"}, "did you mean 'gtop-k-butterfly'"),
        ({"unit": "bucket"}, r"unknown unit 'bucket' \(known: layer, message, model\)"),
        ({"wire": "int8"}, r"unknown wire 'int8' \(known: float32, bfloat16, float16\)"),
        ({"momentum": 1.0}, "momentum is from 0 to below 1, found 1.0"),
        ({"factor_masking": True}, "factor_masking clears velocities"),
        ({"clip_norm": 0.0}, "clip_norm is above 0 or None, found 0.0"),
        ({"dense_below_elements": -1}, "dense_below_elements is at least 0, found -1"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Recipe(**{"density": 0.01, **wrong})


def test_the_paper_s_warm_up() -> None:
    recipe = Recipe(density=0.001, warmup=PAPER_WARMUP, warmup_steps=10)
    assert [recipe.density_at(step) for step in (0, 9, 10, 29, 39, 40, 10**9)] == [
        *(0.25, 0.25, 0.0725, 0.015, 0.004, 0.001, 0.001)
    ]
    assert [recipe.count_at(40, n) for n in (0, 1, 400, 1500, 25_000)] == [0, 1, 1, 2, 25]
    assert Recipe(density=1).count_at(0, 7) == 7


def test_what_is_dense() -> None:
    recipe = Recipe(density=0.1, dense_below_elements=10, dense_names=("*.bias", "norm?.*"))
    dense = [("a.weight", 9), ("a.bias", 100), ("norm1.weight", 100)]
    sparse = [("a.weight", 10), ("bias", 10), ("norm.weight", 10)]
    assert all(recipe.is_dense(*one) for one in dense)
    assert not any(recipe.is_dense(*one) for one in sparse)


def test_digests_tell_recipes_apart() -> None:
    recipes = [Recipe(density=0.1), Recipe(density=0.2), Recipe(density=0.1, momentum=0.5)]
    assert len({recipe.digest for recipe in recipes}) == 3
    assert recipes[0].digest == Recipe(density=0.1).digest
    assert msgspec.convert(msgspec.to_builtins(recipes[2]), Recipe) == recipes[2]


def test_algorithms_are_those_there_are() -> None:
    assert get_args(SparseAlgorithm) == ALGORITHMS
    assert set(SPARSE_ALGORITHMS) <= set(ALGORITHMS)
