"""Training with ``compression=``, as worker processes run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.errors import SynclineError
from syncline.hooks import GTopKState, gtopk
from syncline.plan.planners.compressed import compressed
from syncline.plan.recipe import Compression, Recipe, Rounded, hook_for
from syncline.train import engine_executor
from syncline.train.ddp import DistributedDataParallel
from syncline.train.engine.dense_transport import DenseTransport, Slice, Work
from syncline.train.stages import Stage
from tests.timeouts import TIMEOUT
from tests.train.jobs import (
    OPTIMIZERS,
    batch,
    measured_as,
    plain_plan,
    steps_to_steady,
    train,
)
from tests.train.models import MODELS
from tests.train.sparse.marked_memory import MARK, marked_memories


def compression_of(given: str | dict[str, Any]) -> Compression:
    return Recipe(**given) if isinstance(given, dict) else given  # type: ignore[return-value]


def checked_conservation(ddp: DistributedDataParallel) -> None:
    """Let every sparse exchange be checked."""
    assert ddp._training.wrapped.compressing is not None
    session = ddp._training.wrapped.compressing._session
    if session is not None:
        session._check = True


def trained(
    given: str | dict[str, Any], model: str, options: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Train until measuring is over, and on."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(
        MODELS[model](), compression=compression_of(given), **options.get("wrapper", {})
    )
    checked_conservation(ddp)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    if options.get("overlap"):
        ddp.overlap(optimizer)
    before = steps_to_steady(ddp, optimizer) if ddp.measuring else 0
    train(ddp, optimizer, steps, first=before)
    state = ddp.compression_state_dict()
    run = ddp.run_record()
    return {
        "parameters": {n: p.detach().numpy().copy() for n, p in ddp.module.named_parameters()},
        "residuals": {n: r.numpy() for n, r in state.get("residuals", {}).items()},
        "plan": None if ddp.plan is None else ddp.plan.to_json(),
        "run": run.to_json(),
        "state": {k: v for k, v in state.items() if k not in ("residuals", "velocities")},
        "finite": all(bool(np.isfinite(p.detach().numpy()).all()) for p in ddp.parameters()),
    }


def begun(
    given: str | dict[str, Any],
    *,
    model: str = "plain",
    check: bool = True,
    **wrapper: Any,
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(
        MODELS[model](), compression=compression_of(given), check=check, **wrapper
    )
    checked_conservation(ddp)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05)


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in ddp.module.state_dict().items()}


def resumed(given: str | dict[str, Any], overlap: bool) -> list[str]:
    """Return what differs between 5 and 5 steps after a checkpoint and 10 without one."""
    ddp, optimizer = begun(given, check=False)
    if overlap:
        ddp.overlap(optimizer)
    steps = steps_to_steady(ddp, optimizer) + 5
    train(ddp, optimizer, 5, first=steps - 5)
    state = ddp.compression_state_dict()
    parameters = parameters_of(ddp)
    train(ddp, optimizer, 5, first=steps)
    expected, expected_state = parameters_of(ddp), ddp.compression_state_dict()

    again, optimizer = begun(given, check=False)
    if overlap:
        again.overlap(optimizer)
    again.module.load_state_dict(parameters)
    again.load_compression_state_dict(state)
    train(again, optimizer, 5, first=steps)
    found, found_state = parameters_of(again), again.compression_state_dict()
    differing = [name for name in expected if not torch.equal(expected[name], found[name])]
    for name, residual in expected_state.get("residuals", {}).items():
        if not torch.equal(residual, found_state["residuals"][name]):
            differing.append(f"residual of {name}")
    steps_done = [expected_state.get("step"), found_state.get("step")]
    if steps_done[0] != steps_done[1]:
        differing.append(f"steps {steps_done}")
    return differing


def stepped_ahead(given: dict[str, Any], options: dict[str, Any], hooked: bool) -> dict[str, Any]:
    """Train stepping ahead with the wrapper, or with torch's and the hook; return the end."""
    torch.manual_seed(3)
    module = MODELS["plain"]()
    model: Any
    state: Any
    if hooked:
        model = TorchDDP(module, bucket_cap_mb=0.01)
        state = GTopKState(model, Recipe(**given))
        model.register_comm_hook(state, gtopk)
    else:
        model = state = DistributedDataParallel(
            module, compression=Recipe(**given), **options.get("wrapper", {})
        )
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if not hooked and options.get("overlap") == "before":
        model.overlap(optimizer)
    state.step_ahead(optimizer)
    if not hooked and options.get("overlap") == "after":
        model.overlap(optimizer)
    train(model, optimizer, options["steps"])
    saved = state.state_dict() if hooked else state.compression_state_dict()
    return {
        "parameters": {n: p.detach().numpy().copy() for n, p in module.named_parameters()},
        "residuals": {n: r.numpy() for n, r in saved["residuals"].items()},
        "defers": None if hooked else model.defers,
    }


def reverted(given: str | dict[str, Any], ahead: bool) -> dict[str, Any]:
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
    ddp.synchronize()
    compressing = ddp._training.wrapped.compressing
    assert compressing is not None
    residuals = compressing._residuals
    assert residuals is not None
    # In 8 bits they are parts of the average.
    parts = dist.get_world_size() if given == "int8" else 1
    kept = {name: parts * residuals.of(name) for name in ddp._training.wrapped.parameters}
    if ahead:  # what waits is to bring the weights as far as before
        kept = {name: 10 * values for name, values in kept.items()}
        optimizer.param_groups[0]["lr"] /= 10
    inputs, targets = batch(step)
    optimizer.zero_grad()
    with ddp.join():  # DDP's own buckets for a while
        cross_entropy(ddp(inputs), targets).backward()
        found = {name: p.grad.clone() for name, p in ddp._training.wrapped.parameters.items()}
        left = sum(
            float(residuals.of(name).abs().sum()) for name in ddp._training.wrapped.parameters
        )

    twin = MODELS["plain"]()
    twin.load_state_dict(ddp.module.state_dict())
    cross_entropy(twin(inputs), targets).backward()
    worst = 0.0
    for name, parameter in twin.named_parameters():
        expected = parameter.grad + kept[name].view_as(parameter)
        dist.all_reduce(expected)
        worst = max(worst, float((expected / dist.get_world_size() - found[name]).abs().max()))
    return {"worst": worst, "left": left, "kept": sum(float(k.abs().sum()) for k in kept.values())}


def decides(given: str | dict[str, Any], slow: bool) -> dict[str, Any]:
    """Train until it is decided, with a plan that is made slow, or fast, against dense buckets."""
    ddp, optimizer = begun(given)

    def takes(stage: Stage) -> float:
        return 0.1 if (stage.plan is None) == slow else 0.2

    with measured_as(takes):
        steps = steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 4, first=steps)
    run = ddp.run_record()
    state = ddp.compression_state_dict()
    return {
        "decision": run.decision,
        "reason": run.reason,
        "lossy": ddp.plan is not None and ddp.plan.is_lossy,
        "left": any(bool(r.any()) for r in state["residuals"].values()),
        "decided": (state["decided"], state["plan"] is not None),
    }


def hooked(wire: Rounded) -> dict[str, Any]:
    """Train where torch's hook is faster than a plan and than no hook, and look at a gradient."""
    ddp, optimizer = begun(wire)

    def takes(stage: Stage) -> float:
        return 0.1 if stage.hook is not None else 0.2

    with measured_as(takes):
        steps = steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 3, first=steps)
    gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
    run = ddp.run_record()
    assert run.baseline is not None
    return {
        "baseline": run.baseline.name,
        "rounded": all(g.to(getattr(torch, hook_for(wire))).float().equal(g) for g in gradients),
        "parameters": {n: p.detach().numpy().copy() for n, p in ddp.module.named_parameters()},
    }


def resumed_without_dense_steps() -> bool:
    """Say whether a training that dense buckets had won compresses where no step may be dense."""
    ddp, optimizer = begun({"density": 0.05}, check=False)
    state = ddp.compression_state_dict()
    ddp.load_compression_state_dict({**state, "decided": True, "plan": None})
    steps = steps_to_steady(ddp, optimizer)
    compressing = ddp._training.wrapped.compressing
    assert compressing is not None
    return ddp.plan is not None and ddp.plan.is_lossy and compressing._exchange.step == steps


LEFT_OUT_STEPS = 12


class Branches(nn.Module):
    """One of two layers in turn, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        # Of other sizes, so that blocks of 8 bits hold some of both.
        self.first, self.second = nn.Linear(6, 9), nn.Linear(6, 11)

    def forward(self, inputs: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Return what one of them makes of the inputs."""
        found: torch.Tensor = (self.first if first else self.second)(inputs)
        return found


def left_out(given: str | dict[str, Any]) -> list[bool]:
    """Say of steps that leave a parameter out whether its residual stays as it is."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(
        Branches(), compression=compression_of(given), check=False, find_unused_parameters=True
    )
    checked_conservation(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    assert ddp._training.wrapped.compressing is not None
    residuals = ddp._training.wrapped.compressing._residuals
    assert residuals is not None
    same = []
    step = 0
    # Where iterations are slow, few of them are measured.
    while ddp.measuring or step % 4 or len(same) < LEFT_OUT_STEPS:
        before = residuals.of("second.weight").clone()
        optimizer.zero_grad()
        ddp(torch.randn(5, 6), first=step % 2 == 1).square().sum().backward()
        optimizer.step()
        if step % 2 == 1:
            assert ddp.module.second.weight.grad is None
            after = residuals.of("second.weight")
            same.append(bool(before.any()) and torch.equal(before, after))
        step += 1
        assert step < 500
    return same


def refused(case: str) -> str:
    """Return what is said where this rank, or another, gives something that cannot be used."""
    rank = dist.get_rank()
    model: nn.Module = MODELS["plain"]()
    arguments: dict[str, Any] = {"compression": Recipe(density=0.1), "check": False}
    if case == "recipes differ" and rank == 1:
        arguments["compression"] = Recipe(density=0.2)
    if case == "no recipe":
        arguments["compression"] = "int4"
    if case == "half":
        model = model.half()
    if case == "embedding":
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    if case == "momentum":
        arguments = {"compression": Recipe(density=0.1, momentum=0.9)}
    if case == "checked scaler":
        arguments["check"] = True
    if case == "lossy plan":
        plan = compressed(plain_plan(), "bfloat16")
        arguments = {"plan": plan}
    if case == "other payload":
        arguments["plan"] = compressed(plain_plan(), "bfloat16")
    if case == "whole model":
        arguments["compression"] = Recipe(density=0.1, unit="model")
        arguments["plan"] = plain_plan()
    if case == "planner of several":
        arguments |= {"compression": Recipe(density=0.1, unit="model"), "planner": "merge"}
    if case in ("other 16 bits", "a recipe's state", "other model's plan"):
        arguments["compression"] = "float16"
    if case == "several dtypes":
        arguments["delay_all_reduce_named_params"] = [
            (f"wide.{name}", p) for name, p in model.wide.named_parameters()
        ]
        arguments["param_to_hook_all_reduce"] = model.narrow.weight
    try:
        ddp = DistributedDataParallel(model, **arguments)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if case == "hook":
            ddp.register_comm_hook(None, lambda *_: None)
        if case == "ahead of nothing":
            DistributedDataParallel(MODELS["plain"]()).step_ahead(optimizer)
        if case == "ahead of 16 bits":
            other = DistributedDataParallel(MODELS["plain"](), compression="bfloat16")
            other.step_ahead(optimizer)
        if case == "ahead of another model":
            other = DistributedDataParallel(MODELS["plain"](), **arguments)
            other.step_ahead(optimizer)
        if case == "late ahead":
            train(ddp, optimizer, 1)
            ddp.step_ahead(optimizer)
        if case == "late scaler":
            train(ddp, optimizer, 1)
            ddp.scaled_by(torch.amp.GradScaler("cpu"))
        if case == "checked scaler":
            ddp.scaled_by(torch.amp.GradScaler("cpu"))
        if case == "states differ":
            ddp.load_compression_state_dict({**ddp.compression_state_dict(), "step": rank})
        if case == "other rank's state":
            ddp.load_compression_state_dict({**ddp.compression_state_dict(), "rank": 5})
        if case == "other 16 bits":
            ddp.load_compression_state_dict(
                {**ddp.compression_state_dict(), "compression": "bfloat16"}
            )
        if case == "a recipe's state":
            other = DistributedDataParallel(
                MODELS["plain"](), compression=Recipe(density=0.1), check=False
            )
            ddp.load_compression_state_dict(other.compression_state_dict())
        if case == "other model's plan":
            plan = compressed(plain_plan(), "float16")
            tensors = (msgspec.structs.replace(plan.tensors[0], name="another"), *plan.tensors[1:])
            plan = msgspec.structs.replace(plan, tensors=tensors)
            ddp.load_compression_state_dict(
                {**ddp.compression_state_dict(), "decided": True, "plan": plan.to_json()}
            )
        if case == "nan" and rank == 1:
            ddp.module.wide.weight.register_hook(lambda grad: grad * float("nan"))
        train(ddp, optimizer, 1)
        if case == "late state":
            ddp.load_compression_state_dict(ddp.compression_state_dict())
        if case == "late nan":
            steps = steps_to_steady(ddp, optimizer)
            train(ddp, optimizer, 4, first=steps)
            if rank == 1:
                ddp.module.wide.weight.register_hook(lambda grad: grad * float("nan"))
            train(ddp, optimizer, 1, first=steps)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def over_our_backend(given: str | dict[str, Any]) -> list[str]:
    """Return what differs between trainings over Gloo and over the backend "syncline"."""
    measured, optimizer = begun(given, check=False)
    steps_to_steady(measured, optimizer)
    # What is measured decides which plan runs, and from which step on.
    known = {"profile": measured.profile, "network": measured.network}
    found = []
    for backend in ("gloo", "syncline"):
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        ddp, optimizer = begun(given, check=False, process_group=group, **known)
        steps = steps_to_steady(ddp, optimizer)
        assert ddp.plan is not None
        train(ddp, optimizer, 30 - steps, first=steps)
        found.append(parameters_of(ddp))
        ddp.synchronize()
        del ddp
    gloo, ours = found
    return [name for name in gloo if not torch.equal(gloo[name], ours[name])]


class Unbounded(DenseTransport):
    """Hands its messages over as a GPU's stream does, without the host waiting for each."""

    bounded = False

    def __init__(self, group: dist.ProcessGroup) -> None:
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


def as_on_a_gpu(given: str | dict[str, Any], overlap: bool) -> list[str]:
    """Return what differs between trainings as on a GPU, by operations of torch, and without."""
    found = []
    for on_device in (False, True):
        patches = (
            mock.patch.object(
                engine_executor, "transport_for", lambda group, _device: Unbounded(group)
            ),
            marked_memories(),
        )
        with ExitStack() as stack:
            stack.enter_context(measured_as(lambda _: 0.1))  # the plan begins in the same step
            for patch in patches if on_device else ():
                stack.enter_context(patch)
            # What is measured decides what is decoupled, whose sums a ring rounds otherwise.
            plan = compressed(plain_plan(), given) if isinstance(given, str) else None  # type: ignore[arg-type]
            ddp, optimizer = begun(given, check=False, plan=plan)
            if overlap:
                ddp.overlap(optimizer)
            steps = steps_to_steady(ddp, optimizer)
            assert ddp.plan is not None
            assert ddp.plan.is_lossy
            train(ddp, optimizer, 30 - steps, first=steps)
            found.append((parameters_of(ddp), ddp.compression_state_dict().get("residuals", {})))
            ddp.synchronize()
            del ddp
    return [
        name
        for expected, same in zip(*found, strict=True)
        for name in expected
        if not torch.equal(expected[name], same[name])
    ]


def scaled(
    kind: str, recipe: dict[str, Any], bad: int, several: int = 1, ahead: bool = False
) -> list[str]:
    """Return what differs between a training with a scaler and one that leaves a step out.

    Args:
        kind: ``"hook"`` or the wrapper.
        recipe: of the exchange.
        bad: the step in which a gradient of one rank and of one optimizer is infinite.
        several: optimizers, each of as many parameters as the others.
        ahead: whether gradients are taken where residuals will bring the weights.
    """
    net = {}
    states = {}
    for scaling in (True, False):
        torch.manual_seed(3)
        module = MODELS["plain"]()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=scaling)
        model: Any
        if kind == "hook":
            model = TorchDDP(module, bucket_cap_mb=0.01)
            state = GTopKState(model, Recipe(**recipe), scaler=scaler)
            model.register_comm_hook(state, gtopk)
            state_dict = state.state_dict
        else:
            model = DistributedDataParallel(module, compression=Recipe(**recipe), check=False)
            model.scaled_by(scaler)
            state_dict = model.compression_state_dict
        parameters = [*model.parameters()]
        optimizers = [torch.optim.SGD(parameters[n::several], lr=0.05) for n in range(several)]
        for optimizer in optimizers if ahead else ():
            (state if kind == "hook" else model).step_ahead(optimizer)
        for step in range(bad + 6):
            if step == bad and not scaling:
                continue
            inputs, targets = batch(step)
            inputs = inputs * 0.5
            model.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            if step == bad and dist.get_rank() == 1:
                loss = loss + module.norm.weight.sum() * float("inf")
            scaler.scale(loss).backward()
            if step == bad:
                assert all(bool(p.grad.isinf().all()) for p in module.parameters())
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        net[scaling] = dict(module.named_parameters())
        states[scaling] = state_dict()
    factor = states[True]["scale"]
    assert factor > 1
    differing = [n for n, p in net[True].items() if not torch.equal(p, net[False][n])]
    again = GTopKState(module, Recipe(**recipe))  # without a scaler
    again.load_state_dict(states[True])
    for name, residual in states[True]["residuals"].items():
        others = states[False], again.state_dict()
        if not all(torch.equal(residual / factor, other["residuals"][name]) for other in others):
            differing.append(f"residual of {name}")
    return differing


def scaled_in_8_bits(steps: int, bad: int) -> dict[str, Any]:
    """Train with a scaler, which skips one step; return the end, and the scale of residuals."""
    ddp, optimizer = begun("int8", check=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    ddp.scaled_by(scaler)
    scales = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs * 0.5), targets)
        if step == bad and dist.get_rank() == 1:
            loss = loss + ddp.module.norm.weight.sum() * float("inf")
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = ddp.compression_state_dict()
    return {
        "scales": scales,
        "scale": state["scale"],
        "largest": max(float(r.abs().max()) for r in state["residuals"].values()) / state["scale"],
        "parameters": {n: p.detach().numpy().copy() for n, p in ddp.module.named_parameters()},
    }
