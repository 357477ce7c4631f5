"""The training loop in every form."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncline.plan.profile import Norm
from tests.train.overlap.loop import (
    ADAM,
    MOMENTUM,
    ROUNDS,
    SHARES,
    STATIC,
    Loop,
    Make,
    no_shards,
    refused,
)
from tests.train.overlap.overlap_models import Net, batch, loss_of
from tests.train.overlap.overlap_modules import SeveralTypes
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side
from tests.train.overlap.parts import (
    Training,
    accumulate,
    backward,
    evaluate,
    every,
    finish,
    halve_gradients,
    nothing,
    once,
    reloaded,
    step,
    zero,
    zero_in_place,
)


def zeroed_late(t: Training) -> None:
    loss = t.loss()
    t.optimizer.zero_grad(set_to_none=False)
    t.backward(loss)


def not_exchanged(t: Training) -> None:
    with t.ddp.no_sync():
        t.backward(t.loss(1))


def keep_graph(t: Training) -> None:
    t.kept = t.loss()
    t.kept.backward(retain_graph=True)


def through_the_old_graph(t: Training) -> None:
    try:
        t.kept.backward()
        t.note("no error")
    except RuntimeError as error:
        # The first weight that is read, before any gradient is there.
        t.note("error", str(error).partition(" is at version")[0])
    t.optimizer.zero_grad()


def synced_by_hand(t: Training) -> None:
    for micro in range(2):
        t.ddp.require_backward_grad_sync = micro == 1
        t.backward(t.loss(micro))


def roll_out(t: Training) -> None:
    with torch.no_grad():
        t.note("rollout", t.loss(1), t.loss(2))


def step_after_a_forward_pass(t: Training) -> None:
    t.optimizer.zero_grad()
    t.loss(1)
    t.optimizer.step()


def step_under(t: Training) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        t.optimizer.step()


PASSES = {
    "`zero_grad()` after `step`": Loop(zero=nothing, after=zero),
    "`zero_grad(set_to_none=False)` before the forward pass": Loop(zero=zero_in_place),
    "`zero_grad(set_to_none=False)` after the forward pass": Loop(
        zero=nothing, backward=zeroed_late
    ),
    "`zero_grad(set_to_none=False)` of a foreach optimizer": Loop(
        make=partial(AdamW, lr=0.01, foreach=True), zero=nothing, after=zero_in_place
    ),
    "`model.zero_grad()`": Loop(
        zero=lambda t: (t.ddp if t.step % 2 else t.net).zero_grad(set_to_none=t.step % 3 == 0)
    ),
    "never `zero_grad`: gradients add up": no_shards(make=partial(SGD, lr=0.01), zero=nothing),
    "`gradient_as_bucket_view=True`": Loop(
        ddp={"gradient_as_bucket_view": True},
        zero=lambda t: t.optimizer.zero_grad(set_to_none=t.step % 2 == 0),
    ),
    "gradient accumulation under `no_sync`": Loop(backward=accumulate),
    "gradient accumulation under `no_sync`, gradients zeroed in place": Loop(
        zero=zero_in_place, backward=partial(accumulate, passes=2)
    ),
    "gradient accumulation without `no_sync`": Loop(before=lambda t: t.backward(t.loss(1))),
    "a `no_sync` pass after the exchanged one, before `step`": refused(before=not_exchanged),
    "several forward passes before one backward pass": Loop(
        backward=lambda t: t.backward(t.loss(0) + t.loss(1))
    ),
    "a forward pass under gradients without a backward pass, in between": Loop(
        after=lambda t: t.note("loss", t.loss(1))
    ),
    "two backward passes through one graph, the second not exchanged": refused(
        backward=keep_graph, before=lambda t: t.backward(0.1 * t.kept)
    ),
    "`backward` of a penalty beside the model's own": Loop(
        SYNCHRONIZES,
        first=zero,
        zero=lambda t: (0.01 * sum(p.square().sum() for p in t.parameters)).backward(),
    ),
    "a second backward pass through an old graph after `step`: torch's error": Loop(
        backward=keep_graph, after=every(5, through_the_old_graph)
    ),
    "`require_backward_grad_sync` set by hand": Loop(backward=synced_by_hand),
    "forward passes in training mode without gradients, in between (rollouts)": Loop(
        SYNCHRONIZES, first=roll_out
    ),
    "a new optimizer in mid-training, not overlapped": refused(
        first=once(12, lambda t: setattr(t, "optimizer", SGD(t.parameters, lr=0.05)))
    ),
    "training in `eval` mode": Loop(first=lambda t: t.ddp.train(t.step < 10)),
    "two steps in a row": no_shards(after=every(4, step)),
    "a step without a backward pass before it": Loop(
        SYNCHRONIZES, first=zero, zero=step, after=every(3, step_after_a_forward_pass)
    ),
    "a backward pass without a step, now and then": Loop(
        update=lambda t: t.optimizer.step() if t.step % 3 else None
    ),
    "`step` under `no_grad`, under `autocast`": Loop(update=step_under),
}


def clip(t: Training, limit: float = 0.1, *args: Any, **kwargs: Any) -> torch.Tensor:
    return clip_grad_norm_(t.parameters, limit, *args, **kwargs)


def clip_in_two_calls(t: Training) -> float:
    total = nn.utils.get_total_norm(t.gradients)
    nn.utils.clip_grads_with_norm_(t.parameters, 0.1, total)
    return total.item()


def clip_by_group(t: Training) -> list[torch.Tensor]:
    return [clip_grad_norm_(some, 0.1) for some in (t.parameters[:3], t.parameters[3:])]


def clip_by_hand(t: Training) -> torch.Tensor:
    total = torch.norm(torch.stack([torch.norm(g, 2) for g in t.gradients]), 2)
    for gradient in t.gradients:
        gradient.mul_(0.1 / (total + 1e-6))
    return total


def clip_and_read(t: Training) -> list[torch.Tensor]:
    clip(t)
    return [g.clone() for g in t.gradients]


def read_on_one_rank_and_clip(t: Training) -> torch.Tensor:
    if t.side.rank == t.step % 2:
        assert all(g.sum().isfinite() for g in t.gradients)
    return clip(t)


def clipping(
    how: Callable[[Training], Any],
    happens: str = OVERLAPS,
    norm: Norm | None = "2",
    *,
    near: bool = True,
) -> Loop:
    def before(t: Training) -> None:
        found = how(t)
        if t.side.near:  # torch adds up a norm in float32, in another order
            t.note("norm", found)

    return Loop(happens, before=before, norm=norm, near=near)


def backward_scaled(t: Training) -> None:
    loss = t.loss() * (float("inf") if t.step % 7 == 6 else 1.0)
    t.backward(t.kept.scale(loss))


def step_scaled(t: Training) -> None:
    if t.step % 2:
        t.kept.unscale_(t.optimizer)
        clip(t, 1.0)
    t.kept.step(t.optimizer)
    t.kept.update()
    t.note("scale", t.kept.get_scale())


scaling = partial(
    Loop,
    start=lambda t: t.keep(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)),
    backward=backward_scaled,
    update=step_scaled,
    norm="2",
    near=True,
)


def cast(model: nn.Module, step: int = 0) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, step)


CLIPPING = {
    "`clip_grad_norm_`": clipping(clip),
    "the same, where the norm is below the limit": clipping(partial(clip, limit=1e6), near=False),
    "`clip_grad_norm_` with `foreach=True`": clipping(partial(clip, foreach=True)),
    "`clip_grad_norm_` with `foreach=False`": clipping(partial(clip, foreach=False)),
    "`clip_grad_norm_` of the 1-norm": clipping(partial(clip, norm_type=1), norm="1"),
    "`clip_grad_norm_` of the max norm": clipping(partial(clip, norm_type="inf"), norm="inf"),
    "`clip_grad_norm_`, gradients of several dtypes": replace(
        clipping(clip), model=SeveralTypes, sharded=ROUNDS
    ),
    "`error_if_nonfinite`": clipping(partial(clip, error_if_nonfinite=True)),
    "`get_total_norm` and `clip_grads_with_norm_`, logged": clipping(clip_in_two_calls),
    "clipping the norm of each group of parameters": clipping(clip_by_group),
    "clipping the norm by hand": clipping(clip_by_hand),
    "a norm of another order": clipping(partial(clip, norm_type=3), SYNCHRONOUS, near=False),
    "clipping the norm, and reading the gradients": clipping(clip_and_read, SYNCHRONOUS),
    "`clip_grad_value_`": clipping(
        lambda t: clip_grad_value_(t.parameters, 0.01), norm=None, near=False
    ),
    "gradients multiplied in place before `step`": clipping(halve_gradients, norm=None, near=False),
    "`clip_grad_norm_` of a norm that the plan does not expect": clipping(
        partial(clip, limit=0.5), SYNCHRONOUS, norm=None, near=False
    ),
    "`clip_grad_norm_` after one rank, another at each step, has read its gradients": clipping(
        read_on_one_rank_and_clip
    ),
    "clipping every tenth step only": Loop(before=every(10, clip)),
    "`GradScaler`, with steps that it skips": scaling(),
    "`GradScaler` with a fused optimizer": scaling(
        SYNCHRONOUS, make=partial(Adam, lr=0.01, fused=True)
    ),
    "`autocast` of the forward pass to bfloat16": Loop(loss=cast, make=partial(AdamW, lr=0.01)),
}


def scheduled(
    schedule: Callable[[torch.optim.Optimizer], Any], make: Make = MOMENTUM, *, early: bool = False
) -> Loop:
    """Make a schedule before the optimizer is overlapped, or after it."""

    def after(t: Training) -> None:
        t.kept.step()
        t.note("rates", [group["lr"] for group in t.optimizer.param_groups])

    when = {"early" if early else "start": lambda t: t.keep(schedule(t.optimizer))}
    return Loop(make=make, after=after, **when)  # type: ignore[arg-type]


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
    then = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [8])


def set_by_hand(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] = 0.1 / (t.step + 1)
        group["weight_decay"] = 0.01 * (t.step % 3)


EMA = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def by_own_function(net: nn.Module) -> AveragedModel:
    steps = itertools.count(1)
    return AveragedModel(net, avg_fn=lambda mean, p, _: mean + (p - mean) / next(steps))


def update_average(t: Training) -> None:
    t.kept.update_parameters(t.net)


def note_average(t: Training) -> None:
    t.note("average", t.kept.state_dict() if isinstance(t.kept, nn.Module) else t.kept)
    finish(t)


def averaged(
    make: Callable[[nn.Module], AveragedModel], happens: str = OVERLAPS, used_every: int = 0
) -> Loop:
    """Average after each step; use the average every few steps."""

    def after(t: Training) -> None:
        update_average(t)
        if used_every and t.step % used_every == 0:
            with torch.no_grad():
                t.note("by the average", t.kept(batch(t.step)[0]))

    return Loop(happens, start=lambda t: t.keep(make(t.net)), after=after, end=note_average)


def copy_weights(t: Training) -> None:
    t.kept = [p.detach().clone() for p in t.parameters]


def average_by_us(t: Training) -> None:
    t.side.average(t.ddp, t.kept, 0.1 / (1 + t.step))
    if t.step % 10 == 1:
        t.note("average", t.kept)


def drop(t: Training) -> None:
    t.side.wrapped.clear()
    t.ddp = t.optimizer = None
    gc.collect()
    t.note("average", t.kept)


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


def average_into_teacher(t: Training) -> None:
    pairs = zip(t.net.teacher.parameters(), t.net.student.parameters(), strict=True)
    with torch.no_grad():
        for mean, p in pairs:
            mean.mul_(0.9).add_(p, alpha=0.1)


def average_and_renorm(t: Training) -> None:
    def renormed(module: Any, _: Any) -> None:
        module.weight.data = torch.renorm(module.weight.data, 2, 0, 0.9)

    t.kept = EMA(t.net)
    t.net.leave.register_forward_pre_hook(renormed)


def backward_after_a_change(t: Training) -> None:
    loss = t.loss()
    with torch.no_grad():
        t.net.enter.bias.clamp_(-0.1, 0.1)
    t.backward(loss)


def average_and_change(t: Training) -> None:
    update_average(t)
    if t.step % 5 == 0:
        with torch.no_grad():
            t.net.leave.weight.clamp_(-0.2, 0.2)


def average_by_hand(t: Training) -> None:
    for kept, p in zip(t.kept, t.parameters, strict=True):
        kept.mul_(0.9).add_(p.data, alpha=0.1)


OVER_TIME = {
    "a learning-rate schedule made before `overlap`": scheduled(
        lambda o: lr_scheduler.StepLR(o, 3, 0.7), early=True
    ),
    "a learning-rate schedule made after `overlap`": scheduled(
        lambda o: lr_scheduler.CosineAnnealingLR(o, 30)
    ),
    "`OneCycleLR`, which changes momentum too": scheduled(
        lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=40)
    ),
    "`OneCycleLR` with Adam, made before `overlap`": scheduled(
        lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=40), ADAM, early=True
    ),
    "warm-up followed by a schedule, `SequentialLR`": scheduled(warmed_up),
    "a schedule of a learning rate that is a tensor": scheduled(
        lambda o: lr_scheduler.ExponentialLR(o, 0.9), lambda p: AdamW(p, lr=torch.tensor(0.01))
    ),
    "hyper-parameters changed by hand after `step`": Loop(after=set_by_hand),
    "an average of the weights after each step (`AveragedModel`)": averaged(EMA),
    "the same with buffers, and with a mean of all steps": averaged(
        partial(AveragedModel, use_buffers=True)
    ),
    "the same with an `avg_fn` of the user's own": averaged(by_own_function, SYNCHRONIZES),
    "the same, used every tenth step": averaged(AveragedModel, used_every=10),
    "the same, used in every step": averaged(EMA, SYNCHRONIZES, used_every=1),
    "an average of the weights through `model.average`": Loop(
        start=copy_weights, after=average_by_us, end=note_average
    ),
    "the same, used after the wrapper is gone": Loop(
        start=copy_weights, after=average_by_us, end=drop
    ),
    "an average of one half of the model in its other half (BYOL, MoCo)": Loop(
        SYNCHRONIZES,
        model=Taught,
        make=lambda all_: MOMENTUM(p for p in all_ if p.requires_grad),
        after=average_into_teacher,
    ),
    "weights changed after they were averaged: after `step`, by a hook, after the forward pass": (
        Loop(
            start=average_and_renorm,
            backward=backward_after_a_change,
            after=average_and_change,
            end=note_average,
        )
    ),
    "an average of the weights by hand, through `.data`": Loop(
        SYNCHRONIZES, start=copy_weights, after=average_by_hand, end=note_average
    ),
    "an average of the weights just before the next step": replace(
        averaged(AveragedModel), before=update_average, after=nothing
    ),
}


def infer(t: Training) -> None:
    with torch.inference_mode():
        t.note("loss", loss_of(t.net, t.step, 1))
        t.note("output", t.net.enter(batch(t.step)[0]))


def note_states(t: Training) -> None:
    if t.step % 6 == 5:
        t.note("optimizer", t.optimizer.state_dict())
    if t.step % 6 == 2:
        t.note("model", t.ddp.state_dict())


def resume(t: Training) -> None:
    if t.step == 7:
        t.kept = copy.deepcopy((t.ddp.state_dict(), t.optimizer.state_dict()))
    if t.step == 9:
        t.optimizer.load_state_dict(t.kept[1])
        t.ddp.load_state_dict(t.kept[0])
    if t.step == 12:
        t.net.load_state_dict(t.net.state_dict())


def save(t: Training) -> None:
    if t.step % 5 != 4 and t.step != 1:
        return
    saved = t.net, t.optimizer, t.net.enter.weight, (t.net, t.optimizer)
    net, optimizer, weight, _ = (reloaded(each, weights_only=False) for each in saved)
    t.note("loaded", net.state_dict(), loss_of(net, t.step), optimizer.state_dict(), weight)
    t.note("kind", isinstance(weight, nn.Parameter))


def copied(t: Training) -> None:
    t.note("copy", copy.deepcopy(t.optimizer if t.step % 2 else t.net).state_dict())


def fail(*_: Any) -> None:
    raise ArithmeticError


def fail_once(t: Training) -> None:
    handle = t.net.norm.register_forward_hook(fail)
    try:
        t.loss()
    except ArithmeticError:
        t.note("failed")
    handle.remove()
    if t.step % 2:
        loss_of(t.net, t.step, 1).backward()  # not exchanged
        t.optimizer.zero_grad()


def join(t: Training, passes: int, steps: int) -> None:
    with t.ddp.join():
        for more in range(steps + t.side.rank):
            zero(t)
            accumulate(t, passes, 3 * (1 + more))
            step(t)


def not_joined(side: Side) -> None:
    t = Loop().begin(side)
    steps = iter(side.steps)

    def train(count: int) -> None:
        for _ in itertools.islice(steps, count):
            for part in zero, backward, step:
                part(t)

    with Join([t.ddp], enable=False):
        train(5)
    with t.ddp.join():
        train(1)
    with t.ddp.join(enable=False):
        train(99)
    finish(t)


SCENARIOS = {
    **PASSES,
    **CLIPPING,
    **OVER_TIME,
    "evaluation in between, under `no_grad`": Loop(after=every(4, evaluate)),
    "inference through `model.module`, under `inference_mode`": Loop(
        make=ADAM, after=every(4, infer)
    ),
    "`state_dict` of model and optimizer between steps": no_shards(make=ADAM, after=note_states),
    "`load_state_dict` of model and optimizer between steps": no_shards(make=ADAM, after=resume),
    "`torch.save` of the whole model, the wrapper, the optimizer": Loop(
        OVERLAPS, SHARES, make=ADAM, after=save
    ),
    "`copy.deepcopy` of model and optimizer in between": Loop(
        OVERLAPS, SHARES, make=ADAM, after=every(5, copied)
    ),
    "an exception in the forward pass, caught": Loop(first=zero, zero=every(5, fail_once)),
    "`join` in between": no_shards(first=once(10, partial(join, passes=1, steps=2))),
    "`join` in between, `static_graph=True`, accumulation from the second step on": no_shards(
        ddp=STATIC,
        first=once(9, partial(join, passes=3, steps=4)),
        backward=lambda t: accumulate(t, min(t.step, 2) + 1),
    ),
    "`join` and `Join` with `enable=False` around all steps": no_shards(whole=not_joined),
}
