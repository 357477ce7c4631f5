"""Training scripts drawn at random: a model, an optimizer, a loop, and what it reads and changes.

A script is a function of its number alone, so that a number is all it takes to run it again. What
the documentation lists as blind spots is drawn only where the guard sees it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from tests.train.overlap.loop import STATIC, UNUSED
from tests.train.overlap.overlap_blind_spots import BY_CPP
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_modules import (
    Attending,
    Branching,
    Checkpointed,
    Converted,
    Convolutions,
    Odd,
    Rotation,
    SeveralTypes,
    Tied,
)
from tests.train.overlap.overlap_optimizers import PLAIN, Dropping
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import STEPS, Side
from tests.train.overlap.own_optimizers import Clipped, Normed, Signs
from tests.train.overlap.parts import THREAD_READS, Training, evaluate


class Model(NamedTuple):
    """A model that is drawn, and the arguments that DDP needs for it."""

    make: Callable[[], nn.Module]
    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed
    optimizers: tuple[str, ...] = tuple(PLAIN)


COMPLEX = ("SGD", "SGD, momentum, weight decay", "Adam", "AdamW", "RMSprop", "Adagrad")
MODELS = {
    "linear layers": Model(Net),
    "wide": Model(lambda: Net(width=33)),
    "bucket views": Model(Net, {"gradient_as_bucket_view": True}),
    "small buckets": Model(Net, {"bucket_cap_mb": 1e-3}),
    "convolutions": Model(Convolutions),
    "convolutions, own buffers": Model(Convolutions, {"broadcast_buffers": False}),
    "tied": Model(Tied),
    "branches": Model(Branching, UNUSED),
    "dropout": Model(Dropping),
    "complex": Model(Rotation, {}, COMPLEX),
    "several types": Model(SeveralTypes, {}, COMPLEX),
    "float64": Model(lambda: Converted(torch.float64)),
    "bfloat16": Model(lambda: Converted(torch.bfloat16), {}, COMPLEX),
    "checkpointed": Model(lambda: Checkpointed(reentrant=False)),
    "static graph": Model(lambda: Checkpointed(reentrant=True), STATIC),
    "static graph, tied": Model(Tied, STATIC),
    "static graph, bucket views": Model(Net, {**STATIC, "gradient_as_bucket_view": True}),
    "odd": Model(Odd),
    "attention": Model(partial(Attending, dropout=0.1)),
}


OWN: dict[str, Callable[[Any], Optimizer]] = {
    "own, each by itself": lambda p: Signs(p, lr=0.01),
    "own, all together": lambda p: Normed(p, lr=0.01),
    "own, clips when asked": Clipped,
    "own, clips after ten steps": lambda p: Clipped(p, warm_up=10),
}
MAKERS: dict[str, Callable[[Any], Optimizer]] = {**PLAIN, **OWN}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda _: None,
    "steps": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 8),
}


def _change_rate(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def _change(key: str, value: float, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if key in group:
            group[key] = value


def _split_group(optimizer: Optimizer) -> None:
    first = optimizer.param_groups[0]
    if len(first["params"]) > 1:
        second = {**first, "params": first["params"][1:], "lr": first["lr"] * 0.5}
        first["params"] = first["params"][:1]
        optimizer.param_groups.append(second)


CHANGES: dict[str, Callable[[Optimizer], None]] = {
    "learning rate": _change_rate,
    "weight decay": partial(_change, "weight_decay", 0.02),
    "clipping": partial(_change, "max_norm", 0.05),
    "groups": _split_group,
}


def _gathered(parameter: nn.Parameter) -> list[torch.Tensor]:
    # Complex tensors are gathered as torch does it everywhere: as what they are made of.
    value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return everyone


READS: dict[str, Callable[[Training], Any]] = {
    **THREAD_READS,
    "p.sum()": lambda t: [p.sum() for p in t.parameters],
    "p.tolist()": lambda t: t.parameters[0].tolist(),
    "torch.cat of all": lambda t: [torch.cat([p.flatten()]) for p in t.parameters],
    "nn.Parameter(p)": lambda t: nn.Parameter(t.parameters[0]).detach().clone(),
    "total norm": lambda t: nn.utils.get_total_norm([g for g in t.gradients if not g.is_complex()]),
    "all_gather": lambda t: _gathered(t.parameters[0]),
    "evaluation": evaluate,
    "forward pass without a loss": lambda t: loss_of(t.ddp, 1, 8).detach(),
    "forward pass of the module": lambda t: loss_of(t.net, 1, 9).detach(),
    "forward pass of rank 0 alone": lambda t: (
        loss_of(t.ddp, 1, 8).detach() if t.side.rank == 0 and not list(t.ddp.buffers()) else None
    ),
}
IN_THREADS = [
    *(name for name in THREAD_READS if name != "p.grad"),
    *("p.sum()", "p.tolist()", "torch.cat of all", "nn.Parameter(p)"),
]  # those that a thread may do at any time under DDP


def _by_group(t: Training) -> None:
    group = dist.group.WORLD
    assert group is not None
    for gradient in t.gradients:
        if not gradient.is_complex():
            group.allreduce([gradient]).wait()
            gradient.div_(dist.get_world_size())


def _by_cpp(name: str, t: Training) -> list[torch.Tensor]:
    known = [p for p in t.parameters if p.ndim == 2 and (name != OF_FLOATS or p.type() == FLOAT)]
    return [BY_CPP[name](p).detach().clone() for p in known]


OF_FLOATS, FLOAT = "torch.Tensor(p)", "torch.FloatTensor"
GUARDED_READS: dict[str, Callable[[Training], Any]] = {
    **{name: partial(_by_cpp, name) for name in BY_CPP},
    "group.allreduce([p.grad])": _by_group,
}  # those that wait only under the guard


def _scale(t: Training) -> None:
    with torch.no_grad():
        for p in t.parameters:
            p.mul_(0.99)


def _reload(t: Training) -> None:
    t.ddp.load_state_dict({k: v.clone() for k, v in t.ddp.state_dict().items()})


def _reload_optimizer(t: Training) -> None:
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


WRITES: dict[str, Callable[[Training], Any]] = {
    "p.mul_": _scale,
    "load_state_dict": _reload,
    "optimizer.load_state_dict": _reload_optimizer,
    "p.data.add_": lambda t: t.parameters[0].data.add_(0.01),
}
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, unchecked": {"check": False},
    "dear": {"planner": "dear", "check": False},
    "overlap": {"planner": "overlap", "check": False},
    "merge": {"planner": "merge"},
}
MEASURED_STEPS = 110
"""Enough for every stage: measuring, planning, trying, recording, and some steps after them."""
ACCUMULATION: dict[str, Callable[[int], bool]] = {
    "always": lambda _: True,
    "later": lambda step: step >= 5,
    "at first": lambda step: step < 9,
    "now and then": lambda step: step // 3 % 2 == 1,
}  # in which steps gradients are accumulated
DEEDS = {**READS, **WRITES}
ALL_DEEDS = {**DEEDS, **GUARDED_READS}
ZEROS = ("before", "before", "before, in place", "before, model", "after", "after, in place")
PLACES = ("before the forward pass", "after the forward pass", "after backward", "after step")


class DrawnScript(SimpleNamespace):
    """A training script; its values say all that was drawn: see :func:`drawn`."""

    def __call__(self, side: Side) -> None:
        model = MODELS[self.model]
        side.guard = self.guard
        if self.plans != "by hand":
            side.plans, side.length = PLANS[self.plans], MEASURED_STEPS
        ddp: Any = side.wrap(model.make(), loss_of, **model.arguments)
        micro_batches = self.micro_batches
        if dist.get_world_size() == 3:
            micro_batches = 1  # what is added to an average is not divisible
            for p in ddp.parameters():
                if p.requires_grad:
                    p.register_hook(_divisible)
        if self.attached:
            ddp.register_buffer("factor", torch.tensor(0.5))
            ddp.penalty = nn.L1Loss()
            ddp.history = []
        optimizers = self._optimizers(side, ddp)
        t = Training(side, ddp, optimizers[0])
        schedulers = [SCHEDULERS[self.scheduler](o) for o in optimizers]
        for read in self.threads:
            side.read_in_thread(partial(READS[read], t))
        for step in side.steps:
            self._do(PLACES[0], t)
            if self.zero.startswith("before"):
                self._zero(ddp, optimizers)
            # Torch cannot accumulate in the first step of a static graph.
            whole = ddp.static_graph and step == 0
            accumulates = ACCUMULATION[self.accumulation](step) and not whole
            present = micro_batches if accumulates else 1
            for micro in range(present):
                last = micro == present - 1
                with ddp.no_sync() if self.no_sync and not last else nullcontext():
                    loss = t.loss(micro)
                    if self.attached:
                        loss = loss + ddp.penalty(loss, ddp.factor)
                        ddp.history.append(float(loss))
                    if last:
                        self._do(PLACES[1], t)
                    t.backward(loss)
            self._do(PLACES[2], t)
            if self.clip != "none" and step % self.clip_every == 0:
                self._clip(t)
            for what, at in self.changes:
                if step == at:
                    CHANGES[what](optimizers[0])
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            self._do(PLACES[3], t)
            if self.zero.startswith("after"):
                self._zero(ddp, optimizers)
        if self.attached:
            side.note("history", ddp.history)
        side.finish(ddp, *optimizers)

    def _optimizers(self, side: Side, ddp: Any) -> list[Any]:
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        cut = len(parameters) // 2 if len(self.optimizers) == 2 else len(parameters)
        parts = [parameters[:cut], parameters[cut:]]
        return [
            side.overlap(ddp, MAKERS[name](part))
            for name, part in zip(self.optimizers, parts, strict=False)
        ]

    def _zero(self, ddp: Any, optimizers: list[Any]) -> None:
        if "model" in self.zero:
            ddp.zero_grad()
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none="in place" not in self.zero)

    def _clip(self, t: Training) -> None:
        # torch takes no norm over several types at once.
        if self.clip == "norm":
            t.note("norm", nn.utils.clip_grad_norm_(t.parameters, 0.5, foreach=False))
        elif not any(p.is_complex() for p in t.parameters):
            nn.utils.clip_grad_value_(t.parameters, 0.05)

    def _do(self, place: str, t: Training) -> None:
        for what, where, since, every in self.deeds:
            if where == place and t.step >= since and (t.step - since) % every == 0:
                result = ALL_DEEDS[what](t)
                if what not in WRITES:
                    t.note(f"{what} {place}", result)


def _divisible(gradient: torch.Tensor) -> torch.Tensor:
    """Round a gradient so that a third of it, and sums of thirds, are exact in any order.

    Among three ranks plans sum in another order than DDP. A multiple of 3 with few bits is still
    exact when it is multiplied by 1/3 as floating-point numbers are.
    """
    if gradient.is_complex():
        return torch.view_as_complex(_divisible(torch.view_as_real(gradient)))
    unit, most = (2.0**-6, 2.0**3) if gradient.dtype == torch.bfloat16 else (2.0**-12, 2.0**15)
    return (gradient / (3 * unit)).round().clamp(-most, most) * (3 * unit) + 0.0  # no -0.0


def drawn(number: int) -> DrawnScript:
    random_ = random.Random(number)
    pick = random_.choice
    model = pick(list(MODELS))
    known = [*MODELS[model].optimizers, *OWN] if model != "complex" else MODELS[model].optimizers
    static = "static graph" in model

    def some(of: dict[str, Any]) -> tuple[str, str, int, int]:
        """Draw a deed, where in the loop, from which step on, every how many steps."""
        return pick(list(of)), pick(PLACES), pick((0, 4, 11)), pick((1, 2, 5, 10))

    guard = random_.random() < 0.2
    deeds = tuple(some(DEEDS) for _ in range(pick((0, 0, 1, 1, 2, 3))))
    if guard:
        deeds += tuple(some(GUARDED_READS) for _ in range(pick((1, 2))))
    # Torch makes the final buckets of a static graph in the third forward pass, together. It does
    # not let a parameter change between its forward pass and its backward pass.
    deeds = tuple(
        deed
        for deed in deeds
        if not (static and "forward pass" in deed[0] and deed[2] < 4)
        and not (deed[0] in WRITES and deed[1] == "after the forward pass")
    )
    scheduler = pick(list(SCHEDULERS))
    # Torch's schedulers count the groups when they are made.
    changes = [what for what in CHANGES if what != "groups" or scheduler == "none"]
    return DrawnScript(
        number=number,
        model=model,
        optimizers=tuple(pick(known) for _ in range(pick((1, 1, 1, 2)))),  # share the parameters
        scheduler=scheduler,
        zero=pick(ZEROS),
        micro_batches=pick((1, 1, 1, 2, 3)),
        accumulation=pick(list(ACCUMULATION)),
        no_sync=pick((True, False)),
        clip=pick(("none", "none", "none", "norm", "value")),
        clip_every=pick((1, 1, 4)),
        # Whether the loss needs a module, a buffer and an attribute that hang on the wrapper.
        attached=pick((False, False, False, True)),
        deeds=deeds,
        changes=tuple((pick(changes), pick((3, 8, 12, 16))) for _ in range(pick((0, 1, 2)))),
        style=Style(
            piece_elements=pick((13, 60, 150, 400, 10**6)),
            aligned=pick((True, False)),
            order=pick(("need", "need", "ready", str(number))),
            decoupled=pick((True, False)),
            wait=pick(("need", "need", "need", "update")),
            in_flight=pick((1, 2, 4)),
        ),
        let_through=pick((0.0, 0.0, 0.3, 0.7, 1.0)),
        # How our wrapper comes to its plan: by hand, or measured in a longer training.
        plans=pick(list(PLANS)) if random_.random() < 0.03 else "by hand",
        guard=guard,
        # What threads read as long as the training lasts; their values are not compared.
        threads=tuple(pick(IN_THREADS) for _ in range(pick((0, 0, 0, 1, 2, 3)))),
    )
