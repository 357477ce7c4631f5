"""Ranks that were given different things say so, all of them, before they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from syncline.train.ddp import DistributedDataParallel
from syncline.train.measure.exchange import require_same
from tests.train.fault_jobs import error_of
from tests.train.jobs import SLOW, plain_plan
from tests.train.models import Mixed, Plain
from tests.words import assert_tells
from tests.workers import WorkerPool

Told = list[str] | None


def answer(call: Callable[[], Any]) -> Told:
    """Return the class and the text of the error, and see that the ranks still agree on it."""
    told = error_of(call)
    dist.barrier()  # nobody is left in a collective of the constructor
    return told


def built(kind: str) -> nn.Module:
    if kind == "lazy":
        return nn.Sequential(nn.LazyLinear(3))
    sizes = {"shape": (3, 6), "more": (3, 5, 2), "fewer": (3,)}.get(kind, (3, 5))
    layers = {f"layer{number}": nn.Linear(4, size) for number, size in enumerate(sizes)}
    module: Any = nn.ModuleDict(dict(reversed(layers.items())) if kind == "order" else layers)
    if kind == "dtype":
        module.double()
    elif kind == "frozen":
        module.layer1.bias.requires_grad_(False)
    elif kind == "entirely frozen":
        module.requires_grad_(False)
    elif kind == "buffer":
        module.register_buffer("mean", torch.zeros(2))
    elif kind == "ignoring":  # a parameter of its own on every rank, which nobody exchanges
        module.layer0.own = nn.Parameter(torch.zeros(1 + dist.get_rank()))
        module._ddp_params_and_buffers_to_ignore = ["layer0.own"]
    return module


def build(kind: str) -> Told:
    module = built(kind)
    return answer(lambda: DistributedDataParallel(module))


PLAN = plain_plan()
OTHER = (replace(PLAN.tensors[0], name="other.bias"), *PLAN.tensors[1:])
DTYPES = ("bfloat16" if tensor.name.startswith("wide") else "float32" for tensor in PLAN.tensors)
IN_TURNS = replace(
    PLAN, tensors=tuple(replace(t, dtype=d) for t, d in zip(PLAN.tensors, DTYPES, strict=True))
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "planner": {"planner": "merge"},
    "no planner": {"planner": "mergge"},
    "buckets of ddp": {"planner": "ddp:bucket_bytes=1000"},
    "plan": {"plan": PLAN},
    "another plan": {"plan": replace(PLAN, in_flight=2)},
    "no check": {"check": False},
    "two of them": {"plan": PLAN, "network": SLOW},
    "unused": {"find_unused_parameters": True},
    "caps": {"bucket_cap_mb_list": [1, 2]},
    "five workers": {"plan": plain_plan(workers=5)},
    "other model": {"plan": replace(PLAN, tensors=OTHER, model="Other")},
    "other network": {"network": replace(SLOW, workers=8)},
    "dtypes in turns": {"plan": IN_TURNS},
}


def give(kind: str) -> Told:
    model = Mixed() if kind == "dtypes in turns" else Plain()
    return answer(lambda: DistributedDataParallel(model, **ARGUMENTS[kind]))


def overlap(kinds: str) -> Told:
    model = DistributedDataParallel(Plain(), plan=PLAN, check=False)
    parameters = list(model.parameters())
    for kind in kinds.split():
        of = parameters[:2] if kind == "part" else parameters
        make = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        model.overlap(make(of, lr=0.1))
    return answer(lambda: model(torch.zeros(2, 1, 8, 8)).sum().backward())


def compare(listed: str) -> Told:
    """Compare items such as ``x=a y=b``."""
    items = dict(item.split("=") for item in listed.split())
    given = items, dist.group.WORLD, torch.device("cpu")
    return answer(lambda: require_same(*given, advice="paint"))


def on_each(job: Callable[[str], Told], kinds: str) -> Told:
    return job(kinds.split(", ")[dist.get_rank()])


# The facts of each message are separated by dots.
@pytest.mark.parametrize(
    ("job", "kinds", "facts"),
    [
        (build, "usual, shape", "parameter 2 is ... (6, 4), float32 on rank 1 ... (5, 4), float32"),
        (build, "usual, more", "parameter 4 is 'layer2.weight' ... rank 1 and missing on rank 0"),
        (build, "usual, fewer", "parameter 2 is missing on rank 1 and 'layer1.weight' of shape"),
        (build, "usual, dtype", "parameter 0 is ... float64 on rank 1 ... float32 on rank 0"),
        (build, "usual, order", "parameter 0 is 'layer1 ... on rank 1 and 'layer0 ... on rank 0"),
        (build, "usual, frozen", "parameter 3 is 'layer1.bias' ... float32, no gradient on rank 1"),
        (build, "usual, entirely frozen", "parameter 0 is 'layer0.weight' ... no gradient on rank"),
        (build, "usual, buffer", "buffer 0 is 'mean' ... rank 1 and missing on rank 0; build the"),
        (build, "usual, lazy", "parameter 0 is '0.weight' of no shape yet ... 1 and 'layer0"),
        # The rank that differs from most is named, and the lowest is right in a tie.
        (build, "shape, usual, usual", "parameter 2 is ... (6, 4) ... on rank 0 ... on rank 1;"),
        (build, "usual, more, fewer", "missing on rank 0; ranks 2 differ too;"),
        (give, "usual, planner", "planner is 'merge' on rank 1 and 'auto' on rank 0; build the"),
        (give, "usual, no check", "check is False on rank 1 and True on rank 0"),
        (give, "usual, unused", "find_unused_parameters is True on rank 1 and missing on rank 0"),
        (give, "plan, another plan", "plan is a plan with the SHA-256 "),
        (overlap, "sgd, ", "call 1 of overlap is missing on rank 1 and for SGD with 8 parameters"),
        (overlap, "sgd, adam", "call 1 of overlap is for Adam with 8 parameters, deferred on"),
        (overlap, "part, part adam", "call 2 of overlap ... missing on rank 0; call overlap on"),
        (compare, "x=a, x=b, x=b, x=a", "x is b on rank 1 and a on rank 0; ranks 2 differ too;"),
        (compare, "a=1 c=3, a=1 b=2 d=4", "b is 2 on rank 1 and missing on rank 0; paint"),
    ],
)
def test_all_ranks_tell_the_same_difference(
    workers: WorkerPool, job: Callable[[str], Told], kinds: str, facts: str
) -> None:
    count = kinds.count(",") + 1
    first, *others = workers.run(on_each, count, job, kinds)
    assert others == [first] * (count - 1)
    assert first[0] == "MismatchError"
    assert_tells(first[1], *facts.split(" ... "))


@pytest.mark.parametrize(
    ("job", "kind"), [(build, "usual"), (build, "ignoring"), (overlap, "sgd"), (compare, "a=1")]
)
def test_equal_ranks_tell_nothing(
    workers: WorkerPool, job: Callable[[str], Told], kind: str
) -> None:
    assert workers.run(job, 2, kind) == [None] * 2


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("no planner", "unknown planner 'mergge' ... did you mean 'merge'"),
        ("buckets of ddp", "from the wrapper: give bucket_cap_mb"),
        ("two of them", "a plan was given ... would be ignored"),
        ("caps", "give a plan instead"),
    ],
)
def test_refused_arguments_of_one_rank_reach_all(
    workers: WorkerPool, kind: str, facts: str
) -> None:
    fine, refused = workers.run(on_each, 2, give, f"usual, {kind}")
    assert (fine[0], refused[0]) == ("MismatchError", "UserError")
    assert_tells(refused[1], *facts.split(" ... "))
    assert f"refused: {refused[1]} on rank 1 and accepted on rank 0" in fine[1]


@pytest.mark.parametrize(
    ("kind", "error", "facts"),
    [
        ("no planner", "UserError", "unknown planner 'mergge'"),
        ("five workers", "MismatchError", "plan is for 5 workers, this job has 2"),
        ("other model", "MismatchError", "'Other' ... narrow.bias"),
        ("other network", "MismatchError", "'slow' is of 8 workers, this job has 2"),
        ("dtypes in turns", "MismatchError", "dtypes in turns ... plan this model again"),
    ],
)
def test_refused_arguments_of_all_ranks(
    workers: WorkerPool, kind: str, error: str, facts: str
) -> None:
    for found, text in workers.run(give, 2, kind):
        assert found == error
        assert_tells(text, *facts.split(" ... "))


def refuses() -> list[Told]:
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
    expected = [
        "holds no parameter of this model",
        "expected a torch.optim.Optimizer",
        "overlap was called twice for this optimizer",
        "overlap was called after training had begun",
    ]
    for (kind, text), fact in zip(workers.run(refuses, 2)[0], expected, strict=True):
        assert kind == "UserError"
        assert fact in text


def compare_in_a_subgroup() -> Told:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    items = {"color": str(dist.get_rank())}
    return error_of(lambda: require_same(items, group, torch.device("cpu"), advice="paint"))


def test_ranks_are_those_of_the_job(workers: WorkerPool) -> None:
    text = "color is 2 on rank 2 and 1 on rank 1; paint"
    assert workers.run(compare_in_a_subgroup, 3)[1:] == [["MismatchError", text]] * 2
