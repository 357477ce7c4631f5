"""Scripts in which torch runs the model in another way: again, compiled, transformed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_modules import train
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS, Script, Side

WIDTH = 16


def block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
    )


class Blocks(nn.Module):
    """Blocks that may each be checkpointed or compiled."""

    def __init__(self, run: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES)
        self.run = run or (lambda module, x: module(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for module in self.blocks:
            hidden = hidden + self.run(module, hidden)
        return self.leave(hidden)


# ---------------------------------------------------------------------- checkpointing


@feature("activation checkpointing", OVERLAPS)
def checkpointing(side: Side) -> None:
    train(side, Blocks(lambda m, x: checkpoint(m, x, use_reentrant=False)))


@feature("activation checkpointing, reentrant", OVERLAPS)
def reentrant(side: Side) -> None:
    train(side, Blocks(lambda m, x: checkpoint(m, x, use_reentrant=True)))


@feature("activation checkpointing, reentrant, `static_graph=True`, shared blocks", OVERLAPS)
def reentrant_static(side: Side) -> None:
    net = Blocks(lambda m, x: checkpoint(m, x, use_reentrant=True))
    net.blocks.append(net.blocks[0])
    train(side, net, static_graph=True)


@feature("activation checkpointing of the whole model", OVERLAPS)
def checkpointing_all(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        inputs, targets = batch(step)
        return functional.cross_entropy(checkpoint(model, inputs, use_reentrant=False), targets)

    class Whole(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    train(side, Whole())


@feature("`checkpoint_sequential`", OVERLAPS)
def checkpointing_sequential(side: Side) -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(
                nn.Linear(FEATURES, WIDTH), block(), nn.Linear(WIDTH, CLASSES)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.parts, 2, x, use_reentrant=False)

    train(side, Sequential())


@feature("selective activation checkpointing", OVERLAPS)
def selective(side: Side) -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        policies = torch_checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if keep else policies.PREFER_RECOMPUTE

    def contexts() -> Any:
        return torch_checkpoint.create_selective_checkpoint_contexts(policy)

    net = Blocks(lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=contexts))
    train(side, net, make=lambda p: Adam(p, lr=0.01))


# ---------------------------------------------------------------------- compiling


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def compiling(script: Script) -> Script:
    """Run a script without what was compiled before, and without the compiler's warnings."""

    @functools.wraps(script)
    def run(side: Side) -> None:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script(side)

    return run


@feature("`torch.compile` of each block", OVERLAPS)
@compiling
def blocks_compiled(side: Side) -> None:
    net = Blocks()
    for number, module in enumerate(net.blocks):
        module[3] = nn.Identity()
        net.blocks[number] = compiled(module)
    train(side, net)


@feature("`block.compile()` of each block", OVERLAPS)
@compiling
def blocks_compiled_in_place(side: Side) -> None:
    net = Blocks()
    for module in net.blocks:
        module[3] = nn.Identity()
        module.compile(backend="aot_eager")
    train(side, net)


@feature("`torch.compile` of a function that calls modules", OVERLAPS)
@compiling
def function_compiled(side: Side) -> None:
    class Inner(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(x))

        @torch.compile(backend="aot_eager")
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.hidden(torch.tanh(self.enter(x)))))

    train(side, Inner())


@feature("a compiled function that reads parameters of modules it does not call", OVERLAPS)
@compiling
def function_reading(side: Side) -> None:
    class Inner(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(x))

        @torch.compile(backend="aot_eager")
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(functional.linear(x, self.enter.weight, self.enter.bias))
            return self.norm(self.product(hidden, self.hidden.weight))

        def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x @ weight.T

    train(side, Inner(), find_unused_parameters=True)


@feature("a compiled block that is given another module's parameter", OVERLAPS)
@compiling
def block_given(side: Side) -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ weight.T)

    class Given(Net):
        def __init__(self) -> None:
            super().__init__()
            self.product = compiled(Product())
            self.other = Product()
            self.other.compile(backend="aot_eager", fullgraph=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.product(
                self.other(x, weight=self.enter.weight), weight=self.hidden.weight
            )
            return self.leave(self.norm(hidden + self.hidden.bias + self.enter.bias))

    train(side, Given())


@feature("`torch.compile` of the model before wrapping", SYNCHRONOUS)
@compiling
def model_compiled(side: Side) -> None:
    train(side, compiled(Net()))


@feature("`model.compile()` before wrapping", SYNCHRONOUS)
@compiling
def model_compiled_in_place(side: Side) -> None:
    net = Net()
    net.compile(backend="aot_eager")
    train(side, net)


@feature("`model.forward = torch.compile(model.forward)`", SYNCHRONOUS)
@compiling
def forward_compiled(side: Side) -> None:
    net = Net()
    net.forward = compiled(net.forward)  # type: ignore[method-assign]
    train(side, net)


def _wrapper_compiled(side: Side, compile_: Callable[[Any], Any]) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, SGD(ddp.parameters(), lr=0.05, momentum=0.9))
    run = compile_(ddp)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(run, step)
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


@feature("`torch.compile` of the wrapped model", SYNCHRONOUS)
@compiling
def wrapper_compiled(side: Side) -> None:
    _wrapper_compiled(side, compiled)


@feature("`compile()` of the wrapped model", SYNCHRONOUS)
@compiling
def wrapper_compiled_in_place(side: Side) -> None:
    def in_place(ddp: Any) -> Any:
        ddp.compile(backend="aot_eager")
        return ddp

    _wrapper_compiled(side, in_place)


@feature("`torch.compile` of the training step", SYNCHRONOUS)
@compiling
def step_compiled(side: Side) -> None:
    def around(ddp: Any) -> Any:
        return torch.compile(lambda x: ddp(x), backend="aot_eager")

    _wrapper_compiled(side, around)


def _optimizer_compiled(
    side: Side, compile_: Callable[[Any], Callable[[], None]], *, before: bool = False
) -> None:
    ddp = side.wrap(Net(), loss_of)
    optimizer = SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    update = compile_(optimizer) if before else None
    optimizer = side.overlap(ddp, optimizer)
    update = update or compile_(optimizer)
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward()
        update()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


@feature("`torch.compile` of a function that calls `optimizer.step`", SYNCHRONOUS)
@compiling
def update_compiled(side: Side) -> None:
    _optimizer_compiled(side, lambda optimizer: compiled(lambda: optimizer.step()))


def _in_place(optimizer: Any) -> Callable[[], None]:
    optimizer.step = compiled(optimizer.step)
    return lambda: optimizer.step()


@feature("`torch.compile` of `optimizer.step`", SYNCHRONOUS)
@compiling
def optimizer_step_compiled(side: Side) -> None:
    _optimizer_compiled(side, _in_place)


@feature("`torch.compile` of `optimizer.step` before `overlap`", SYNCHRONOUS)
@compiling
def optimizer_step_compiled_before(side: Side) -> None:
    _optimizer_compiled(side, _in_place, before=True)


@feature("a part of the model as TorchScript", OVERLAPS)
@compiling
def scripted(side: Side) -> None:
    net = Net(hidden=torch.jit.script(nn.Sequential(nn.Linear(20, 20), nn.Tanh())))
    train(side, net)


@feature("the model exported, traced or scripted in between", OVERLAPS)
@compiling
def exported(side: Side) -> None:
    def every(ddp: Any, step: int) -> None:
        inputs = batch(step)[0]
        if step % 9 == 8:
            program = torch.export.export(ddp.module, (inputs,))
            side.note("exported", program.module()(inputs))
        if step % 9 == 5:
            side.note("traced", torch.jit.trace(ddp.module, inputs)(inputs))

    train(side, Net(), every=every)


# ---------------------------------------------------------------------- transforming


@feature("`functional_call` with the model's own parameters", OVERLAPS)
def functional_call(side: Side) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.net, dict(self.net.named_parameters()), (x,))

    train(side, Called())


@feature("`vmap` over several heads in the forward pass", OVERLAPS)
def vmapped(side: Side) -> None:
    class Mapped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.vmap(lambda row: torch.tanh(self.enter(row)))(x)
            weight = self.hidden.weight
            hidden = torch.vmap(lambda row: functional.linear(row, weight, self.hidden.bias))(
                hidden
            )
            return self.leave(self.norm(hidden))

    train(side, Mapped())


@feature("`torch.func.grad` in the forward pass", OVERLAPS)
def gradients_inside(side: Side) -> None:
    class Inside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda y: torch.tanh(self.enter(y)).sum())(x)
            return super().forward(x) + 0.1 * slope[:, :CLASSES]

    train(side, Inside())


@feature("`autograd.grad` in the forward pass, with a graph (a gradient penalty)", OVERLAPS)
def penalised(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        inputs = batch(step)[0].requires_grad_(True)
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return functional.cross_entropy(output, batch(step)[1]) + slope.square().mean()

    train(side, Net(), loss)


@feature("a default device, `inference_mode`, `autocast` inside the forward pass", OVERLAPS)
def surroundings(side: Side) -> None:
    class Surrounded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.device("meta"):
                hidden = torch.tanh(self.enter(x))
            with torch.inference_mode():
                self.hidden(hidden.detach())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.norm(torch.tanh(self.hidden(hidden)).float())
            return self.leave(hidden)

    train(side, Surrounded(), make=lambda p: Adam(p, lr=0.01))


@feature("saved tensors packed by hooks", OVERLAPS)
def hooks(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return loss_of(model, step)

    train(side, Net(), loss)
