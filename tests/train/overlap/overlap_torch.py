"""Models that torch runs in another way: again, compiled, transformed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.train.overlap.loop import ADAM, REFUSED, STATIC, UNUSED, Loop
from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS, Side
from tests.train.overlap.parts import Training

WIDTH = 16


def block(drops: bool = True) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Dropout(0.1) if drops else nn.Identity())


class Blocks(nn.Module):
    """Blocks that may each be checkpointed, or are made by a function."""

    def __init__(
        self,
        run: Callable[..., torch.Tensor] = lambda module, x: module(x),
        make: Callable[[], nn.Module] = block,
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.leave = nn.Linear(WIDTH, CLASSES)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for module in self.blocks:
            hidden = hidden + self.run(module, hidden)
        return self.leave(hidden)


again = partial(checkpoint, use_reentrant=False)
again_reentrant = partial(checkpoint, use_reentrant=True)


def shared_blocks() -> nn.Module:
    net = Blocks(again_reentrant)
    net.blocks.append(net.blocks[0])
    return net


class Whole(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return again(super().forward, x)


class Sequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(FEATURES, WIDTH), block(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self.parts, 2, x, use_reentrant=False)


def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    policies = torch_checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if keep else policies.PREFER_RECOMPUTE


contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)


compiled = partial(torch.compile, backend="aot_eager")


def compiled_in_place(module: Any) -> Any:
    module.compile(backend="aot_eager")
    return module


def compiling(*args: Any, **parts: Any) -> Loop:
    """Train without what was compiled before, and without the compiler's warnings."""

    def run(side: Side) -> None:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Loop(**parts).script(side)

    return Loop(*args, whole=run)


def with_compiled(middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    class Inner(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(x))

    Inner.middle = compiled(middle)
    return Inner()


def calling(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.norm(torch.tanh(net.hidden(torch.tanh(net.enter(x)))))


def reading(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(functional.linear(x, net.enter.weight, net.enter.bias))
    return net.norm(product(hidden, net.hidden.weight))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


class Product(nn.Module):
    def forward(self, x: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.T)


class Given(Net):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.other = compiled(Product()), Product()
        self.other.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.product(self.other(x, weight=self.enter.weight), weight=self.hidden.weight)
        return self.leave(self.norm(hidden + self.hidden.bias + self.enter.bias))


def forward_compiled() -> nn.Module:
    net = Net()
    net.forward = compiled(net.forward)  # type: ignore[method-assign]
    return net


def scripted() -> nn.Module:
    return Net(hidden=torch.jit.script(nn.Sequential(nn.Linear(20, 20), nn.Tanh())))


def wrapper_compiled(compile_: Callable[[Any], Any]) -> Loop:
    return compiling(
        SYNCHRONOUS,
        start=lambda t: t.keep(compile_(t.ddp)),
        backward=lambda t: t.backward(loss_of(t.kept, t.step)),
    )


def step_compiled(t: Training) -> None:
    t.optimizer.step = compiled(t.optimizer.step)


def export(t: Training) -> None:
    inputs = batch(t.step)[0]
    if t.step % 9 == 8:
        program = torch.export.export(t.net, (inputs,))
        t.note("exported", program.module()(inputs))
    if t.step % 9 == 5:
        t.note("traced", torch.jit.trace(t.net, inputs)(inputs))


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.net, dict(self.net.named_parameters()), (x,))


class Mapped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.vmap(lambda row: torch.tanh(self.enter(row)))(x)
        weight = self.hidden.weight
        multiply = torch.vmap(lambda row: functional.linear(row, weight, self.hidden.bias))
        return self.leave(self.norm(multiply(hidden)))


class Inside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(self.enter(y)).sum())(x)
        return super().forward(x) + 0.1 * slope[:, :CLASSES]


def penalised(model: nn.Module, step: int = 0) -> torch.Tensor:
    inputs = batch(step)[0].requires_grad_(True)
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return functional.cross_entropy(output, batch(step)[1]) + slope.square().mean()


class Surrounded(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            hidden = torch.tanh(self.enter(x))
        with torch.inference_mode():
            self.hidden(hidden.detach())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.norm(torch.tanh(self.hidden(hidden)).float())
        return self.leave(hidden)


def packed(model: nn.Module, step: int = 0) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return loss_of(model, step)


SCENARIOS = {
    "activation checkpointing": Loop(model=lambda: Blocks(again)),
    "activation checkpointing, reentrant": Loop(model=lambda: Blocks(again_reentrant)),
    "activation checkpointing, reentrant, `static_graph=True`, shared blocks": Loop(
        model=shared_blocks, ddp=STATIC
    ),
    "activation checkpointing of the whole model": Loop(model=Whole),
    "`checkpoint_sequential`": Loop(model=Sequential),
    "selective activation checkpointing": Loop(
        model=lambda: Blocks(partial(again, context_fn=contexts)), make=ADAM
    ),
    "`torch.compile` of each block": compiling(
        model=lambda: Blocks(make=lambda: compiled(block(drops=False)))
    ),
    "`block.compile()` of each block": compiling(
        model=lambda: Blocks(make=lambda: compiled_in_place(block(drops=False)))
    ),
    "`torch.compile` of a function that calls modules": compiling(
        model=lambda: with_compiled(calling)
    ),
    "a compiled function that reads parameters of modules it does not call": compiling(
        model=lambda: with_compiled(reading), ddp=UNUSED
    ),
    "a compiled block that is given another module's parameter": compiling(model=Given),
    "`torch.compile` of the model before wrapping": compiling(
        SYNCHRONOUS, model=lambda: compiled(Net())
    ),
    "`model.compile()` before wrapping": compiling(
        SYNCHRONOUS, model=lambda: compiled_in_place(Net())
    ),
    "`model.forward = torch.compile(model.forward)`": compiling(
        SYNCHRONOUS, model=forward_compiled
    ),
    "`torch.compile` of the wrapped model": wrapper_compiled(compiled),
    "`compile()` of the wrapped model": wrapper_compiled(compiled_in_place),
    "`torch.compile` of the training step": wrapper_compiled(
        lambda ddp: compiled(lambda x: ddp(x))
    ),
    "`torch.compile` of a function that calls `optimizer.step`": compiling(
        SYNCHRONOUS,
        REFUSED,
        start=lambda t: t.keep(compiled(lambda: t.optimizer.step())),
        update=lambda t: t.kept(),
    ),
    "`torch.compile` of `optimizer.step`": compiling(SYNCHRONOUS, REFUSED, start=step_compiled),
    "`torch.compile` of `optimizer.step` before `overlap`": compiling(
        SYNCHRONOUS, REFUSED, early=step_compiled
    ),
    "a part of the model as TorchScript": compiling(model=scripted),
    "the model exported, traced or scripted in between": compiling(OVERLAPS, REFUSED, after=export),
    "`functional_call` with the model's own parameters": Loop(model=Called),
    "`vmap` over several heads in the forward pass": Loop(model=Mapped),
    "`torch.func.grad` in the forward pass": Loop(model=Inside),
    "`autograd.grad` in the forward pass, with a graph (a gradient penalty)": Loop(loss=penalised),
    "a default device, `inference_mode`, `autocast` inside the forward pass": Loop(
        model=Surrounded, make=ADAM
    ),
    "saved tensors packed by hooks": Loop(loss=packed),
}
