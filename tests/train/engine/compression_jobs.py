"""Training with ``compression=``, as worker processes run it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from threading import Lock
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.hooks import GTopKState, gtopk
from syncline.plan.planners.compressed import compressed
from syncline.plan.recipe import Recipe, Rounded, hook_for
from syncline.train import engine_executor
from syncline.train.ddp import DistributedDataParallel
from syncline.train.engine import compression as compression_module
from syncline.train.engine.dense_transport import DenseTransport, Slice, Work
from syncline.train.sparse.session import Session
from syncline.train.stages import Stage
from tests.timeouts import TIMEOUT
from tests.train.jobs import OPTIMIZERS, batch, measured_as, plain_plan, steps_to_steady, train
from tests.train.models import MODELS
from tests.train.sparse.jobs import MARK, Found, marked_memories, telling, weights_of

Given = str | dict[str, Any]  # a type of fewer bits, or the arguments of a recipe


@mock.patch.object(compression_module, "Session", functools.partial(Session, check=True))
def begun(
    given: Given,
    *,
    model: str | nn.Module = "plain",
    check: bool = False,
    overlap: bool = False,
    **wrapper: Any,
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a wrapper, all of whose sparse exchanges are checked, and an optimizer."""
    torch.manual_seed(3)
    module = MODELS[model]() if isinstance(model, str) else model
    compression: Any = Recipe(**given) if isinstance(given, dict) else given
    ddp = DistributedDataParallel(module, compression=compression, check=check, **wrapper)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if overlap:
        ddp.overlap(optimizer)
    return ddp, optimizer


def at_step_30(given: Given, **wrapper: Any) -> Found:
    """Train under the plan of a compression, and return the end."""
    ddp, optimizer = begun(given, **wrapper)
    steps = steps_to_steady(ddp, optimizer)
    assert ddp.plan.is_lossy
    train(ddp, optimizer, 30 - steps, first=steps)
    return end_of(ddp)


def end_of(ddp: DistributedDataParallel) -> Found:
    """Return what can be compared bit for bit; of the ranks of a training only the parameters."""
    state = ddp.compression_state_dict()
    return {
        "parameters": weights_of(ddp.module),
        "buffers": {name: values.clone() for name, values in ddp.module.named_buffers()},
        "residuals": state.get("residuals", {}),
        "step": state.get("step"),
    }


def trained(
    given: Given, model: str, steps: int, overlap: bool = False, options: Found | None = None
) -> Found:
    ddp, optimizer = begun(given, model=model, overlap=overlap, **(options or {}))
    train(ddp, optimizer, steps, first=steps_to_steady(ddp, optimizer))
    plan = None if ddp.plan is None else ddp.plan.to_json()
    decided = ddp.compression_state_dict()["decided"]
    said = {"decided": decided, "plan": plan, "run": ddp.run_record().to_json()}
    return end_of(ddp) | said


def resumed(given: Given, overlap: bool) -> list[Found]:
    """Return the end of 10 steps, and that of 5, a checkpoint and 5."""
    (ddp, optimizer), (again, other) = (begun(given, overlap=overlap) for _ in range(2))
    steps = steps_to_steady(ddp, optimizer) + 5
    train(ddp, optimizer, 5, first=steps - 5)
    again.load_compression_state_dict(ddp.compression_state_dict())
    again.module.load_state_dict(copy.deepcopy(ddp.module.state_dict()))
    train(ddp, optimizer, 5, first=steps)
    train(again, other, 5, first=steps)
    return [end_of(ddp), end_of(again)]


def exchanged_by(
    kind: str, recipe: Found, scaler: torch.amp.GradScaler | None = None
) -> tuple[Any, Any, Callable[[], Found]]:
    """Return a model under torch's class and the hook, or under ours; and who steps ahead."""
    torch.manual_seed(3)
    module = MODELS["plain"]()
    if kind == "hook":
        model = TorchDDP(module, bucket_cap_mb=0.01)
        state = GTopKState(model, Recipe(**recipe), scaler=scaler)
        model.register_comm_hook(state, gtopk)
        return model, state, state.state_dict
    ours = DistributedDataParallel(module, compression=Recipe(**recipe), check=False)
    if scaler is not None:
        ours.scaled_by(scaler)
    return ours, ours, ours.compression_state_dict


def stepped_ahead(kind: str, overlap: str | None = None) -> Found:
    """Train stepping ahead with the wrapper, or with torch's and the hook; return the end."""
    model, state, state_dict = exchanged_by(kind, {"density": 0.05})
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if overlap == "before":
        model.overlap(optimizer)
    state.step_ahead(optimizer)
    if overlap == "after":
        model.overlap(optimizer)
    train(model, optimizer, 30)
    return {
        "parameters": weights_of(model.module),
        "residuals": state_dict()["residuals"],
        "defers": getattr(model, "defers", False),
    }


def reverted(given: Given, ahead: bool) -> Found:
    """Let a compressed plan lose; compare what was left in residuals with what then arrives."""
    ddp, optimizer = begun(given, check=True)
    if ahead:
        ddp.step_ahead(optimizer)
    step = 0
    while not ddp.phase.startswith("trying"):
        train(ddp, optimizer, 1, first=step)
        step += 1
        assert step < 500
    train(ddp, optimizer, 5, first=step)
    ranks = dist.get_world_size()
    # In 8 bits they are parts of the average.
    parts = ranks if given == "int8" else 1
    kept = {n: parts * r for n, r in ddp.compression_state_dict()["residuals"].items()}
    if ahead:  # what waits is to bring the weights as far as before
        kept = {name: 10 * values for name, values in kept.items()}
        optimizer.param_groups[0]["lr"] /= 10
    inputs, targets = batch(step)
    optimizer.zero_grad()
    with ddp.join():  # DDP's buckets for a while
        cross_entropy(ddp(inputs), targets).backward()
        found = {name: p.grad.clone() for name, p in ddp.module.named_parameters()}
        left = ddp.compression_state_dict()["residuals"]
    twin = MODELS["plain"]()
    twin.load_state_dict(ddp.module.state_dict())
    cross_entropy(twin(inputs), targets).backward()
    expected = {}
    for name, parameter in twin.named_parameters():
        expected[name] = parameter.grad + kept[name].view_as(parameter)
        dist.all_reduce(expected[name])
        expected[name] /= ranks
    any_left, any_kept = (any(bool(r.any()) for r in each.values()) for each in (left, kept))
    return {"expected": expected, "found": found, "left": any_left, "kept": any_kept}


def decides(given: Given, slow: Callable[[Stage], bool], steps: int) -> Any:
    """Train until it is decided, with stages made slow, and on; return the wrapper."""
    ddp, optimizer = begun(given, check=True)
    with measured_as(lambda stage: 0.2 if slow(stage) else 0.1):
        before = steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, steps, first=before)
    return ddp


def decides_beside_dense_buckets(slow: bool) -> Found:
    """Train until it is decided, with a plan that is slower, or faster, than dense buckets."""
    ddp = decides({"density": 0.05}, lambda stage: (stage.plan is not None) == slow, 4)
    state, run = ddp.compression_state_dict(), ddp.run_record()
    return {
        "decision": run.decision,
        "residuals are told of": "the residuals are sent with later gradients" in run.reason,
        "lossy": ddp.plan is not None and ddp.plan.is_lossy,
        "left": any(bool(r.any()) for r in state["residuals"].values()),
        "decided": (state["decided"], state["plan"] is not None),
    }


def decides_for_a_hook(wire: Rounded) -> Found:
    """Train where torch's hook is faster than a plan and than no hook, and look at a gradient."""
    ddp = decides(wire, lambda stage: stage.hook is None, 3)
    kind = getattr(torch, hook_for(wire))
    return {
        "baseline": ddp.run_record().baseline.name,
        "rounded": all(p.grad.to(kind).float().equal(p.grad) for p in ddp.parameters()),
        "parameters": weights_of(ddp.module),
    }


def resumed_without_dense_steps() -> bool:
    """Say whether a training that dense buckets had won compresses where no step may be dense."""
    ddp, optimizer = begun({"density": 0.05})
    won = ddp.compression_state_dict() | {"decided": True, "plan": None}
    ddp.load_compression_state_dict(won)
    steps = steps_to_steady(ddp, optimizer)
    counted = ddp.compression_state_dict()["step"] == steps
    return counted and ddp.plan is not None and ddp.plan.is_lossy


LEFT_OUT_STEPS = 12


class Branches(nn.Module):
    """One of two layers in turn, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        # Of other sizes, so that blocks of 8 bits hold some of both.
        self.first, self.second = nn.Linear(6, 9), nn.Linear(6, 11)

    def forward(self, inputs: torch.Tensor, *, first: bool) -> torch.Tensor:
        found: torch.Tensor = (self.first if first else self.second)(inputs)
        return found


def left_out(given: Given) -> list[bool]:
    """Say of steps that leave a parameter out whether its residual stays as it is."""
    ddp, _ = begun(given, model=Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def residual() -> torch.Tensor:
        kept: torch.Tensor = ddp.compression_state_dict()["residuals"]["second.weight"]
        return kept

    same = []
    step = 0
    # Where iterations are slow, few of them are measured.
    while ddp.measuring or step % 4 or len(same) < LEFT_OUT_STEPS:
        before = residual()
        optimizer.zero_grad()
        ddp(torch.randn(5, 6), first=step % 2 == 1).square().sum().backward()
        optimizer.step()
        if step % 2 == 1:
            assert ddp.module.second.weight.grad is None
            same.append(bool(before.any()) and torch.equal(before, residual()))
        step += 1
        assert step < 500
    return same


@telling
def refused(case: str) -> str:
    """Give, on this rank or another, something that cannot be used."""
    rank = dist.get_rank()
    model: nn.Module = MODELS["plain"]()
    sparse, whole = Recipe(density=0.1), Recipe(density=0.1, unit="model")
    in_16_bits = compressed(plain_plan(), "bfloat16")
    renamed = compressed(plain_plan(), "float16").to_json().replace("narrow.bias", "another")
    if case == "embedding":
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    arguments: Found = {"compression": sparse, "check": False} | {
        "recipes differ": {"compression": Recipe(density=0.2 if rank == 1 else 0.1)},
        "no recipe": {"compression": "int4"},
        "momentum": {"compression": Recipe(density=0.1, momentum=0.9), "check": True},
        "checked scaler": {"check": True},
        "lossy plan": {"compression": None, "plan": in_16_bits},
        "other payload": {"plan": in_16_bits},
        "whole model": {"compression": whole, "plan": plain_plan()},
        "planner of several": {"compression": whole, "planner": "merge"},
        "other 16 bits": {"compression": "float16"},
        "a recipe's state": {"compression": "float16"},
        "other model's plan": {"compression": "float16"},
    }.get(case, {})
    if case == "several dtypes":
        wide = [(f"wide.{name}", p) for name, p in model.wide.named_parameters()]
        arguments["delay_all_reduce_named_params"] = wide
        arguments["param_to_hook_all_reduce"] = model.narrow.weight
    ddp = DistributedDataParallel(model, **arguments)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    other = functools.partial(DistributedDataParallel, MODELS["plain"]())
    scales = functools.partial(ddp.scaled_by, torch.amp.GradScaler("cpu"))

    def loads(saved: DistributedDataParallel = ddp, **changed: Any) -> None:
        ddp.load_compression_state_dict(saved.compression_state_dict() | changed)

    def makes_nan() -> None:
        if rank == 1:
            ddp.module.wide.weight.register_hook(lambda grad: grad * float("nan"))

    acts: dict[str, Callable[[], object]] = {
        "hook": lambda: ddp.register_comm_hook(None, lambda *_: None),
        "ahead of nothing": lambda: other().step_ahead(optimizer),
        "ahead of 16 bits": lambda: other(compression="bfloat16").step_ahead(optimizer),
        "late ahead": lambda: ddp.step_ahead(optimizer),
        "checked scaler": scales,
        "late scaler": scales,
        "states differ": lambda: loads(step=rank),
        "other rank's state": lambda: loads(rank=5),
        "other 16 bits": lambda: loads(compression="bfloat16"),
        "a recipe's state": lambda: loads(other(compression=sparse)),
        "other model's plan": lambda: loads(decided=True, plan=renamed),
        "late state": loads,
        "nan": makes_nan,
        "late nan": makes_nan,
    }
    if case.startswith("late"):
        train(ddp, optimizer, 1)
    if case == "late nan":
        train(ddp, optimizer, 4, first=steps_to_steady(ddp, optimizer))
    if case in acts:
        acts[case]()
    train(ddp, optimizer, 1)
    return "trained"


def over_our_backend(given: Given) -> list[Found]:
    """Return the ends of trainings over Gloo and over the backend "syncline"."""
    measured, optimizer = begun(given)
    steps_to_steady(measured, optimizer)
    # What is measured decides which plan runs, and from which step on.
    known = {"profile": measured.profile, "network": measured.network}
    groups = [dist.new_group(backend=each, timeout=TIMEOUT) for each in ("gloo", "syncline")]
    return [at_step_30(given, process_group=group, **known) for group in groups]


class Unbounded(DenseTransport):
    """Hands its messages over as a GPU's stream does, without the host waiting for each."""

    bounded = False

    def __init__(self, group: dist.ProcessGroup, _device: object) -> None:
        super().__init__(group)
        self._finish_last: Callable[[], None] = lambda: None

    def mark(self) -> str:
        return MARK

    def prepare(self, given: Slice) -> None:
        pass

    def send(self, given: Slice, after: Any, on_sent: Any) -> Work:
        assert after
        assert all(mark == MARK for mark in after)
        self._finish_last()  # as a stream: a gather finds the sums of before
        super().prepare(given)
        work = super().send(given, after, on_sent)
        lock, waits = Lock(), [work.wait]

        def wait() -> None:
            # A stream puts the result in place once, however many threads wait for it.
            with lock:
                for each in waits:
                    each()
                waits.clear()

        self._finish_last = wait
        return Work(wait, wait)


def as_on_a_gpu(given: Given, overlap: bool) -> list[Found]:
    """Return the ends of trainings without a GPU, and as on one: by operations of torch."""
    # What is measured decides what is decoupled, whose sums a ring rounds otherwise.
    plan = compressed(plain_plan(), given) if isinstance(given, str) else None  # type: ignore[arg-type]
    on_device = mock.patch.object(engine_executor, "transport_for", Unbounded)
    with measured_as(lambda _: 0.1):  # the plan begins in the same step
        host = at_step_30(given, plan=plan, overlap=overlap)
        with on_device, marked_memories():
            return [host, at_step_30(given, plan=plan, overlap=overlap)]


def scaler_of(*, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=enabled)


def loss_of(model: Any, step: int, bad: int) -> torch.Tensor:
    """Return a loss; in the step ``bad`` some gradients of one rank are infinite or very large."""
    inputs, targets = batch(step)
    loss = cross_entropy(model(inputs * 0.5), targets)
    if step == bad and dist.get_rank() == 1:
        loss = loss + model.module.norm.weight.sum() * float("inf")
        loss = loss + model.module.wide.weight.sum() * 1e20
    return loss


def scaled(kind: str, recipe: Found, bad: int, several: int = 1, ahead: bool = False) -> list[str]:
    """Return what differs between a training with a scaler and one that leaves a step out.

    In the step ``bad`` a gradient of one rank and of one of the ``several`` optimizers is infinite.
    """
    net = {}
    states = {}
    for scaling in (True, False):
        scaler = scaler_of(enabled=scaling)
        model, state, state_dict = exchanged_by(kind, recipe, scaler)
        parameters = [*model.parameters()]
        optimizers = [torch.optim.SGD(parameters[n::several], lr=0.05) for n in range(several)]
        for optimizer in optimizers if ahead else ():
            state.step_ahead(optimizer)
        for step in range(bad + 6):
            if step == bad and not scaling:
                continue
            model.zero_grad()
            scaler.scale(loss_of(model, step, bad)).backward()
            if step == bad:
                assert all(bool(p.grad.isinf().all()) for p in parameters)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        net[scaling] = weights_of(model.module)
        states[scaling] = state_dict()
    factor = states[True]["scale"]
    assert factor > 1
    differing = [n for n, p in net[True].items() if not torch.equal(p, net[False][n])]
    again = GTopKState(model, Recipe(**recipe))  # without a scaler
    again.load_state_dict(states[True])
    for name, residual in states[True]["residuals"].items():
        others = states[False], again.state_dict()
        if not all(torch.equal(residual / factor, other["residuals"][name]) for other in others):
            differing.append(f"residual of {name}")
    return differing


def scaled_in_8_bits(steps: int, bad: int) -> Found:
    """Train with a scaler, which skips one step; return the end, and the scale of residuals."""
    ddp, optimizer = begun("int8")
    scaler = scaler_of()
    ddp.scaled_by(scaler)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale(loss_of(ddp, step, bad)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = ddp.compression_state_dict()
    return {
        "scales": scales,
        "scale": state["scale"],
        "largest": max(float(r.abs().max()) for r in state["residuals"].values()) / state["scale"],
        "parameters": weights_of(ddp.module),
    }
