"""Scripts that read or change what is pending."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.optim import SGD, Adam, AdamW

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_loops import after_step, before_step, begin
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side


def adam(parameters: Any) -> torch.optim.Optimizer:
    return Adam(parameters, lr=0.01)


# ---------------------------------------------------------------------- gradients


@before_step("`p.grad` read after `backward`", SYNCHRONOUS)
def grad_after_backward(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.note("gradients", [p.grad for p in ddp.parameters()])


@after_step("`p.grad` read after `step`", SYNCHRONIZES)
def grad_after_step(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.note("norm", [p.grad.norm() for p in ddp.parameters()])


@after_step("`p.grad` read after `step`, every tenth step", OVERLAPS)
def grad_rarely(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 10 == 9:
        side.note("gradients", [p.grad for p in ddp.parameters()])


@before_step("`p.grad` changed in place before `step`", SYNCHRONOUS)
def grad_changed(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    for p in ddp.parameters():
        p.grad.mul_(0.5).add_(p, alpha=0.01)


@feature("`p.grad` changed in place after `step`", SYNCHRONIZES)
def grad_changed_late(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
        for p in ddp.parameters():
            p.grad *= 0.5
    side.finish(ddp, optimizer)


@before_step("some gradients set to None before `step`", OVERLAPS)
def grad_dropped(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    ddp.module.norm.weight.grad = None
    del ddp.module.norm.bias.grad


@before_step("some gradients replaced before `step`", OVERLAPS)
def grad_replaced(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    ddp.module.norm.weight.grad = torch.full_like(ddp.module.norm.weight, 0.01)
    ddp.module.leave.bias.grad = torch.zeros_like(ddp.module.leave.bias)


@feature("gradients replaced after `step`", OVERLAPS)
def grad_replaced_late(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
        for p in ddp.parameters():
            p.grad = torch.full(p.shape, 0.01 * step)
    side.finish(ddp, optimizer)


@feature("gradients zeroed in place, then replaced, after `step`", OVERLAPS)
def grad_zeroed_replaced(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        ddp.module.leave.bias.grad = torch.ones_like(ddp.module.leave.bias)
    side.finish(ddp, optimizer)


@feature("the gradients of the last step kept, and read after the next", OVERLAPS)
def grad_kept(side: Side) -> None:
    ddp, optimizer = begin(side)
    kept: list[Any] = []
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        kept.append([p.grad for p in ddp.parameters()])
        optimizer.step()
    side.note("kept", kept)
    side.finish(ddp, optimizer)


@feature("the gradients of two losses kept and combined", OVERLAPS)
def grad_combined(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        found = []
        for micro in range(2):
            optimizer.zero_grad()
            loss_of(ddp, step, micro).backward()
            found.append([p.grad for p in ddp.parameters()])
        if step % 2:
            for p, *both in zip(ddp.parameters(), *found, strict=True):
                p.grad = both[0] * 0.3 + both[1] * 0.7
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("gradients in a flat buffer of your own", SYNCHRONOUS)
def grad_flat(side: Side) -> None:
    ddp, optimizer = begin(side)
    flat = torch.zeros(sum(p.numel() for p in ddp.parameters()))
    at = 0
    for p in ddp.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for step in side.steps:
        flat.zero_()
        loss_of(ddp, step).backward()
        side.note("flat", flat)
        flat.clamp_(-0.01, 0.01)
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`p.grad.data` assigned before `step`", SYNCHRONOUS)
def grad_data(side: Side) -> None:
    ddp, optimizer = begin(side)
    for step in side.steps:
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        loss_of(ddp, step).backward()
        for p in ddp.parameters():
            p.grad.data = p.grad.data.clamp(-0.05, 0.05)
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("references to the first gradients, zeroed in place", SYNCHRONOUS)
def grad_held(side: Side) -> None:
    ddp, optimizer = begin(side)
    held: list[torch.Tensor] = []
    for step in side.steps:
        if not held:
            loss_of(ddp, step).backward()
            held = [p.grad for p in ddp.parameters()]
        torch._foreach_zero_(held)
        loss_of(ddp, step).backward()
        side.note("held", held)
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("hooks on parameters and on accumulated gradients", OVERLAPS)
def grad_hooks(side: Side) -> None:
    ddp, optimizer = begin(side)
    ddp.module.enter.weight.register_hook(lambda g: g * 0.5)
    ddp.module.leave.weight.register_post_accumulate_grad_hook(_clamp)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        if step == 10:
            ddp.module.norm.weight.register_hook(lambda g: g + 0.1)
    side.finish(ddp, optimizer)


def _clamp(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.1, 0.1)


# ---------------------------------------------------------------------- parameters


@feature("parameters read in every way after `step`", SYNCHRONIZES)
def read(side: Side) -> None:
    ddp, optimizer = begin(side)
    ways: list[Any] = [
        lambda p: p.data,
        lambda p: p.detach().numpy().tolist(),
        lambda p: p.tolist(),
        repr,
        lambda p: f"{p.norm():.9f}",
        lambda p: p[0],
        lambda p: p.sum().item(),
        lambda p: p.cpu(),
        lambda p: p.clone(),
        lambda p: p.to(torch.float64),
        lambda p: torch.equal(p, p),
        lambda p: next(iter(p)),
        lambda p: (p == p.data).all(),
        lambda p: (p * 2, 2 * p, p @ p.T if p.ndim == 2 else p @ p),
        lambda p: torch.stack([p, p]),
        lambda p: torch._foreach_norm([p]),
        lambda p: torch.ops.aten.abs(p),
        lambda p: linear(torch.ones(p.shape[-1]), p),
        lambda p: p.untyped_storage().tolist()[:8],
        lambda p: copy.copy(p),
        lambda p: copy.deepcopy(p),
        lambda p: _loaded(p),
        lambda p: torch.from_dlpack(p.detach()),
        lambda p: p.__array__() if not p.requires_grad else p.mean(),
        lambda p: nn.utils.parameters_to_vector([p]),
        lambda p: p.unfold(0, 1, 1),
        lambda p: bool((p < 2).all()),
        lambda p: p._version > 0,
    ]
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        p = list(ddp.parameters())[step % 6]
        for number in range(3):
            side.note(f"way {step} {number}", ways[(3 * step + number) % len(ways)](p))
    side.finish(ddp, optimizer)


def _loaded(p: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@after_step("parameters changed in place after `step`", SYNCHRONIZES)
def changed(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        for p in ddp.parameters():
            p.clamp_(-0.2, 0.2)
            p[0] = 0.1


@after_step("`p.data` assigned after `step`", SYNCHRONIZES)
def data_assigned(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    for p in ddp.parameters():
        p.data = torch.where(p.data > 0.3, 0.3, p.data)


@after_step("weights initialised anew, or set from a vector, in between", OVERLAPS)
def rewritten(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step == 9:
        nn.init.constant_(ddp.module.leave.weight, 0.1)
    if step == 11:
        vector = nn.utils.parameters_to_vector(ddp.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, ddp.parameters())


@after_step("metadata read after `step`: shapes, dtypes, `requires_grad`, `numel()`", OVERLAPS)
def metadata(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    for p in ddp.parameters():
        side.note("metadata", p.shape, p.dtype, p.requires_grad, p.numel(), p.is_leaf, len(p))
        side.note("gradient", p.grad.shape, p.grad.device, p.grad.is_sparse, p.grad is not None)
        side.note("kinds", isinstance(p, nn.Parameter), p.ndim, p.stride(), p.is_contiguous())


@after_step("exchange of weights or gradients by hand, after `synchronize`", SYNCHRONIZES)
def by_hand(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.synchronize(ddp)
    with torch.no_grad():
        for p in ddp.parameters():
            dist.all_reduce(p)
            p.div_(2)


# ---------------------------------------------------------------------- the optimizer


@after_step("the optimizer's state read after `step`", SYNCHRONIZES, make=adam)
def state_read(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.note("state", [optimizer.state[p]["exp_avg"] for p in ddp.parameters()])
    side.note("class", isinstance(optimizer, Adam), type(optimizer).__name__)


@after_step('`vars(optimizer)["state"]` read after `step`', SYNCHRONIZES, make=adam)
def state_in_vars(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    state = vars(optimizer)["state"]
    side.note("state", len(state), [entry["exp_avg"] for entry in state.values()])


@after_step("`nn.Parameter(p)` made after `step`", SYNCHRONIZES)
def made_again(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    side.note("made", nn.Parameter(ddp.module.hidden.weight))


@after_step("the optimizer's state changed in between", OVERLAPS, make=adam)
def state_changed(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 5 == 4:
        for values in optimizer.state.values():
            values["exp_avg"].mul_(0.5)
    if step == 8:
        optimizer.state.clear()
    if step == 12:
        optimizer.state[ddp.module.norm.weight] = {}


@after_step("the optimizer pickled and copied after `step`", OVERLAPS, make=adam)
def optimizer_copied(side: Side, ddp: Any, optimizer: Any, step: int) -> None:
    if step % 5 == 4:
        side.note("copy", copy.deepcopy(optimizer).state_dict())
    if step % 5 == 2:
        side.note("file", _loaded_whole(optimizer).state_dict())


def _loaded_whole(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@feature("a parameter group added in between", OVERLAPS)
def group_added(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    late = [*ddp.module.norm.parameters()]
    first = [p for p in ddp.parameters() if not any(p is other for other in late)]
    optimizer = side.overlap(ddp, SGD(first, lr=0.1, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        ddp.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        if step == 9:
            optimizer.add_param_group({"params": late, "lr": 0.02})
    side.finish(ddp, optimizer)


@feature("parameter groups with their own settings", OVERLAPS)
def groups(side: Side) -> None:
    def make(_: Any) -> torch.optim.Optimizer:
        net = ddp_of[0]
        return AdamW(
            [
                {"params": [net.enter.weight, net.leave.bias], "lr": 0.02},
                {"params": list(net.hidden.parameters()), "weight_decay": 0.0},
                {"params": [*net.norm.parameters(), net.enter.bias], "betas": (0.5, 0.9)},
                {"params": [net.leave.weight], "foreach": True},
            ],
            lr=0.01,
        )

    ddp_of: list[Any] = []
    ddp = side.wrap(Net(), loss_of)
    ddp_of.append(ddp.module)
    optimizer = side.overlap(ddp, make(None))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("parameters frozen and thawed in between, `find_unused_parameters=True`", OVERLAPS)
def frozen(side: Side) -> None:
    ddp, optimizer = begin(side, find_unused_parameters=True)
    for step in side.steps:
        ddp.module.enter.requires_grad_(step % 5 in (1, 3, 4))
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("parameters frozen after the start, gradients kept", OVERLAPS)
def frozen_late(side: Side) -> None:
    ddp, optimizer = begin(side, find_unused_parameters=True)
    for step in side.steps:
        loss_of(ddp, step).backward()
        if step == 12:
            ddp.module.leave.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    side.finish(ddp, optimizer)
