"""What is compared, and what is kept of earlier results."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.convergence import prepared, without_what_the_recipe_does
from benchmarks.convergence_cases import CASES, config_of, recipe_of, training_of
from benchmarks.convergence_report import AHEAD, DENSE, Curves, final, within
from torch import nn
from torch.optim import SGD

from syncline.lab.training.task import task_of
from syncline.plan.recipe import Recipe


def accuracies(*values: float) -> list[dict[str, float]]:
    return [{"training loss": 1.0, "test accuracy": value} for value in values]


def test_accuracy_is_of_the_last_epochs_and_perplexity_of_the_last() -> None:
    curves: Curves = {"0": accuracies(0.1, 0.9, 0.5, 0.8), "1": accuracies(1.0)}
    assert final(curves) == {"0": 0.8, "1": 1.0}
    assert final({"2": [{"validation perplexity": v} for v in (9.0, 3.0, 4.0)]}) == {"2": 4.0}


def test_within_looks_at_the_worse_side_only() -> None:
    assert within([0.9, 0.95], [0.8, 0.9, 0.99], higher_is_better=True)
    assert not within([0.9, 0.95], [0.89], higher_is_better=True)
    assert within([3.0, 4.0], [2.0, 4.0, 9.0], higher_is_better=False)
    assert not within([3.0, 4.0], [4.1], higher_is_better=False)


def test_results_of_another_case_are_thrown_away() -> None:
    empty: dict[str, Any] = {"cases": {}, "models": {}}
    record = prepared(empty)
    record["models"]["resnet20"][DENSE]["0"] = accuracies(0.5)
    record["models"]["resnet20"]["0.5"] = {"0": accuracies(0.5)}
    again = prepared(record)["models"]["resnet20"]
    assert again[DENSE]["0"] == accuracies(0.5)
    # A density that is no longer asked for goes.
    case = CASES["resnet20"]
    ahead = {f"{density:g}{AHEAD}" for density in case.ahead}
    assert set(again) == {DENSE, *(f"{density:g}" for density in case.densities), *ahead}
    record["cases"]["resnet20"]["hyper"]["epochs"] += 1
    assert not any(prepared(record)["models"]["resnet20"].values())


@pytest.mark.parametrize("model", CASES)
def test_a_model_has_the_size_of_its_case(model: str) -> None:
    built = training_of(model, config_of(model, 0)).build()
    usual = task_of(config_of(model, 0)).build()
    elements = [sum(p.numel() for p in each.parameters()) for each in (built, usual)]
    assert (elements[0] == elements[1]) == (not CASES[model].size)


def test_the_optimizer_keeps_momentum_for_what_is_exchanged_whole() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3))
    usual = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    recipe = Recipe(density=0.1, momentum=0.9, dense_below_elements=50)
    sparse, whole = without_what_the_recipe_does(usual, model, recipe).param_groups
    assert [p.numel() for p in sparse["params"]] == [100]
    assert [p.numel() for p in whole["params"]] == [10, 30, 3]
    assert (sparse["momentum"], whole["momentum"]) == (0.0, 0.9)
    assert sparse["weight_decay"] == pytest.approx(0.1)
    assert whole["weight_decay"] == 0.01
    assert without_what_the_recipe_does(usual, model, Recipe(density=0.1)) is usual


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_the_warm_up_never_sends_less_than_the_density(density: float) -> None:
    recipe = recipe_of("resnet20", config_of("resnet20", 0), 10, density)
    assert list(recipe.warmup) == sorted(recipe.warmup, reverse=True)
    assert min(recipe.warmup) > density


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_texts_are_cut(model: str) -> None:
    cut = CASES[model].cut
    assert cut is not None
    task = training_of(model, config_of(model, 0))
    tokens = 4 * CASES[model].hyper["batch_size"] * cut.window  # type: ignore[operator]
    assert cut.tokens / tokens - 2 < task.steps_per_epoch <= cut.tokens / tokens
