"""Training scripts drawn at random: a model, an optimizer, a loop, and what it reads and changes.

A script is a function of its number alone, so that a number is all it takes to run it again. What
the documentation lists as blind spots is drawn only where the guard sees it.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, loss_of
from tests.train.overlap.overlap_modules import Branching, Tied
from tests.train.overlap.overlap_optimizers import PLAIN, Clipped, Dropping, Normed, Signs
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import STEPS, Side

__all__ = ["MODELS", "DrawnScript", "drawn"]


# ---------------------------------------------------------------------- models


class Model(NamedTuple):
    """A model that is drawn, and the arguments that DDP needs for it."""

    make: Callable[[], nn.Module]
    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed
    optimizers: tuple[str, ...] = tuple(PLAIN)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.leave = nn.Linear(4 * (FEATURES - 2), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.relu(self.norm(self.convolve(x[:, None]))).flatten(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 16, dtype=torch.complex64)
        self.leave = nn.Linear(16, CLASSES, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x.to(torch.complex64)))).abs()


class SeveralTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 16)
        self.middle = nn.Linear(16, 16, dtype=torch.float64)
        self.leave = nn.Linear(16, CLASSES, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.middle(self.enter(x).double())).bfloat16()).float()


class Converted(Net):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.enter.weight.dtype))


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        for _ in range(2):
            hidden = checkpoint(self.hidden, hidden, use_reentrant=self.reentrant)
        return self.leave(self.norm(hidden))


class Odd(nn.Module):
    """Parameters without dimensions, without elements, frozen, and in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 15)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.across = nn.Parameter(torch.randn(15, 9).t())
        self.frozen = nn.Linear(9, 9).requires_grad_(requires_grad=False)
        self.leave = nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(self.enter(x), self.across) * self.scale
        return self.leave(torch.tanh(self.frozen(hidden))) + self.none.sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.block(self.embed(x.view(-1, 3, 4))).mean(1))


COMPLEX = ("SGD", "SGD, momentum, weight decay", "Adam", "AdamW", "RMSprop", "Adagrad")
MODELS = {
    "linear layers": Model(Net),
    "wide": Model(lambda: Net(width=33)),
    "bucket views": Model(Net, {"gradient_as_bucket_view": True}),
    "small buckets": Model(Net, {"bucket_cap_mb": 1e-3}),
    "convolutions": Model(Convolutions),
    "convolutions, own buffers": Model(Convolutions, {"broadcast_buffers": False}),
    "tied": Model(Tied),
    "branches": Model(Branching, {"find_unused_parameters": True}),
    "dropout": Model(Dropping),
    "complex": Model(Complex, {}, COMPLEX),
    "several types": Model(SeveralTypes, {}, COMPLEX),
    "float64": Model(lambda: Converted(torch.float64)),
    "bfloat16": Model(lambda: Converted(torch.bfloat16), {}, COMPLEX),
    "checkpointed": Model(lambda: Checkpointed(reentrant=False)),
    "static graph": Model(lambda: Checkpointed(reentrant=True), {"static_graph": True}),
    "static graph, tied": Model(Tied, {"static_graph": True}),
    "static graph, bucket views": Model(
        Net, {"static_graph": True, "gradient_as_bucket_view": True}
    ),
    "odd": Model(Odd),
    "attention": Model(Attention),
}


# ---------------------------------------------------------------------- optimizers


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


def _change_decay(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.02


def _change_clipping(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "max_norm" in group:
            group["max_norm"] = 0.05


def _split_group(optimizer: Optimizer) -> None:
    first = optimizer.param_groups[0]
    if len(first["params"]) > 1:
        second = {**first, "params": first["params"][1:], "lr": first["lr"] * 0.5}
        first["params"] = first["params"][:1]
        optimizer.param_groups.append(second)


CHANGES = {
    "learning rate": _change_rate,
    "weight decay": _change_decay,
    "clipping": _change_clipping,
    "groups": _split_group,
}


# ---------------------------------------------------------------------- what a script reads


class Moment(NamedTuple):
    """What there is to read at some place of the loop."""

    ddp: Any
    optimizer: Optimizer
    side: Side

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.ddp.parameters() if p.requires_grad]

    @property
    def first(self) -> nn.Parameter:
        """One of them."""
        return self.parameters[0]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [p.grad for p in self.parameters if p.grad is not None]


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _gathered(parameter: nn.Parameter) -> list[torch.Tensor]:
    # Complex tensors are gathered as torch does it everywhere: as what they are made of.
    value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return everyone


def _evaluated(moment: Moment) -> torch.Tensor:
    moment.ddp.eval()
    with torch.no_grad():
        loss = loss_of(moment.ddp, 0, 7)
    moment.ddp.train()
    return loss


def _state(moment: Moment) -> list[Any]:
    return [
        value.clone() if isinstance(value, torch.Tensor) else value
        for state in vars(moment.optimizer)["state"].values()
        for value in state.values()
    ]


READS: dict[str, Callable[[Moment], Any]] = {
    "p.sum()": lambda m: [p.sum() for p in m.parameters],
    "p.detach().clone()": lambda m: [p.detach().clone() for p in m.parameters],
    "p.data.clone()": lambda m: m.first.data.clone(),
    "p.tolist()": lambda m: m.first.tolist(),
    "torch.cat of all": lambda m: [torch.cat([p.flatten()]) for p in m.parameters],
    "nn.Parameter(p)": lambda m: nn.Parameter(m.first).detach().clone(),
    "p.grad": lambda m: m.gradients,
    "total norm": lambda m: nn.utils.get_total_norm([g for g in m.gradients if not g.is_complex()]),
    "all_gather": lambda m: _gathered(m.first),
    "ddp.state_dict()": lambda m: m.ddp.state_dict(),
    "optimizer.state_dict()": lambda m: m.optimizer.state_dict(),
    "vars(optimizer)['state']": _state,
    "torch.save": lambda m: [_saved(m.ddp.state_dict()), _saved(m.optimizer.state_dict())],
    "copy.deepcopy(module)": lambda m: copy.deepcopy(m.ddp.module).state_dict(),
    "evaluation": _evaluated,
    "forward pass without a loss": lambda m: loss_of(m.ddp, 1, 8).detach(),
    "forward pass of the module": lambda m: loss_of(m.ddp.module, 1, 9).detach(),
    "forward pass of rank 0 alone": lambda m: (
        loss_of(m.ddp, 1, 8).detach() if m.side.rank == 0 and not list(m.ddp.buffers()) else None
    ),
}


IN_THREADS = [
    *("p.sum()", "p.detach().clone()", "p.data.clone()", "p.tolist()", "torch.cat of all"),
    *("nn.Parameter(p)", "ddp.state_dict()", "optimizer.state_dict()", "torch.save"),
    *("vars(optimizer)['state']", "copy.deepcopy(module)"),
]
"""Those that a thread may do at any time under DDP."""


def _as_sparse(parameter: nn.Parameter) -> torch.Tensor:
    flat = parameter.detach().flatten()
    return torch.sparse_coo_tensor(torch.arange(len(flat))[None], flat).to_dense()


def _by_group(moment: Moment) -> None:
    group = dist.group.WORLD
    assert group is not None
    for gradient in moment.gradients:
        if not gradient.is_complex():
            group.allreduce([gradient]).wait()
            gradient.div_(dist.get_world_size())


GUARDED_READS: dict[str, Callable[[Moment], Any]] = {
    "torch.tensor(p)": lambda m: [torch.tensor(p) for p in m.parameters],
    "torch.Tensor(p)": lambda m: [torch.Tensor(p) for p in m.parameters if p.type() == FLOAT],
    "q.new_tensor(p)": lambda m: torch.empty(0).new_tensor(m.first, dtype=m.first.dtype),
    "p.as_subclass": lambda m: [p.as_subclass(torch.Tensor).clone() for p in m.parameters],
    "q.set_(p)": lambda m: torch.empty(0, dtype=m.first.dtype).set_(m.first.detach()).clone(),
    "torch.sparse_coo_tensor(i, p)": lambda m: [_as_sparse(p) for p in m.parameters],
    "nested_tensor([p])": lambda m: torch.nested.nested_tensor([m.first]).to_padded_tensor(0.0),
    "group.allreduce([p.grad])": _by_group,
}
"""Those that wait only under the guard."""
FLOAT = "torch.FloatTensor"


def _scale(moment: Moment) -> None:
    with torch.no_grad():
        for p in moment.parameters:
            p.mul_(0.99)


def _reload(moment: Moment) -> None:
    moment.ddp.load_state_dict({k: v.clone() for k, v in moment.ddp.state_dict().items()})


def _reload_optimizer(moment: Moment) -> None:
    moment.optimizer.load_state_dict(copy.deepcopy(moment.optimizer.state_dict()))


WRITES: dict[str, Callable[[Moment], Any]] = {
    "p.mul_": _scale,
    "load_state_dict": _reload,
    "optimizer.load_state_dict": _reload_optimizer,
    "p.data.add_": lambda m: m.first.data.add_(0.01),
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
}
"""In which steps gradients are accumulated."""
DEEDS = {**READS, **WRITES}
ALL_DEEDS = {**DEEDS, **GUARDED_READS}
PLACES = ("before the forward pass", "after the forward pass", "after backward", "after step")


# ---------------------------------------------------------------------- the script


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnScript:
    """A training script; its values say all that was drawn."""

    number: int
    model: str
    optimizers: tuple[str, ...]
    """One, or two that share the parameters."""
    scheduler: str
    zero: str
    micro_batches: int
    accumulation: str
    no_sync: bool
    clip: str
    clip_every: int
    attached: bool
    """Whether the loss needs a module, a buffer and an attribute that hang on the wrapper."""
    deeds: tuple[tuple[str, str, int, int], ...]
    """What is read or changed, where in the loop, from which step on, every how many steps."""
    changes: tuple[tuple[str, int], ...]
    """What is changed of the optimizers, and at which step."""
    style: Style
    let_through: float
    """The part of a round's messages that lands before ``backward`` returns."""
    plans: str
    """How our wrapper comes to its plan: by hand, or measured in a longer training."""
    guard: bool
    """Whether C++ code waits for pending values."""
    threads: tuple[str, ...]
    """What threads read as long as the training lasts; their values are not compared."""

    def __call__(self, side: Side) -> None:
        """Train."""
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
        schedulers = [SCHEDULERS[self.scheduler](o) for o in optimizers]
        for read in self.threads:
            side.read_in_thread(partial(READS[read], Moment(ddp, optimizers[0], side)))
        for step in side.steps:
            self._do(PLACES[0], side, ddp, optimizers[0], step)
            if self.zero.startswith("before"):
                self._zero(ddp, optimizers)
            # Torch cannot accumulate in the first step of a static graph.
            whole = ddp.static_graph and step == 0
            accumulates = ACCUMULATION[self.accumulation](step) and not whole
            present = micro_batches if accumulates else 1
            for micro in range(present):
                last = micro == present - 1
                with ddp.no_sync() if self.no_sync and not last else nullcontext():
                    loss = loss_of(ddp, step, micro)
                    if self.attached:
                        loss = loss + ddp.penalty(loss, ddp.factor)
                        ddp.history.append(float(loss))
                    if last:
                        self._do(PLACES[1], side, ddp, optimizers[0], step)
                    loss.backward()
            side.note("loss", loss)
            self._do(PLACES[2], side, ddp, optimizers[0], step)
            if self.clip != "none" and step % self.clip_every == 0:
                self._clip(side, ddp)
            for what, at in self.changes:
                if step == at:
                    CHANGES[what](optimizers[0])
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            self._do(PLACES[3], side, ddp, optimizers[0], step)
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

    def _clip(self, side: Side, ddp: Any) -> None:
        # torch takes no norm over several types at once.
        chosen = [p for p in ddp.parameters() if p.requires_grad]
        if self.clip == "norm":
            side.note("norm", nn.utils.clip_grad_norm_(chosen, 0.5, foreach=False))
        elif not any(p.is_complex() for p in chosen):
            nn.utils.clip_grad_value_(chosen, 0.05)

    def _do(self, place: str, side: Side, ddp: Any, optimizer: Any, step: int) -> None:
        for what, where, since, every in self.deeds:
            if where == place and step >= since and (step - since) % every == 0:
                result = ALL_DEEDS[what](Moment(ddp, optimizer, side))
                if what not in WRITES:
                    side.note(f"{what} {place}", result)


def _divisible(gradient: torch.Tensor) -> torch.Tensor:
    """Round a gradient so that a third of it, and sums of thirds, are exact in any order.

    Plans sum in another order than DDP where ranks are three; so they must agree to the last
    bit all the same. A multiple of 3 with few bits is still exact when it is multiplied by 1/3 as
    floating-point numbers are.
    """
    if gradient.is_complex():
        return torch.view_as_complex(_divisible(torch.view_as_real(gradient)))
    unit, most = (2.0**-6, 2.0**3) if gradient.dtype == torch.bfloat16 else (2.0**-12, 2.0**15)
    return (gradient / (3 * unit)).round().clamp(-most, most) * (3 * unit) + 0.0  # no -0.0


def drawn(number: int) -> DrawnScript:
    """Return the script of a number."""
    random_ = random.Random(number)
    pick = random_.choice
    model = pick(list(MODELS))
    known = [*MODELS[model].optimizers, *OWN] if model != "complex" else MODELS[model].optimizers
    static = "static graph" in model

    def some(of: dict[str, Any]) -> tuple[str, str, int, int]:
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
        optimizers=tuple(pick(known) for _ in range(pick((1, 1, 1, 2)))),
        scheduler=scheduler,
        zero=pick(
            ["before", "before", "before, in place", "before, model", "after", "after, in place"]
        ),
        micro_batches=pick((1, 1, 1, 2, 3)),
        accumulation=pick(list(ACCUMULATION)),
        no_sync=pick((True, False)),
        clip=pick(("none", "none", "none", "norm", "value")),
        clip_every=pick((1, 1, 4)),
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
        plans=pick(list(PLANS)) if random_.random() < 0.03 else "by hand",
        guard=guard,
        threads=tuple(pick(IN_THREADS) for _ in range(pick((0, 0, 0, 1, 2, 3)))),
    )
