"""Reading or changing what is pending."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, AdamW

from tests.train.overlap.loop import ADAM, MOMENTUM, REFUSED, SHARES, UNUSED, Loop, no_shards
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS
from tests.train.overlap.parts import (
    Training,
    backward,
    every,
    finish,
    halve_gradients,
    nothing,
    once,
    reloaded,
    zero,
    zero_in_place,
)


def note_gradients(t: Training) -> None:
    t.note("gradients", t.gradients)


def change_gradients(t: Training) -> None:
    for p in t.parameters:
        p.grad.mul_(0.5).add_(p, alpha=0.01)


def drop_gradients(t: Training) -> None:
    t.net.norm.weight.grad = None
    del t.net.norm.bias.grad


def replace_some(t: Training) -> None:
    t.net.norm.weight.grad = torch.full_like(t.net.norm.weight, 0.01)
    t.net.leave.bias.grad = torch.zeros_like(t.net.leave.bias)


def replace_all(t: Training) -> None:
    for p in t.parameters:
        p.grad = torch.full(p.shape, 0.01 * t.step)


def zero_and_replace(t: Training) -> None:
    zero_in_place(t)
    t.net.leave.bias.grad = torch.ones_like(t.net.leave.bias)


def keep_gradients(t: Training) -> None:
    t.kept = [*(t.kept or ()), t.gradients]


def note_kept(t: Training) -> None:
    t.note("kept", t.kept)
    finish(t)


def combine_two(t: Training) -> None:
    found = []
    for micro in range(2):
        zero(t)
        t.backward(t.loss(micro))
        found.append(t.gradients)
    if t.step % 2:
        for p, one, other in zip(t.parameters, *found, strict=True):
            p.grad = one * 0.3 + other * 0.7


def make_flat(t: Training) -> None:
    t.kept = torch.zeros(sum(p.numel() for p in t.parameters))
    parts = t.kept.split([p.numel() for p in t.parameters])
    for p, part in zip(t.parameters, parts, strict=True):
        p.grad = part.view_as(p)


def clamp_flat(t: Training) -> None:
    t.note("flat", t.kept)
    t.kept.clamp_(-0.01, 0.01)


def clip_flat(t: Training) -> None:
    clip_grad_norm_(t.parameters, 0.1)
    t.note("flat", t.kept)


def assign_data(t: Training) -> None:
    for p in t.parameters:
        p.grad.data = p.grad.data.clamp(-0.05, 0.05)


def zero_held(t: Training) -> None:
    if t.kept is None:
        backward(t)
        t.kept = t.gradients
    torch._foreach_zero_(t.kept)


def hook_gradients(t: Training) -> None:
    def clamp(p: Any) -> None:
        p.grad.clamp_(-0.1, 0.1)

    t.net.enter.weight.register_hook(lambda g: g * 0.5)
    t.net.leave.weight.register_post_accumulate_grad_hook(clamp)


READS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda t: t * 2,
    "arithmetic from the right": lambda t: 2 * t,
    "a product": lambda t: t @ torch.ones(t.shape[-1]),
    "a method": lambda t: t.sum(),
    "a function": torch.sum,
    "an operator": torch.ops.aten.sum,
    "foreach": lambda t: torch._foreach_add([t], 1),
    "in a list": lambda t: torch.stack([torch.zeros(t.shape), t]),
    "as an option": lambda t: torch.clamp(torch.zeros(t.shape), min=t),
    "of torch.nn": lambda t: linear(torch.ones(t.shape[-1]), t),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.detach().numpy().tolist(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.flatten()[0].item(),
    "indexing": lambda t: t[0],
    "iteration": list,
    "printing": repr,
    "formatting": lambda t: f"{t} {t.norm():.9f}",
    "comparison": lambda t: t == 0,
    "equality": lambda t: torch.equal(t, t),
    "truth": lambda t: bool((t < 2).all()),
    "address": lambda t: t.data_ptr() > 0,
    "memory": lambda t: t.untyped_storage().tolist()[:8],
    "version": lambda t: t._version > 0,
    "view": lambda t: t.view(-1),
    "unfolding": lambda t: t.unfold(0, 1, 1),
    "another type": lambda t: t.to(torch.float64),
    "another device": lambda t: t.cpu(),
    "vector": lambda t: nn.utils.parameters_to_vector([t]),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": reloaded,
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "inside vmap": lambda t: torch.vmap(lambda row: row * t)(torch.ones(2, *t.shape)),
    "inside grad": lambda t: torch.func.grad(lambda x: (x * t.detach()).sum())(torch.ones(t.shape)),
}


def read_in_some_ways(t: Training) -> None:
    p, ways = t.parameters[t.step % 6], list(READS.items())
    for number in range(3):
        name, read = ways[(3 * t.step + number) % len(ways)]
        t.note(name, read(p))


def change_parameters(t: Training) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.clamp_(-0.2, 0.2)
            p[0] = 0.1


def assign_parameters_data(t: Training) -> None:
    for p in t.parameters:
        p.data = torch.where(p.data > 0.3, 0.3, p.data)


def rewrite(t: Training) -> None:
    if t.step == 9:
        nn.init.constant_(t.net.leave.weight, 0.1)
    if t.step == 11:
        vector = nn.utils.parameters_to_vector(t.ddp.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, t.ddp.parameters())


def note_metadata(t: Training) -> None:
    for p in t.parameters:
        t.note("metadata", p.shape, p.dtype, p.requires_grad, p.numel(), p.is_leaf, len(p))
        t.note("gradient", p.grad.shape, p.grad.device, p.grad.is_sparse, p.grad is not None)
        t.note("kinds", isinstance(p, nn.Parameter), p.ndim, p.stride(), p.is_contiguous())


def exchange_by_hand(t: Training) -> None:
    t.side.synchronize(t.ddp)
    with torch.no_grad():
        for p in t.parameters:
            dist.all_reduce(p)
            p.div_(2)


def note_state(t: Training) -> None:
    t.note("state", [t.optimizer.state[p]["exp_avg"] for p in t.parameters])
    t.note("class", isinstance(t.optimizer, Adam), type(t.optimizer).__name__)


def note_state_in_vars(t: Training) -> None:
    state = vars(t.optimizer)["state"]
    t.note("state", len(state), [entry["exp_avg"] for entry in state.values()])


def change_state(t: Training) -> None:
    if t.step % 5 == 4:
        for values in t.optimizer.state.values():
            values["exp_avg"].mul_(0.5)
    if t.step == 8:
        t.optimizer.state.clear()
    if t.step == 12:
        t.optimizer.state[t.net.norm.weight] = {}


def copy_optimizer(t: Training) -> None:
    if t.step % 5 == 4:
        t.note("copy", copy.deepcopy(t.optimizer).state_dict())
    if t.step % 5 == 2:
        t.note("file", reloaded(t.optimizer, weights_only=False).state_dict())


def without_norm(parameters: Any) -> torch.optim.Optimizer:
    enter, bias, hidden, other, _, _, *leave = parameters
    return MOMENTUM([enter, bias, hidden, other, *leave])


def add_norm(t: Training) -> None:
    t.optimizer.add_param_group({"params": [*t.net.norm.parameters()], "lr": 0.02})


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    enter, bias, hidden, other, weight, shift, leave, last = parameters
    groups = [
        {"params": [enter, last], "lr": 0.02},
        {"params": [hidden, other], "weight_decay": 0.0},
        {"params": [weight, shift, bias], "betas": (0.5, 0.9)},
        {"params": [leave], "foreach": True},
    ]
    return AdamW(groups, lr=0.01)


SCENARIOS = {
    "`p.grad` read after `backward`": Loop(SYNCHRONOUS, before=note_gradients),
    "`p.grad` read after `step`": Loop(
        SYNCHRONIZES, REFUSED, after=lambda t: t.note("norm", [g.norm() for g in t.gradients])
    ),
    "`p.grad` read after `step`, every tenth step": no_shards(after=every(10, note_gradients)),
    "`p.grad` changed in place before `step`": Loop(SYNCHRONOUS, before=change_gradients),
    "`p.grad` changed in place after `step`": Loop(
        SYNCHRONIZES, REFUSED, zero=nothing, after=halve_gradients
    ),
    "some gradients set to None before `step`": Loop(before=drop_gradients),
    "some gradients replaced before `step`": Loop(before=replace_some),
    "gradients replaced after `step`": Loop(zero=nothing, after=replace_all),
    "gradients zeroed in place, then replaced, after `step`": Loop(
        zero=nothing, after=zero_and_replace
    ),
    "the gradients of the last step kept, and read after the next": no_shards(
        before=keep_gradients, end=note_kept
    ),
    "the gradients of two losses kept and combined": Loop(zero=nothing, backward=combine_two),
    "gradients in a flat buffer of your own": Loop(
        SYNCHRONOUS, start=make_flat, zero=lambda t: t.kept.zero_(), before=clamp_flat
    ),
    "the same, clipped by its norm": Loop(
        SYNCHRONOUS,
        start=make_flat,
        zero=lambda t: t.kept.zero_(),
        before=clip_flat,
        norm="2",
        near=True,
    ),
    "`p.grad.data` assigned before `step`": Loop(
        SYNCHRONOUS,
        zero=lambda t: t.optimizer.zero_grad(set_to_none=t.step % 3 > 0),
        before=assign_data,
    ),
    "references to the first gradients, zeroed in place": Loop(
        SYNCHRONOUS, zero=zero_held, before=lambda t: t.note("held", t.kept)
    ),
    "hooks on parameters and on accumulated gradients": Loop(
        start=hook_gradients,
        after=once(10, lambda t: t.net.norm.weight.register_hook(lambda g: g + 0.1)),
    ),
    "parameters read in every way after `step`": Loop(SYNCHRONIZES, after=read_in_some_ways),
    "parameters changed in place after `step`": Loop(SYNCHRONIZES, after=change_parameters),
    "`p.data` assigned after `step`": Loop(SYNCHRONIZES, after=assign_parameters_data),
    "weights initialised anew, or set from a vector, in between": Loop(after=rewrite),
    "metadata read after `step`: shapes, dtypes, `requires_grad`, `numel()`": Loop(
        after=note_metadata
    ),
    "exchange of weights or gradients by hand, after `synchronize`": Loop(
        SYNCHRONIZES, after=exchange_by_hand
    ),
    "the optimizer's state read after `step`": Loop(
        SYNCHRONIZES, SHARES, make=ADAM, after=note_state
    ),
    '`vars(optimizer)["state"]` read after `step`': Loop(
        SYNCHRONIZES, SHARES, make=ADAM, after=note_state_in_vars
    ),
    "`nn.Parameter(p)` made after `step`": Loop(
        SYNCHRONIZES, after=lambda t: t.note("made", nn.Parameter(t.net.hidden.weight))
    ),
    "the optimizer's state changed in between": Loop(
        OVERLAPS, SHARES, make=ADAM, after=change_state
    ),
    "the optimizer pickled and copied after `step`": Loop(
        OVERLAPS, SHARES, make=ADAM, after=copy_optimizer
    ),
    "a parameter group added in between": Loop(
        make=without_norm, zero=lambda t: t.ddp.zero_grad(), after=once(9, add_norm)
    ),
    "parameter groups with their own settings": Loop(make=in_groups),
    "parameters frozen and thawed in between, `find_unused_parameters=True`": Loop(
        ddp=UNUSED, first=lambda t: t.net.enter.requires_grad_(t.step % 5 in (1, 3, 4))
    ),
    "parameters frozen after the start, gradients kept": Loop(
        ddp=UNUSED,
        zero=nothing,
        before=once(12, lambda t: t.net.leave.requires_grad_(False)),
        after=zero_in_place,
    ),
}
