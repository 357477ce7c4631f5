"""Ranks that were given different things say so, all of them, before they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError, SynclineError
from syncline.plan.network import Network
from syncline.train.ddp import DistributedDataParallel
from syncline.train.measure.exchange import require_same
from tests.train.jobs import plain_plan
from tests.train.models import Plain
from tests.workers import WorkerPool


def answer(of: Callable[[], Any]) -> list[str]:
    """Return the class and the text of the error, and see that the ranks still agree on it."""
    try:
        of()
    except SynclineError as error:
        told = [type(error).__name__, str(error)]
    else:
        told = ["", ""]
    dist.barrier()  # nobody is left in a collective of the constructor
    return told


# ------------------------------------------------------------------ the model


class Layers(nn.Module):
    """A model that can be built in several ways."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            self.add_module(f"layer{number}", nn.Linear(4, size, dtype=dtype))


def swapped() -> nn.Module:
    module = Layers(3, 5)
    first, second = module.layer0, module.layer1
    del module.layer0, module.layer1
    module.layer1, module.layer0 = second, first
    return module


def frozen() -> nn.Module:
    module = Layers(3, 5)
    module.layer1.bias.requires_grad_(False)  # type: ignore[union-attr]
    return module


def entirely_frozen() -> nn.Module:
    return Layers(3, 5).requires_grad_(False)


def with_buffer() -> nn.Module:
    module = Layers(3, 5)
    module.register_buffer("mean", torch.zeros(2))
    return module


def ignoring() -> nn.Module:
    """Return a model with a parameter of its own on every rank, which nobody exchanges."""
    module = Layers(3, 5)
    module.layer0.own = nn.Parameter(torch.zeros(1 + dist.get_rank()))  # type: ignore[union-attr]
    module._ddp_params_and_buffers_to_ignore = ["layer0.own"]  # type: ignore[assignment]
    return module


BUILT: dict[str, Callable[[], nn.Module]] = {
    "usual": lambda: Layers(3, 5),
    "shape": lambda: Layers(3, 6),
    "more": lambda: Layers(3, 5, 2),
    "fewer": lambda: Layers(3),
    "dtype": lambda: Layers(3, 5, dtype=torch.float64),
    "order": swapped,
    "frozen": frozen,
    "entirely frozen": entirely_frozen,
    "buffer": with_buffer,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3)),
    "ignoring": ignoring,
}


def build(kinds: list[str]) -> list[str]:
    module = BUILT[kinds[dist.get_rank()]]()
    return answer(lambda: DistributedDataParallel(module))


ADVICE = "; build the same model with the same arguments on every rank"


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (
            "shape",
            "parameter 2 is 'layer1.weight' of shape (6, 4), float32 on rank 1 and "
            "'layer1.weight' of shape (5, 4), float32 on rank 0",
        ),
        (
            "more",
            "parameter 4 is 'layer2.weight' of shape (2, 4), float32 on rank 1 and missing on rank "
            "0",
        ),
        (
            "fewer",
            "parameter 2 is missing on rank 1 and 'layer1.weight' of shape (5, 4), float32 on rank "
            "0",
        ),
        (
            "dtype",
            "parameter 0 is 'layer0.weight' of shape (3, 4), float64 on rank 1 and "
            "'layer0.weight' of shape (3, 4), float32 on rank 0",
        ),
        (
            "order",
            "parameter 0 is 'layer1.weight' of shape (5, 4), float32 on rank 1 and "
            "'layer0.weight' of shape (3, 4), float32 on rank 0",
        ),
        (
            "frozen",
            "parameter 3 is 'layer1.bias' of shape (5,), float32, no gradient on rank 1 and "
            "'layer1.bias' of shape (5,), float32 on rank 0",
        ),
        (
            "entirely frozen",
            "parameter 0 is 'layer0.weight' of shape (3, 4), float32, no gradient on rank 1 and "
            "'layer0.weight' of shape (3, 4), float32 on rank 0",
        ),
        ("buffer", "buffer 0 is 'mean' of shape (2,), float32 on rank 1 and missing on rank 0"),
        (
            "lazy",
            "parameter 0 is '0.weight' of no shape yet, float32 on rank 1 and 'layer0.weight' of "
            "shape (3, 4), float32 on rank 0",
        ),
    ],
)
def test_another_model(workers: WorkerPool, kind: str, difference: str) -> None:
    expected = ["MismatchError", difference + ADVICE]
    assert workers.run(build, 2, ["usual", kind]) == [expected, expected]


def test_the_rank_that_differs_from_most_is_named(workers: WorkerPool) -> None:
    answers = workers.run(build, 3, ["shape", "usual", "usual"])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][1].startswith(
        "parameter 2 is 'layer1.weight' of shape (6, 4), float32 on rank 0 and 'layer1.weight' of "
        "shape (5, 4), float32 on rank 1;"
    )


def test_several_ranks_differ(workers: WorkerPool) -> None:
    answers = workers.run(build, 3, ["usual", "more", "fewer"])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == "MismatchError"
    assert "missing on rank 0; ranks 2 differ too;" in answers[0][1]


@pytest.mark.parametrize("kind", ["usual", "ignoring"])
def test_equal_models(workers: WorkerPool, kind: str) -> None:
    assert workers.run(build, 2, [kind] * 2) == [["", ""]] * 2


# ------------------------------------------------------------------ arguments


PLAN = plain_plan()
ARGUMENTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "planner": {"planner": "merge"},
    "no planner": {"planner": "mergge"},
    "buckets of ddp": {"planner": "ddp:bucket_bytes=1000"},
    "plan": {"plan": PLAN},
    "another plan": {"plan": msgspec.structs.replace(PLAN, in_flight=2)},
    "no check": {"check": False},
    "two of them": {"plan": PLAN, "network": Network.line(workers=2, a_s=0, b_s_per_byte=0)},
    "unused": {"find_unused_parameters": True},
}


def give(kinds: list[str]) -> list[str]:
    arguments = ARGUMENTS[kinds[dist.get_rank()]]
    return answer(lambda: DistributedDataParallel(Plain(), **arguments))


@pytest.mark.parametrize(
    ("kinds", "difference"),
    [
        (("usual", "planner"), "planner is 'merge' on rank 1 and 'auto' on rank 0"),
        (("usual", "no check"), "check is False on rank 1 and True on rank 0"),
        (
            ("usual", "unused"),
            "find_unused_parameters is True on rank 1 and missing on rank 0",
        ),
    ],
)
def test_other_arguments(workers: WorkerPool, kinds: tuple[str, str], difference: str) -> None:
    expected = ["MismatchError", difference + ADVICE]
    assert workers.run(give, 2, kinds) == [expected, expected]


def test_another_plan(workers: WorkerPool) -> None:
    answers = workers.run(give, 2, ["plan", "another plan"])
    assert answers[0] == answers[1]
    assert answers[0][0] == "MismatchError"
    assert answers[0][1].startswith("plan is a plan with the SHA-256 ")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no planner", "unknown planner 'mergge'"),
        ("buckets of ddp", "from the wrapper: give bucket_cap_mb"),
        ("two of them", "a plan was given"),
    ],
)
def test_refused_arguments_of_one_rank_reach_all(
    workers: WorkerPool, kind: str, reason: str
) -> None:
    fine, refused = workers.run(give, 2, ["usual", kind])
    assert refused[0] == "UserError"
    assert reason in refused[1]
    assert fine[0] == "MismatchError"
    assert fine[1] == (
        f"arguments is refused: {refused[1]} on rank 1 and accepted on rank 0" + ADVICE
    )


def test_refused_arguments_of_all_ranks(workers: WorkerPool) -> None:
    answers = workers.run(give, 2, ["no planner"] * 2)
    assert [kind for kind, _ in answers] == ["UserError"] * 2


# ------------------------------------------------------------------ overlap


def overlap(kinds: list[str]) -> list[str]:
    model = DistributedDataParallel(Plain(), plan=PLAN, check=False)
    parameters = list(model.parameters())
    for kind in kinds[dist.get_rank()].split():
        model.overlap(
            {
                "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
                "part": lambda: torch.optim.SGD(parameters[:2], lr=0.1),
                "adam": lambda: torch.optim.Adam(parameters),
            }[kind]()
        )
    return answer(lambda: model(torch.zeros(2, 1, 8, 8)).sum().backward())


OVERLAP_ADVICE = "; call overlap on every rank, with the same optimizers"


@pytest.mark.parametrize(
    ("kinds", "difference"),
    [
        (
            ("sgd", ""),
            "call 1 of overlap is missing on rank 1 and for SGD with 8 parameters, deferred on "
            "rank 0",
        ),
        (
            ("sgd", "adam"),
            "call 1 of overlap is for Adam with 8 parameters, deferred on rank 1 and for SGD with "
            "8 parameters, deferred on rank 0",
        ),
        (
            ("part", "part adam"),
            "call 2 of overlap is for Adam with 8 parameters, deferred on rank 1 and missing on "
            "rank 0",
        ),
    ],
)
def test_other_optimizers(workers: WorkerPool, kinds: tuple[str, str], difference: str) -> None:
    expected = ["MismatchError", difference + OVERLAP_ADVICE]
    assert workers.run(overlap, 2, kinds) == [expected, expected]


def test_equal_optimizers(workers: WorkerPool) -> None:
    assert workers.run(overlap, 2, ["sgd"] * 2) == [["", ""]] * 2


def refuses() -> list[list[str]]:
    """Return how overlap refuses what it cannot take, on every rank alike."""
    model = DistributedDataParallel(Plain(), plan=PLAN, check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))], lr=0.1)
    told = [answer(lambda: model.overlap(other)), answer(lambda: model.overlap(model))]
    model.overlap(optimizer)
    told.append(answer(lambda: model.overlap(optimizer)))
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    told.append(answer(lambda: model.overlap(later)))
    return told


def test_refused_optimizers(workers: WorkerPool) -> None:
    foreign, no_optimizer, twice, late = workers.run(refuses, 2)[0]
    assert foreign[0] == no_optimizer[0] == twice[0] == late[0] == "UserError"
    assert "holds no parameter of this model" in foreign[1]
    assert "expected a torch.optim.Optimizer" in no_optimizer[1]
    assert "overlap was called twice for this optimizer" in twice[1]
    assert "overlap was called after training had begun" in late[1]


# ------------------------------------------------------------------ the comparison itself


def compare(values: list[str]) -> list[str]:
    items = {"color": values[dist.get_rank()]}
    return answer(
        lambda: require_same(items, dist.group.WORLD, torch.device("cpu"), advice="paint")
    )


def test_in_a_tie_the_lowest_rank_is_right(workers: WorkerPool) -> None:
    answers = workers.run(compare, 4, ["a", "b", "b", "a"])
    text = "color is b on rank 1 and a on rank 0; ranks 2 differ too; paint"
    assert answers == [["MismatchError", text]] * 4


def compare_in_a_subgroup() -> list[str]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ["", ""]
    items = {"color": str(dist.get_rank())}
    try:
        require_same(items, group, torch.device("cpu"), advice="paint")
    except MismatchError as error:
        return ["MismatchError", str(error)]
    return ["", ""]


def test_ranks_are_those_of_the_job(workers: WorkerPool) -> None:
    text = "color is 2 on rank 2 and 1 on rank 1; paint"
    assert workers.run(compare_in_a_subgroup, 3)[1:] == [["MismatchError", text]] * 2


def differ_in_the_middle() -> list[str]:
    """Items that neither rank has all of."""
    mine = [["a", "1"], ["b", "2"], ["d", "4"]] if dist.get_rank() else [["a", "1"], ["c", "3"]]
    items = dict(mine)
    return answer(
        lambda: require_same(items, dist.group.WORLD, torch.device("cpu"), advice="paint")
    )


def test_the_first_difference_is_told(workers: WorkerPool) -> None:
    text = "b is 2 on rank 1 and missing on rank 0; paint"
    assert workers.run(differ_in_the_middle, 2) == [["MismatchError", text]] * 2
