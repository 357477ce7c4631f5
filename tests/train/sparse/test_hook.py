"""The hook in torch's own DistributedDataParallel, over real process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import first_few
from tests.train.sparse import jobs
from tests.workers import WorkerPool

RECIPES: dict[str, dict[str, Any]] = {
    "layer": {"density": 0.05},
    "message": {"density": 0.05, "unit": "message", "wire": "bfloat16"},
    "model": {"density": 0.02, "unit": "model", "wire": "float16"},
    "top-k": {"density": 0.05, "algorithm": "top-k"},
    "tree": {"density": 0.05, "algorithm": "gtop-k"},
    "naive": {"density": 0.05, "algorithm": "gtop-k-naive"},
    "warm-up": {"density": 0.01, "warmup": (0.5, 0.1), "warmup_steps": 2},
    "momentum": {"density": 0.05, "momentum": 0.9, "clip_norm": 1.0},
    "factor masking": {"density": 0.05, "momentum": 0.9, "factor_masking": True, "unit": "model"},
    "partly dense": {"density": 0.05, "dense_names": ("*.bias",), "dense_below_elements": 40},
    "all dense": {"density": 0.05, "dense_names": ("*",)},
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@each_recipe
@pytest.mark.parametrize("ranks", first_few([3, 2]))
def test_ranks_stay_alike_and_nothing_is_lost(
    workers: WorkerPool, ranks: int, recipe: dict[str, Any]
) -> None:
    """The check of conservation is on in every step."""
    found = workers.run(jobs.hooked, ranks, recipe, 6)
    for _, parameters, _ in found[1:]:
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, found[0][1][name])
    waiting = [any(residual.any() for residual in r.values()) for _, _, r in found]
    assert any(waiting) != (recipe.get("dense_names") == ("*",))


@each_recipe
def test_operations_of_torch_give_the_same_bits(
    workers: WorkerPool, recipe: dict[str, Any]
) -> None:
    """What a GPU does, on the CPU; the check of conservation is on in every step."""
    assert workers.run(jobs.by_torch, 2, recipe) == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"no GPU here (torch {torch.__version__}): nothing is run on CUDA",
)
@each_recipe
def test_gradients_on_a_gpu(workers: WorkerPool, recipe: dict[str, Any]) -> None:
    """Ranks may share one GPU: what is exchanged passes through the host."""
    found = workers.run(jobs.on_a_gpu, 2, recipe)
    expected = workers.run(jobs.hooked, 2, recipe, 6)
    for rank, (losses, _, _) in enumerate(expected):
        np.testing.assert_allclose(found[rank]["losses"], losses, rtol=0.05)
        for name, values in found[rank]["parameters"].items():
            np.testing.assert_array_equal(values, found[0]["parameters"][name])


def test_four_ranks(workers: WorkerPool) -> None:
    found = workers.run(jobs.hooked, 4, {"density": 0.05}, 4)
    assert all(np.array_equal(f[1]["3.weight"], found[0][1]["3.weight"]) for f in found)


@pytest.mark.parametrize("unit", ["layer", "model"])
def test_density_one_is_plain_averaging(workers: WorkerPool, unit: str) -> None:
    sparse = workers.run(jobs.hooked, 3, {"density": 1.0, "unit": unit}, 5)
    dense = workers.run(jobs.unhooked, 3, 5)
    for (losses, parameters, residuals), (expected, others) in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, values in parameters.items():
            np.testing.assert_allclose(values, others[name], rtol=1e-4, atol=1e-6)
        assert not any(residual.any() for residual in residuals.values())


def test_momentum_of_everything_is_the_optimizer_s(workers: WorkerPool) -> None:
    sparse = workers.run(jobs.hooked, 3, {"density": 1.0, "momentum": 0.9}, 5)
    dense = workers.run(jobs.unhooked, 3, 5, 0.9)
    for (losses, parameters, _), (expected, others) in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, values in parameters.items():
            np.testing.assert_allclose(values, others[name], rtol=1e-4, atol=1e-6)


def test_factor_masking_clears_what_was_delivered_only(workers: WorkerPool) -> None:
    recipe = RECIPES["factor masking"]
    found = workers.run(jobs.velocities_and_changes, 4, recipe)
    changed = found[0][1]
    assert changed.any()
    for cleared, _ in found:
        # What was sent and dropped goes on.
        assert not (cleared & ~changed).any()
    assert np.array_equal(np.any([cleared for cleared, _ in found], axis=0), changed)


def test_velocities_go_on_without_factor_masking(workers: WorkerPool) -> None:
    recipe = RECIPES["factor masking"] | {"factor_masking": False}
    for cleared, changed in workers.run(jobs.velocities_and_changes, 2, recipe):
        assert changed.any()
        assert not cleared.any()


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 25},
    ],
    ids=str,
)
def test_options_of_torch_s_class(workers: WorkerPool, options: dict[str, Any]) -> None:
    for losses, _, _ in workers.run(jobs.hooked, 2, {"density": 0.1}, 3, options):
        assert np.isfinite(losses).all()


@pytest.mark.parametrize("name", ["layer", "model", "momentum", "warm-up"])
def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool, name: str) -> None:
    assert workers.run(jobs.resumed, 2, RECIPES[name]) == [True, True]


def test_other_numbers_of_ranks_keep_the_sum(workers: WorkerPool) -> None:
    for differences in workers.run(jobs.resharded_sums, 3, {"density": 0.05}):
        assert max(differences) < 1e-6


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("recipe", "MismatchError: rank 1 differs from rank 0 in its recipe: "),
        ("other model", "MismatchError: rank 1 differs from rank 0 in its parameters: "),
        ("steps", "give all ranks the same recipe and the same number of steps"),
        ("sparse", "UserError: module '0' makes sparse gradients"),
        ("half", "0.weight' is torch.float16 on cpu; sparse exchange needs torch.float32"),
        ("frozen", "UserError: the model has no parameters that require gradients"),
        ("nan", "UserError: the gradient of parameter '3.weight' on rank 1 is infinite or NaN"),
        ("checkpoint recipe", "made with another recipe: density was 0.5 and is 0.01"),
        ("checkpoint rank", "the state is of rank 7 of 2, this is rank "),
        ("checkpoint version", "expected version 1 of a state of gtopk, found 0"),
        (
            "checkpoint model",
            "residuals of a checkpoint are of another model or recipe: '0.weight'",
        ),
    ],
)
def test_what_cannot_be_used_is_said_on_every_rank(
    workers: WorkerPool, case: str, said: str
) -> None:
    for found in workers.run(jobs.refusals, 2, case):
        assert said in found


@pytest.mark.parametrize("norm", [2.0, 20.0])
def test_averages_of_independent_gradients_are_clipped_to_the_norm(
    workers: WorkerPool, norm: float
) -> None:
    for found in workers.run(jobs.clipped, 4, norm):
        # Unclipped, four gradients of norm 10 at right angles have an average of norm 5.
        assert np.linalg.norm(found) == pytest.approx(min(norm, 5.0))


def test_accumulated_gradients_are_exchanged_once(workers: WorkerPool) -> None:
    """What two backward passes add up is what a single one of both batches gives."""
    for twice, once in workers.run(jobs.accumulated, 2):
        np.testing.assert_allclose(twice, once, rtol=1e-4, atol=1e-6)


def test_ranks_with_less_to_train_on_join_the_others(workers: WorkerPool) -> None:
    """What a rank that has joined still keeps waits; the check of conservation is on."""
    for steps, residual, apart in workers.run(jobs.joined_early, 2):
        assert steps == 5
        assert residual.any()
        assert apart == 0


def test_channels_last_gradients(workers: WorkerPool) -> None:
    for found, expected in workers.run(jobs.channels_last, 2):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_lost_peer_is_told_from_backward(workers: WorkerPool) -> None:
    first, last = workers.run(jobs.lost_peer, 2)
    assert "PeerError: rank 0 lost a peer" in first
    assert last == "absent"


def test_nothing_is_left_of_a_state_that_is_dropped(workers: WorkerPool) -> None:
    assert workers.run(jobs.freed, 2) == [(True, True), (True, True)]


def test_a_state_that_is_made_before_the_model(workers: WorkerPool) -> None:
    for first, later, refused in workers.run(jobs.made_before_the_model, 2, 6):
        assert first
        assert later
        assert "made without a model" in refused
