"""Scripts with every form of the training loop."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_models import Net, batch, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side


def begin(
    side: Side, make: Callable[[Any], torch.optim.Optimizer] | None = None, **arguments: Any
) -> tuple[Any, Any]:
    """Wrap a model and overlap an optimizer with momentum."""
    ddp = side.wrap(Net(), loss_of, **arguments)
    make = make or (lambda p: SGD(p, lr=0.1, momentum=0.9))
    return ddp, side.overlap(ddp, make(ddp.parameters()))


Does = Callable[[Side, Any, Any, int], None]


def before_step(text: str, happens: str, **arguments: Any) -> Callable[[Does], Does]:
    """Make a row of what a training loop does before each step."""
    return _in_a_loop(text, happens, before=True, arguments=arguments)


def after_step(text: str, happens: str, **arguments: Any) -> Callable[[Does], Does]:
    """Make a row of what a training loop does after each step."""
    return _in_a_loop(text, happens, before=False, arguments=arguments)


def _in_a_loop(
    text: str, happens: str, *, before: bool, arguments: dict[str, Any]
) -> Callable[[Does], Does]:
    def add(does: Does) -> Does:
        def script(side: Side) -> None:
            ddp, optimizer = begin(side, **arguments)
            for step in side.steps:
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                if before:
                    does(side, ddp, optimizer, step)
                optimizer.step()
                if not before:
                    does(side, ddp, optimizer, step)
            side.finish(ddp, optimizer)

        script.__module__ = does.__module__  # its group in the table
        feature(text, happens)(script)
        return does

    return add


# ---------------------------------------------------------------------- zero_grad


@feature("`zero_grad()` after `step`", OVERLAPS)
def zero_after(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.finish(ddp, optimizer)


@feature("`zero_grad(set_to_none=False)` before the forward pass", OVERLAPS)
def zero_in_place(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad(set_to_none=False)
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`zero_grad(set_to_none=False)` after the forward pass", OVERLAPS)
def zero_late(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        loss = loss_of(ddp, step)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`zero_grad(set_to_none=False)` of a foreach optimizer", OVERLAPS)
def zero_foreach(side: Side) -> None:
    ddp, optimizer = begin(side, lambda p: AdamW(p, lr=0.01, foreach=True))
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    side.finish(ddp, optimizer)


@feature("`model.zero_grad()`", OVERLAPS)
def zero_model(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        (ddp if step % 2 else ddp.module).zero_grad(set_to_none=step % 3 == 0)
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("never `zero_grad`: gradients add up", OVERLAPS)
def zero_never(side: Side) -> None:
    ddp, optimizer = begin(side, lambda p: SGD(p, lr=0.01))
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`gradient_as_bucket_view=True`", OVERLAPS)
def as_views(side: Side) -> None:
    ddp, optimizer = begin(side, gradient_as_bucket_view=True)
    for step in side.steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- several passes


@feature("gradient accumulation under `no_sync`", OVERLAPS)
def accumulate(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        with ddp.no_sync():
            for micro in range(2):
                loss_of(ddp, step, micro).backward()
        loss_of(ddp, step, 2).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("gradient accumulation under `no_sync`, gradients zeroed in place", OVERLAPS)
def accumulate_in_place(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad(set_to_none=False)
        with ddp.no_sync():
            loss_of(ddp, step, 0).backward()
        loss_of(ddp, step, 1).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("gradient accumulation without `no_sync`", OVERLAPS)
def accumulate_synced(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(ddp, step, micro).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("a `no_sync` pass after the exchanged one, before `step`", SYNCHRONOUS)
def accumulate_after(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step, 0).backward()
        with ddp.no_sync():
            loss_of(ddp, step, 1).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("several forward passes before one backward pass", OVERLAPS)
def forwards(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step, 0) + loss_of(ddp, step, 1)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


@after_step("a forward pass under gradients without a backward pass, in between", OVERLAPS)
def forward_unused(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.note("loss", loss_of(ddp, step, 1))


@feature("two backward passes through one graph, the second not exchanged", SYNCHRONOUS)
def backward_twice(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`backward` of a penalty beside the model's own", SYNCHRONIZES)
def penalty(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        (0.01 * sum(p.square().sum() for p in ddp.parameters())).backward()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("a second backward pass through an old graph after `step`: torch's error", OVERLAPS)
def stale_graph(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward(retain_graph=True)
        optimizer.step()
        if step % 5 == 4:
            try:
                loss.backward()
                side.note("no error")
            except RuntimeError as error:
                # The first weight that is read, before any gradient is there.
                side.note("error", str(error).partition(" is at version")[0])
            optimizer.zero_grad()
    side.finish(ddp, optimizer)


@feature("`require_backward_grad_sync` set by hand", OVERLAPS)
def sync_by_hand(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        for micro in range(2):
            ddp.require_backward_grad_sync = micro == 1
            loss_of(ddp, step, micro).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("forward passes in training mode without gradients, in between (rollouts)", SYNCHRONIZES)
def rollouts(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        with torch.no_grad():
            side.note("rollout", loss_of(ddp, step, 1), loss_of(ddp, step, 2))
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("a new optimizer in mid-training, not overlapped", SYNCHRONOUS)
def new_optimizer(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        if step == 12:
            optimizer = SGD(ddp.parameters(), lr=0.05)
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("training in `eval` mode", OVERLAPS)
def eval_mode(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        ddp.train(step < 10)
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- steps


@after_step("two steps in a row", OVERLAPS)
def two_steps(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 4 == 3:
        optimizer.step()


@feature("a step without a backward pass before it", SYNCHRONIZES)
def idle_step(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        optimizer.step()
        loss_of(ddp, step).backward()
        optimizer.step()
        if step % 3 == 2:
            optimizer.zero_grad()
            loss_of(ddp, step, 1)
            optimizer.step()
    side.finish(ddp, optimizer)


@feature("a backward pass without a step, now and then", OVERLAPS)
def skipped_step(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        if step % 3:
            optimizer.step()
    side.finish(ddp, optimizer)


@feature("`step` under `no_grad`, under `autocast`", OVERLAPS)
def step_under(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- clipping and scaling


def _clip(side: Side, clip: Callable[[Any], Any], optimizer_of: Any = None) -> None:
    ddp, optimizer = begin(side, optimizer_of)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        found = clip(ddp)
        if side.near:  # torch adds up a norm in float32, in another order
            side.note("norm", found)
        optimizer.step()
    side.finish(ddp, optimizer)


def _norm(ddp: Any, limit: float = 0.1, *args: Any, **kwargs: Any) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(ddp.parameters(), limit, *args, **kwargs)


def _in_two_calls(ddp: Any) -> float:
    gradients = [p.grad for p in ddp.parameters()]
    total = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(ddp.parameters(), 0.1, total)
    return total.item()


def _by_group(ddp: Any) -> list[torch.Tensor]:
    parameters = list(ddp.parameters())
    return [nn.utils.clip_grad_norm_(some, 0.1) for some in (parameters[:3], parameters[3:])]


def _by_hand(ddp: Any) -> torch.Tensor:
    gradients = [p.grad for p in ddp.parameters()]
    total = torch.norm(torch.stack([torch.norm(g, 2) for g in gradients]), 2)
    for gradient in gradients:
        gradient.mul_(0.1 / (total + 1e-6))
    return total


def _and_read(ddp: Any) -> list[torch.Tensor]:
    _norm(ddp)
    return [p.grad.clone() for p in ddp.parameters()]


def _halved(ddp: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad *= 0.5


for _text, _happens, _kind, _near, _how in (
    ("`clip_grad_norm_`", OVERLAPS, "2", True, _norm),
    (
        "the same, where the norm is below the limit",
        OVERLAPS,
        "2",
        False,
        partial(_norm, limit=1e6),
    ),
    ("`clip_grad_norm_` with `foreach=True`", OVERLAPS, "2", True, partial(_norm, foreach=True)),
    ("`clip_grad_norm_` with `foreach=False`", OVERLAPS, "2", True, partial(_norm, foreach=False)),
    ("`clip_grad_norm_` of the 1-norm", OVERLAPS, "1", True, partial(_norm, norm_type=1)),
    ("`clip_grad_norm_` of the max norm", OVERLAPS, "inf", True, partial(_norm, norm_type="inf")),
    ("`error_if_nonfinite`", OVERLAPS, "2", True, partial(_norm, error_if_nonfinite=True)),
    ("`get_total_norm` and `clip_grads_with_norm_`, logged", OVERLAPS, "2", True, _in_two_calls),
    ("clipping the norm of each group of parameters", OVERLAPS, "2", True, _by_group),
    ("clipping the norm by hand", OVERLAPS, "2", True, _by_hand),
    ("a norm of another order", SYNCHRONOUS, "2", False, partial(_norm, norm_type=3)),
    ("clipping the norm, and reading the gradients", SYNCHRONOUS, "2", True, _and_read),
    ("`clip_grad_value_`", OVERLAPS, None, False, lambda d: clip_grad_value_(d.parameters(), 0.01)),
    ("gradients multiplied in place before `step`", OVERLAPS, None, False, _halved),
):
    feature(_text, _happens, norm=_kind, near=_near)(partial(_clip, clip=_how))  # type: ignore[arg-type]


@feature("`clip_grad_norm_` of a norm that the plan does not expect", SYNCHRONOUS)
def clip_unexpected(side: Side) -> None:
    _clip(side, lambda ddp: _norm(ddp, 0.5))


@feature(
    "`clip_grad_norm_` after one rank, another at each step, has read its gradients",
    OVERLAPS,
    norm="2",
    near=True,
)
def clip_read_on_one_rank(side: Side) -> None:
    def clip(ddp: Any) -> torch.Tensor:
        if side.rank == side.step % 2:
            assert all(p.grad.sum().isfinite() for p in ddp.parameters())
        return _norm(ddp)

    _clip(side, clip)


@before_step("clipping every tenth step only", OVERLAPS)
def clip_rarely(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 10 == 9:
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)


def _scale(side: Side, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    ddp, optimizer = begin(side, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step) * (float("inf") if step % 7 == 6 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        side.note("scale", scaler.get_scale())
    side.finish(ddp, optimizer)


@feature("`GradScaler`, with steps that it skips", OVERLAPS, norm="2", near=True)
def scaler(side: Side) -> None:
    _scale(side, lambda p: SGD(p, lr=0.1, momentum=0.9))


@feature("`GradScaler` with a fused optimizer", SYNCHRONOUS, norm="2", near=True)
def scaler_fused(side: Side) -> None:
    _scale(side, lambda p: Adam(p, lr=0.01, fused=True))


@feature("`autocast` of the forward pass to bfloat16", OVERLAPS)
def autocast(side: Side) -> None:
    def cast(model: nn.Module, step: int = 0) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, step)

    ddp = side.wrap(Net(), cast)
    optimizer = side.overlap(ddp, AdamW(ddp.parameters(), lr=0.01))
    for step in side.steps:
        optimizer.zero_grad()
        loss = cast(ddp, step)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- schedules


def _schedule(side: Side, make: Any, *, before: bool, optimizer_of: Any = None) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = (optimizer_of or (lambda p: SGD(p, lr=0.1, momentum=0.9)))(ddp.parameters())
    schedule = make(optimizer) if before else None
    optimizer = side.overlap(ddp, optimizer)
    schedule = schedule or make(optimizer)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        side.note("loss", loss, [group["lr"] for group in optimizer.param_groups])
    side.finish(ddp, optimizer)


@feature("a learning-rate schedule made before `overlap`", OVERLAPS)
def schedule_before(side: Side) -> None:
    _schedule(side, lambda o: lr_scheduler.StepLR(o, 3, 0.7), before=True)


@feature("a learning-rate schedule made after `overlap`", OVERLAPS)
def schedule_after(side: Side) -> None:
    _schedule(side, lambda o: lr_scheduler.CosineAnnealingLR(o, 30), before=False)


@feature("`OneCycleLR`, which changes momentum too", OVERLAPS)
def one_cycle(side: Side) -> None:
    _schedule(side, lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=40), before=False)


@feature("`OneCycleLR` with Adam, made before `overlap`", OVERLAPS)
def one_cycle_adam(side: Side) -> None:
    _schedule(
        side,
        lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=40),
        before=True,
        optimizer_of=lambda p: Adam(p, lr=0.01),
    )


@feature("warm-up followed by a schedule, `SequentialLR`", OVERLAPS)
def sequential(side: Side) -> None:
    def make(o: torch.optim.Optimizer) -> Any:
        first = lr_scheduler.LinearLR(o, 0.1, 1.0, 8)
        return lr_scheduler.SequentialLR(o, [first, lr_scheduler.ExponentialLR(o, 0.9)], [8])

    _schedule(side, make, before=False)


@feature("a schedule of a learning rate that is a tensor", OVERLAPS)
def tensor_rate(side: Side) -> None:
    _schedule(
        side,
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        before=False,
        optimizer_of=lambda p: AdamW(p, lr=torch.tensor(0.01)),
    )


@after_step("hyper-parameters changed by hand after `step`", OVERLAPS)
def by_hand(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)
        group["weight_decay"] = 0.01 * (step % 3)


# ---------------------------------------------------------------------- averages


def _averaged(side: Side, *, every: int | None = None, **arguments: Any) -> None:
    """Average after each step; use the average every few steps."""
    ddp, optimizer = begin(side)
    mean = AveragedModel(ddp.module, **arguments)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        mean.update_parameters(ddp.module)
        if every is not None and step % every == 0:
            with torch.no_grad():
                side.note("by the average", mean(batch(step)[0]))
    side.note("average", mean.state_dict())
    side.finish(ddp, optimizer)


@feature("an average of the weights after each step (`AveragedModel`)", OVERLAPS)
def averaged(side: Side) -> None:
    _averaged(side, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@feature("the same with buffers, and with a mean of all steps", OVERLAPS)
def averaged_with_buffers(side: Side) -> None:
    _averaged(side, use_buffers=True)


@feature("the same with an `avg_fn` of the user's own", SYNCHRONIZES)
def averaged_by_own_function(side: Side) -> None:
    steps = iter(range(1, 1000))
    _averaged(side, avg_fn=lambda mean, p, _: mean + (p - mean) / next(steps))


@feature("the same, used every tenth step", OVERLAPS)
def averaged_and_used(side: Side) -> None:
    _averaged(side, every=10)


@feature("the same, used in every step", SYNCHRONIZES)
def averaged_and_used_at_once(side: Side) -> None:
    _averaged(side, every=1, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@feature("an average of the weights through `model.average`", OVERLAPS)
def averaged_by_us(side: Side) -> None:
    ddp, optimizer = begin(side)
    shadow = [p.detach().clone() for p in ddp.parameters()]
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        side.average(ddp, shadow, 0.1 / (1 + step))
        if step % 10 == 1:
            side.note("average", shadow)
    side.note("average", shadow)
    side.finish(ddp, optimizer)


@feature("the same, used after the wrapper is gone", OVERLAPS)
def averaged_and_dropped(side: Side) -> None:
    ddp, optimizer = begin(side)
    shadow = [p.detach().clone() for p in ddp.parameters()]
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        side.average(ddp, shadow, 0.1)
    side.wrapped.clear()
    del ddp, optimizer
    gc.collect()
    side.note("average", shadow)


class Taught(nn.Module):
    """A model that also runs its own average, as BYOL's and MoCo's do."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        student: torch.Tensor = self.student(x)
        return student + 0.1 * taught


@feature("an average of one half of the model in its other half (BYOL, MoCo)", SYNCHRONIZES)
def averaged_inside(side: Side) -> None:
    model = Taught()
    ddp = side.wrap(model, loss_of)
    optimizer = side.overlap(ddp, SGD(model.student.parameters(), lr=0.1, momentum=0.9))
    pairs = list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in pairs:
                mean.mul_(0.9).add_(p, alpha=0.1)
    side.finish(ddp, optimizer)


@feature(
    "weights changed after they were averaged: after `step`, by a hook, after the forward pass",
    OVERLAPS,
)
def averaged_and_changed(side: Side) -> None:
    ddp, optimizer = begin(side)
    mean = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def renormed(module: Any, _: Any) -> None:
        module.weight.data = torch.renorm(module.weight.data, 2, 0, 0.9)

    ddp.module.leave.register_forward_pre_hook(renormed)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        with torch.no_grad():
            ddp.module.enter.bias.clamp_(-0.1, 0.1)
        loss.backward()
        optimizer.step()
        mean.update_parameters(ddp.module)
        if step % 5 == 0:
            with torch.no_grad():
                ddp.module.leave.weight.clamp_(-0.2, 0.2)
    side.note("average", mean.state_dict())
    side.finish(ddp, optimizer)


@feature("an average of the weights by hand, through `.data`", SYNCHRONIZES)
def averaged_by_hand(side: Side) -> None:
    ddp, optimizer = begin(side)
    shadow = [p.detach().clone() for p in ddp.parameters()]
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        for kept, p in zip(shadow, ddp.parameters(), strict=True):
            kept.mul_(0.9).add_(p.data, alpha=0.1)
    side.note("average", shadow)
    side.finish(ddp, optimizer)


@feature("an average of the weights just before the next step", OVERLAPS)
def averaged_late(side: Side) -> None:
    ddp, optimizer = begin(side)
    mean = AveragedModel(ddp.module)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        mean.update_parameters(ddp.module)
        optimizer.step()
    side.note("average", mean.state_dict())
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- in between


@after_step("evaluation in between, under `no_grad`", OVERLAPS)
def evaluation(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 4 == 3:
        ddp.eval()
        with torch.no_grad():
            side.note("loss", loss_of(ddp, step, 1))
        ddp.train()


@after_step(
    "inference through `model.module`, under `inference_mode`",
    OVERLAPS,
    make=lambda p: Adam(p, lr=0.01),
)
def inference(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 4 == 3:
        with torch.inference_mode():
            side.note("loss", loss_of(ddp.module, step, 1))
            side.note("output", ddp.module.enter(batch(step)[0]))


@after_step(
    "`state_dict` of model and optimizer between steps", OVERLAPS, make=lambda p: Adam(p, lr=0.01)
)
def checkpoints(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 6 == 5:
        side.note("optimizer", optimizer.state_dict())
    if step % 6 == 2:
        side.note("model", ddp.state_dict())


@feature("`load_state_dict` of model and optimizer between steps", OVERLAPS)
def resumed(side: Side) -> None:
    ddp, optimizer = begin(side, lambda p: Adam(p, lr=0.01))
    kept: Any = None
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        if step == 7:
            kept = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
        if step == 9:
            optimizer.load_state_dict(kept[1])
            ddp.load_state_dict(kept[0])
        if step == 12:
            ddp.module.load_state_dict(ddp.module.state_dict())
    side.finish(ddp, optimizer)


@after_step(
    "`torch.save` of the whole model, the wrapper, the optimizer",
    OVERLAPS,
    make=lambda p: Adam(p, lr=0.01),
)
def saved(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 5 == 4 or step == 1:
        for what in (ddp.module, optimizer, ddp.module.enter.weight, (ddp.module, optimizer)):
            file = io.BytesIO()
            torch.save(what, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            if isinstance(loaded, nn.Module):
                side.note("loaded", loaded.state_dict(), loss_of(loaded, step))
            elif isinstance(loaded, torch.optim.Optimizer):
                side.note("loaded", loaded.state_dict())
            else:
                side.note("loaded", loaded if isinstance(loaded, nn.Parameter) else None)


@after_step(
    "`copy.deepcopy` of model and optimizer in between", OVERLAPS, make=lambda p: Adam(p, lr=0.01)
)
def copied(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 5 == 4:
        twin = copy.deepcopy(optimizer if step % 2 else ddp.module)
        side.note("copy", twin.state_dict())


@feature("an exception in the forward pass, caught", OVERLAPS)
def exception(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad()
        if step % 5 == 4:
            handle = ddp.module.norm.register_forward_hook(_fail)
            try:
                loss_of(ddp, step)
            except ArithmeticError:
                side.note("failed")
            handle.remove()
            if step % 2:
                loss_of(ddp.module, step, 1).backward()  # not exchanged
                optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


def _fail(*_: Any) -> None:
    raise ArithmeticError


@feature("`join` in between", OVERLAPS)
def joined(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        if step == 10:
            with ddp.join():
                for micro in range(2 + side.rank):
                    optimizer.zero_grad()
                    loss_of(ddp, step, 1 + micro).backward()
                    optimizer.step()
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`join` in between, `static_graph=True`, accumulation from the second step on", OVERLAPS)
def joined_static(side: Side) -> None:
    ddp, optimizer = begin(side, static_graph=True)

    def train(step: int, *, before: int) -> None:
        optimizer.zero_grad()
        for micro in range(before):
            with ddp.no_sync():
                loss_of(ddp, step, micro).backward()
        loss_of(ddp, step, before).backward()
        optimizer.step()

    for step in side.steps:
        if step == 9:
            with ddp.join():
                for more in range(4 + side.rank):
                    train(20 + more, before=2)
        train(step, before=min(step, 2))
    side.finish(ddp, optimizer)


@feature("`join` and `Join` with `enable=False` around all steps", OVERLAPS)
def not_joined(side: Side) -> None:
    ddp, optimizer = begin(side)
    steps = iter(side.steps)

    def train(count: int) -> None:
        for _, step in zip(range(count), steps, strict=False):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()

    with Join([ddp], enable=False):
        train(5)
    with ddp.join():
        train(1)
    with ddp.join(enable=False):
        train(99)
    side.finish(ddp, optimizer)
