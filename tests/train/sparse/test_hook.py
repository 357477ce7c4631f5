"""The hook in torch's own DistributedDataParallel, over real process groups."""

from __future__ import annotations

import numpy as np
import pytest
from torch.testing import assert_close

from tests.cases import first_few
from tests.train.sparse import jobs
from tests.train.sparse.jobs import Found, assert_alike, assert_same_bits
from tests.train.sparse.test_torch_memory import needs_a_gpu
from tests.workers import WorkerPool

RECIPES: dict[str, Found] = {
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
def test_ranks_stay_alike(workers: WorkerPool, ranks: int, recipe: Found) -> None:
    """The check of conservation is on in every step."""
    found = workers.run(jobs.hooked, ranks, recipe, 6)
    assert_alike(found)
    waiting = [residual.any() for each in found for residual in each["residuals"].values()]
    assert any(waiting) != (recipe.get("dense_names") == ("*",))


@each_recipe
def test_operations_of_torch_give_the_same_bits(workers: WorkerPool, recipe: Found) -> None:
    """What a GPU does, on the CPU; the check of conservation is on in every step."""
    for native, found in workers.run(jobs.by_torch, 2, recipe):
        assert_same_bits(found, native)


@pytest.mark.gpu
@needs_a_gpu
@each_recipe
def test_gradients_on_a_gpu(workers: WorkerPool, recipe: Found) -> None:
    """Ranks may share one GPU: what is exchanged passes through the host."""
    found = workers.run(jobs.on_a_gpu, 2, recipe)
    expected = workers.run(jobs.hooked, 2, recipe, 6)
    for rank, each in enumerate(expected):
        assert_close(found[rank]["losses"], each["losses"], rtol=0.05, atol=0)
    assert_alike(found)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ({}, {}),
        ({"unit": "model"}, {}),
        ({"momentum": 0.9}, {}),  # which is then the optimizer's
        ({}, {"accumulate": 2}),
        ({"dense_names": ("1.bias",)}, {"channels_last": True, "gradient_as_bucket_view": True}),
    ],
    ids=str,
)
def test_density_one_is_plain_averaging(workers: WorkerPool, recipe: Found, options: Found) -> None:
    sparse = workers.run(jobs.hooked, 3, {"density": 1.0} | recipe, 5, options)
    known = recipe.get("momentum", 0.0), "channels_last" in options, options.get("accumulate", 1)
    dense = workers.run(jobs.unhooked, 3, 5, *known)
    for found, expected in zip(sparse, dense, strict=True):
        assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
        assert_close(found["parameters"], expected["parameters"], rtol=1e-4, atol=1e-6)
        assert not any(residual.any() for residual in found["residuals"].values())


@pytest.mark.parametrize("masks", [True, False])
def test_factor_masking_clears_what_was_delivered_only(workers: WorkerPool, masks: bool) -> None:
    """What was sent and dropped goes on."""
    recipe = RECIPES["factor masking"] | {"factor_masking": masks}
    found = workers.run(jobs.velocities_and_changes, 4, recipe)
    changed = found[0][1]
    assert changed.any()
    assert np.array_equal(np.any([cleared for cleared, _ in found], axis=0), changed & masks)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 25},
    ],
    ids=str,
)
def test_options_of_torch_s_class(workers: WorkerPool, options: Found) -> None:
    for found in workers.run(jobs.hooked, 2, {"density": 0.1}, 3, options):
        assert np.isfinite(found["losses"]).all()


@pytest.mark.parametrize("name", ["layer", "model", "momentum", "warm-up"])
def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool, name: str) -> None:
    for whole, found in workers.run(jobs.resumed, 2, RECIPES[name]):
        assert_same_bits(found, whole)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("recipe", "MismatchError: rank 1 differs from rank 0 in its recipe: "),
        ("other model", "MismatchError: rank 1 differs from rank 0 in its parameters: "),
        ("steps", "give all ranks the same recipe and the same number of steps"),
        ("half", "0.weight' is torch.float16 on cpu; sparse exchange needs torch.float32"),
        ("nan", "UserError: the gradient of parameter '3.weight' on rank 1 is infinite or NaN"),
        ("checkpoint recipe", "made with another recipe: density was 0.5 and is 0.01"),
        ("checkpoint version", "expected version 1 of a state of gtopk, found 0"),
        ("no model", "made without a model"),
    ],
)
def test_refusals_on_every_rank(workers: WorkerPool, case: str, said: str) -> None:
    for found in workers.run(jobs.refusals, 2, case):
        assert said in found


@pytest.mark.parametrize("norm", [2.0, 20.0])
def test_averages_are_clipped_to_the_norm(workers: WorkerPool, norm: float) -> None:
    # Unclipped, four gradients of norm 10 at right angles have an average of norm 5.
    assert workers.run(jobs.clipped, 4, norm) == [pytest.approx(min(norm, 5.0))] * 4


def test_ranks_with_less_to_train_on_join_the_others(workers: WorkerPool) -> None:
    """What a rank that has joined still keeps waits; the check of conservation is on."""
    for steps, residual, apart in workers.run(jobs.joined_early, 2):
        assert steps == 5
        assert residual.any()
        assert apart == 0


def test_a_lost_peer_is_told_from_backward(workers: WorkerPool) -> None:
    first, last = workers.run(jobs.lost_peer, 2)
    assert "PeerError: rank 0 lost a peer" in first
    assert last == "absent"


def test_nothing_is_left_of_a_state_that_is_dropped(workers: WorkerPool) -> None:
    assert workers.run(jobs.freed, 2) == [(True, True), (True, True)]


def test_a_state_that_is_made_before_the_model(workers: WorkerPool) -> None:
    assert workers.run(jobs.made_before_the_model, 2, 6) == [True, True]
