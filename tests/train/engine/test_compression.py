"""``DistributedDataParallel(model, compression=...)`` over real process groups."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from syncline.plan.plan import Plan
from syncline.plan.recipe import Recipe
from syncline.plan.run import Run
from tests.cases import first_few
from tests.train.engine import compression_jobs as jobs
from tests.train.sparse.jobs import assert_alike, assert_same_bits
from tests.workers import WorkerPool

KINDS: dict[str, tuple[jobs.Given, bool]] = {
    "int8": ("int8", True),
    "layer": ({"density": 0.05}, False),
    "overlap": ({"density": 0.05}, True),
    "message": ({"density": 0.05, "unit": "message", "wire": "bfloat16"}, False),
    "model": ({"density": 0.05, "unit": "model"}, False),
    "partly dense": ({"density": 0.05, "dense_names": ("*.bias",), "algorithm": "gtop-k"}, False),
    "bfloat16": ("bfloat16", False),
    "float16": ("float16", True),
}  # what is given, and whether an optimizer is overlapped


@pytest.mark.parametrize("kind", first_few(KINDS, 3))
def test_ranks_stay_alike_and_nothing_is_lost(workers: WorkerPool, kind: str) -> None:
    """The check of conservation is on in every sparse exchange."""
    given, overlap = KINDS[kind]
    found = workers.run(jobs.trained, 2, given, "plain", 6, overlap)
    assert_alike(found)
    assert Plan.from_json(found[0]["plan"]).is_lossy
    run = Run.from_json(found[0]["run"])
    assert run.decision == "planned"
    assert run.suggestion is None
    assert run.sent.steps > 6
    if isinstance(given, dict):
        assert run.compression == Recipe(**given)
    if isinstance(given, dict) or given == "int8":
        assert any(residual.any() for residual in found[0]["residuals"].values())
        assert run.sent.sent_bytes < run.sent.steps * run.sent.gradient_bytes / 2


@pytest.mark.parametrize("kind", first_few(["int8", "overlap", "model", "bfloat16", "float16"], 2))
def test_only_float32_is_compressed(workers: WorkerPool, kind: str) -> None:
    given, overlap = KINDS[kind]
    found = workers.run(jobs.trained, 2, given, "mixed", 6, overlap)
    assert_alike(found)
    plan = Plan.from_json(found[0]["plan"])
    for message, tensors in zip(plan.messages, plan.message_tensors(), strict=True):
        (dtype,) = {plan.tensors[t].dtype for t in tensors}
        assert (message.payload == "dense") == (dtype == "bfloat16")


@pytest.mark.parametrize(
    "kind", first_few(["overlap", "int8", "layer", "message", "model", "bfloat16"], 2)
)
def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool, kind: str) -> None:
    for expected, found in workers.run(jobs.resumed, 2, *KINDS[kind]):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "kind", first_few(["overlap", "int8", "layer", "partly dense", "float16"], 2)
)
def test_a_device_that_works_by_itself_gives_the_same_bits(workers: WorkerPool, kind: str) -> None:
    """Operations of torch, and a transport that the host need not wait for."""
    for expected, found in workers.run(jobs.as_on_a_gpu, 2, *KINDS[kind]):
        assert_as_in_a_ring(found, expected, kind)


def assert_as_in_a_ring(found: jobs.Found, ring: jobs.Found, kind: object) -> None:
    """Over Gloo, a rank does not round to 16 bits what it adds itself; elsewhere it does."""
    if kind in ("bfloat16", "float16"):
        assert_close(found, ring, rtol=0.02, atol=0.02)
    else:
        assert_same_bits(found, ring)


@pytest.mark.slow
def test_three_ranks_and_momentum(workers: WorkerPool) -> None:
    given = {"density": 0.05, "momentum": 0.9, "clip_norm": 2.0, "warmup": (0.5,)}
    assert_alike(workers.run(jobs.trained, 3, given | {"warmup_steps": 3}, "shared", 4))


@pytest.mark.parametrize(
    "option", first_few(["gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
)
def test_options_of_torch_s_class(workers: WorkerPool, option: str) -> None:
    model = "unused" if option == "find_unused_parameters" else "plain"
    found = workers.run(jobs.trained, 2, {"density": 0.1}, model, 4, False, {option: True})
    assert_alike(found)
    assert found[0]["decided"]


@pytest.mark.parametrize(
    ("given", "ahead"), [({"density": 0.02}, False), ({"density": 0.02}, True), ("int8", False)]
)
def test_residuals_join_dense_gradients(
    workers: WorkerPool, given: jobs.Given, ahead: bool
) -> None:
    """These are taken where the weights are, also if those of sparse steps are taken ahead."""
    for found in workers.run(jobs.reverted, 2, given, ahead):
        assert found["kept"]
        assert not found["left"]
        assert_close(found["found"], found["expected"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stays", [False, True])
def test_a_compressed_plan_stays_if_it_is_faster(workers: WorkerPool, stays: bool) -> None:
    for found in workers.run(jobs.decides_beside_dense_buckets, 2, not stays):
        assert found == {
            "decision": "planned" if stays else "reverted",
            "residuals are told of": not stays,
            "lossy": stays,
            "left": stays,
            "decided": (True, stays),
        }


@pytest.mark.parametrize("wire", first_few(["int8", "bfloat16", "float16"]))
def test_torch_s_hook_stays_where_it_is_the_fastest(workers: WorkerPool, wire: str) -> None:
    found = workers.run(jobs.decides_for_a_hook, 2, wire)
    hook = "bfloat16" if wire == "int8" else wire
    assert found[0]["baseline"] == f"DDP with a {hook} hook"
    assert found[0]["rounded"]
    assert_alike(found)


@pytest.mark.parametrize("unit", first_few(["layer", "int8", "model"], 2))
def test_what_no_rank_uses_in_a_step_keeps_its_residual(workers: WorkerPool, unit: str) -> None:
    """DDP would not hand it what the exchange delivers."""
    given = unit if unit == "int8" else {"density": 0.1, "unit": unit}
    for same in workers.run(jobs.left_out, 2, given):
        assert len(same) >= jobs.LEFT_OUT_STEPS
        assert all(same)


def test_no_step_is_dense_unasked(workers: WorkerPool) -> None:
    assert workers.run(jobs.resumed_without_dense_steps, 2) == [True, True]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("recipes differ", "MismatchError: compression is Recipe(density=0.2"),
        ("no recipe", "a Recipe or one of 'bfloat16', 'float16', 'int8', found 'int4'"),
        ("embedding", "UserError: module '0' makes sparse gradients"),
        ("momentum", "UserError: a recipe with momentum replaces the optimizer's"),
        ("lossy plan", "UserError: the plan has lossy messages, which must be asked for"),
        ("other payload", "UserError: the plan's messages travel as bfloat16, compression is gtop"),
        ("whole model", "UserError: a recipe with unit 'model' selects from all gradients at once"),
        ("planner of several", "message; the planner 'merge' makes several: take 'single'"),
        ("other 16 bits", "MismatchError: the state's compression is bfloat16, the wrapper"),
        ("a recipe's state", "MismatchError: the state's compression is a recipe, the wrapper"),
        ("other model's plan", "MismatchError: the plan of the state does not fit: the plan for"),
        ("several dtypes", "UserError: gradients cannot be compressed here: some parameters are"),
        ("hook", "UserError: register_comm_hook is not available"),
        ("states differ", "MismatchError: the compression's state is "),
        ("other rank's state", "MismatchError: the state is of rank 5 of 2"),
        ("late state", "UserError: load_compression_state_dict was called after training had"),
        ("ahead of nothing", "UserError: this wrapper was made without compression; give it compr"),
        ("ahead of 16 bits", "UserError: step_ahead is for sparse exchange, found compression 'bf"),
        ("late ahead", "UserError: step_ahead was called after training had begun"),
        ("late scaler", "UserError: scaled_by was called after training had begun"),
        ("checked scaler", "UserError: with a scaler, residuals of the sparse exchange could be"),
        ("nan", "UserError: the gradient of parameter 'wide.weight' on rank 1 is infinite or NaN"),
        ("late nan", "UserError: the gradient of parameter 'wide.weight' on rank 1 is infinite"),
    ],
)
def test_refusals_on_every_rank(workers: WorkerPool, case: str, said: str) -> None:
    for found in workers.run(jobs.refused, 2, case):
        assert said in found


@pytest.mark.parametrize("given", first_few([{"density": 0.05}, "bfloat16", "int8"], 2), ids=str)
def test_over_our_own_backend(workers: WorkerPool, given: jobs.Given) -> None:
    for over_gloo, ours in workers.run(jobs.over_our_backend, 2, given):
        assert_as_in_a_ring(ours, over_gloo, given)


@pytest.mark.parametrize(
    ("kind", "bad", "recipe", "several", "ahead"),
    first_few(
        [
            ("wrapper", 1, {}, 1, False),  # while the reducer makes its buckets
            ("wrapper", 26, {}, 1, False),  # in the engine
            ("wrapper", 26, {"dense_names": ("norm.*",)}, 1, False),
            ("hook", 3, {"clip_norm": 0.5}, 1, False),
            ("hook", 3, {"dense_names": ("norm.*",)}, 1, False),
            # Of the gradients of two of the optimizers none is infinite.
            ("wrapper", 9, {}, 3, False),
            ("hook", 9, {}, 3, False),
            ("wrapper", 26, {}, 2, True),
            ("hook", 3, {}, 2, True),
            ("wrapper", 26, {}, 1, True),
            ("hook", 3, {}, 1, True),
        ],
        6,
    ),
)
def test_a_step_that_a_scaler_skips_leaves_no_trace(
    workers: WorkerPool, kind: str, bad: int, recipe: dict[str, Any], several: int, ahead: bool
) -> None:
    given = kind, {"density": 0.05} | recipe, bad, several, ahead
    assert workers.run(jobs.scaled, 2, *given) == [[], []]


@pytest.mark.parametrize("bad", [1, 26])
def test_residuals_of_8_bits_follow_a_scaler(workers: WorkerPool, bad: int) -> None:
    first, second = workers.run(jobs.scaled_in_8_bits, 2, 30, bad)
    assert first["scales"] == second["scales"]
    assert first["scales"][bad + 1] < first["scales"][bad]  # the step was skipped
    assert first["scale"] == second["scale"] == first["scales"][-1] != 1024
    assert_alike([first, second])
    assert 0 < first["largest"] < 0.1


@pytest.mark.parametrize("overlap", first_few(["after", None, "before"]))
def test_the_wrapper_steps_ahead_as_the_hook_does(workers: WorkerPool, overlap: str | None) -> None:
    """Also where updates were to be deferred: the weights are put back before each, so none is."""
    expected = workers.run(jobs.stepped_ahead, 2, "hook")
    found = workers.run(jobs.stepped_ahead, 2, "wrapper", overlap)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
