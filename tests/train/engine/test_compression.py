"""``DistributedDataParallel(model, compression=...)`` over real process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.plan.plan import Plan
from syncline.plan.recipe import Recipe
from syncline.plan.run import Run
from tests.cases import first_few
from tests.train.engine import compression_jobs as jobs
from tests.workers import WorkerPool

UNCHECKED = {"wrapper": {"check": False}}
KINDS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "int8": ("int8", UNCHECKED | {"overlap": True}),
    "layer": ({"density": 0.05}, UNCHECKED),
    "overlap": ({"density": 0.05}, UNCHECKED | {"overlap": True}),
    "message": ({"density": 0.05, "unit": "message", "wire": "bfloat16"}, UNCHECKED),
    "model": ({"density": 0.05, "unit": "model"}, UNCHECKED),
    "partly dense": (
        {"density": 0.05, "dense_names": ("*.bias",), "algorithm": "gtop-k"},
        UNCHECKED,
    ),
    "bfloat16": ("bfloat16", UNCHECKED),
    "float16": ("float16", UNCHECKED | {"overlap": True}),
}


@pytest.mark.parametrize("kind", first_few(KINDS, 3))
def test_ranks_stay_alike_and_nothing_is_lost(workers: WorkerPool, kind: str) -> None:
    """The check of conservation is on in every sparse exchange."""
    given, options = KINDS[kind]
    found = workers.run(jobs.trained, 2, given, "plain", options, 6)
    for name, values in found[0]["parameters"].items():
        np.testing.assert_array_equal(values, found[1]["parameters"][name])
    assert found[0]["finite"]
    plan = Plan.from_json(found[0]["plan"])
    assert plan.is_lossy
    run = Run.from_json(found[0]["run"])
    assert run.decision == "planned"
    assert run.suggestion is None
    assert run.sent is not None
    assert run.sent.steps > 6
    if isinstance(given, dict):
        assert run.compression == Recipe(**given)
    if isinstance(given, dict) or given == "int8":
        assert any(residual.any() for residual in found[0]["residuals"].values())
        assert run.sent.sent_bytes < run.sent.steps * run.sent.gradient_bytes / 2


@pytest.mark.parametrize(
    "kind", first_few(["overlap", "int8", "layer", "message", "model", "bfloat16"], 2)
)
def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool, kind: str) -> None:
    given, options = KINDS[kind]
    overlap = bool(options.get("overlap"))
    assert workers.run(jobs.resumed, 2, given, overlap) == [[], []]


@pytest.mark.parametrize(
    "kind", first_few(["overlap", "int8", "layer", "partly dense", "float16"], 2)
)
def test_a_device_that_works_by_itself_gives_the_same_bits(workers: WorkerPool, kind: str) -> None:
    """Operations of torch, and a transport that the host need not wait for."""
    given, options = KINDS[kind]
    overlap = bool(options.get("overlap"))
    assert workers.run(jobs.as_on_a_gpu, 2, given, overlap) == [[], []]


@pytest.mark.slow
def test_three_ranks_and_momentum(workers: WorkerPool) -> None:
    given = {
        "density": 0.05,
        "momentum": 0.9,
        "clip_norm": 2.0,
        "warmup": (0.5,),
        "warmup_steps": 3,
    }
    found = workers.run(jobs.trained, 3, given, "shared", UNCHECKED, 4)
    for other in found[1:]:
        for name, values in found[0]["parameters"].items():
            np.testing.assert_array_equal(values, other["parameters"][name])
    assert found[0]["finite"]


@pytest.mark.parametrize(
    "arguments",
    [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def test_options_of_torch_s_class(workers: WorkerPool, arguments: dict[str, Any]) -> None:
    model = "unused" if "find_unused_parameters" in arguments else "plain"
    options = {"wrapper": {"check": False, **arguments}}
    found = workers.run(jobs.trained, 2, {"density": 0.1}, model, options, 4)
    for name, values in found[0]["parameters"].items():
        np.testing.assert_array_equal(values, found[1]["parameters"][name])
    assert found[0]["state"]["decided"]


@pytest.mark.parametrize(
    ("given", "ahead"), [({"density": 0.02}, False), ({"density": 0.02}, True), ("int8", False)]
)
def test_residuals_go_out_with_the_next_dense_gradients(
    workers: WorkerPool, given: str | dict[str, Any], ahead: bool
) -> None:
    """These are taken where the weights are, also if those of sparse steps are taken ahead."""
    for found in workers.run(jobs.reverted, 2, given, ahead):
        assert found["kept"] > 0
        assert found["left"] == 0
        assert found["worst"] < 1e-5


def test_dense_buckets_that_are_faster_return(workers: WorkerPool) -> None:
    for found in workers.run(jobs.decides, 2, {"density": 0.05}, True):
        assert found["decision"] == "reverted"
        assert "the residuals are sent with later gradients" in found["reason"]
        assert not found["lossy"]
        assert not found["left"]
        assert found["decided"] == (True, False)


def test_a_compressed_plan_that_is_faster_stays(workers: WorkerPool) -> None:
    for found in workers.run(jobs.decides, 2, {"density": 0.05}, False):
        assert found["decision"] == "planned"
        assert found["lossy"]
        assert found["left"]
        assert found["decided"] == (True, True)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_torch_s_hook_stays_where_it_is_the_fastest(workers: WorkerPool, wire: str) -> None:
    first, second = workers.run(jobs.hooked, 2, wire)
    hook = "bfloat16" if wire == "int8" else wire
    assert first["baseline"] == f"DDP with a {hook} hook"
    assert first["rounded"]
    for name, values in first["parameters"].items():
        np.testing.assert_array_equal(values, second["parameters"][name])


@pytest.mark.parametrize("unit", ["layer", "model", "int8"])
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
        (
            "no recipe",
            "UserError: compression is a Recipe or one of 'bfloat16', 'float16', 'int8', found "
            "'int4'",
        ),
        ("half", "is torch.float16 on cpu; sparse exchange needs torch.float32"),
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
        ("ahead of another model", "UserError: step_ahead: the optimizer updates no parameter"),
        ("late ahead", "UserError: step_ahead was called after training had begun"),
        ("late scaler", "UserError: scaled_by was called after training had begun"),
        ("checked scaler", "UserError: with a scaler, residuals of the sparse exchange could be"),
        ("nan", "UserError: the gradient of parameter 'wide.weight' on rank 1 is infinite or NaN"),
        ("late nan", "UserError: the gradient of parameter 'wide.weight' on rank 1 is infinite"),
    ],
)
def test_what_cannot_be_used_is_said_on_every_rank(
    workers: WorkerPool, case: str, said: str
) -> None:
    for found in workers.run(jobs.refused, 2, case):
        assert said in found


@pytest.mark.parametrize("given", first_few([{"density": 0.05}, "bfloat16", "int8"], 2), ids=str)
def test_over_our_own_backend(workers: WorkerPool, given: Any) -> None:
    assert workers.run(jobs.over_our_backend, 2, given) == [[], []]


@pytest.mark.parametrize(
    ("kind", "recipe", "bad"),
    [
        ("wrapper", {"density": 0.05}, 1),  # while the reducer makes its buckets
        ("wrapper", {"density": 0.05}, 26),  # in the engine
        ("wrapper", {"density": 0.05, "dense_names": ("norm.*",)}, 26),
        ("hook", {"density": 0.05, "clip_norm": 0.5}, 3),
        ("hook", {"density": 0.05, "dense_names": ("norm.*",)}, 3),
    ],
)
def test_a_step_that_a_scaler_skips_leaves_no_trace(
    workers: WorkerPool, kind: str, recipe: dict[str, Any], bad: int
) -> None:
    assert workers.run(jobs.scaled, 2, kind, recipe, bad) == [[], []]


@pytest.mark.parametrize("bad", [1, 26])
def test_residuals_of_8_bits_follow_a_scaler(workers: WorkerPool, bad: int) -> None:
    first, second = workers.run(jobs.scaled_in_8_bits, 2, 30, bad)
    assert first["scales"] == second["scales"]
    assert first["scales"][bad + 1] < first["scales"][bad]  # the step was skipped
    assert first["scale"] == second["scale"] == first["scales"][-1] != 1024
    for name, values in first["parameters"].items():
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values, second["parameters"][name])
    assert 0 < first["largest"] < 0.1


@pytest.mark.parametrize(("kind", "bad"), [("hook", 3), ("wrapper", 26)])
@pytest.mark.parametrize("several", first_few([2, 1]))
def test_a_skipped_step_leaves_no_trace_ahead_either(
    workers: WorkerPool, kind: str, bad: int, several: int
) -> None:
    assert workers.run(jobs.scaled, 2, kind, {"density": 0.05}, bad, several, True) == [[], []]


@pytest.mark.parametrize("overlap", first_few(["after", None, "before"]))
def test_the_wrapper_steps_ahead_as_the_hook_does(workers: WorkerPool, overlap: str | None) -> None:
    """Also where updates were to be deferred: the weights are put back before each, so none is."""
    recipe = {"density": 0.05}
    options = {"overlap": overlap, "steps": 30, "wrapper": {"check": False}}
    expected = workers.run(jobs.stepped_ahead, 2, recipe, options, True)
    found = workers.run(jobs.stepped_ahead, 2, recipe, options, False)
    for rank in (0, 1):
        assert found[rank]["defers"] is False
        for kept in ("parameters", "residuals"):
            for name, values in expected[rank][kept].items():
                np.testing.assert_allclose(found[rank][kept][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["hook", "wrapper"])
def test_all_of_several_optimizers_skip_a_step(workers: WorkerPool, kind: str) -> None:
    """Also those of whose gradients none is infinite; all residuals are those of before."""
    assert workers.run(jobs.scaled, 2, kind, {"density": 0.05}, 9, 3) == [[], []]
