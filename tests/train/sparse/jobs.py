"""Training with the hook, as worker processes run it, and what it ends in."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from syncline.errors import SynclineError
from syncline.hooks import GTopKState, Recipe, gtopk
from syncline.train.sparse import session
from syncline.train.sparse.torch_memory import TorchMemory
from tests.timeouts import DEADLINE_S, group_that_gives_up

Found = dict[str, Any]
MARK = "reached at once"
assert_same_bits = functools.partial(assert_close, rtol=0, atol=0)


def telling(job: Callable[..., str]) -> Callable[..., str]:
    """Let a job that an error of ours ends return what it says."""

    @functools.wraps(job)
    def told(*given: Any) -> str:
        try:
            return job(*given)
        except SynclineError as error:
            return f"{type(error).__name__}: {error}"

    return told


class MarkedMemory(TorchMemory):
    """The CPU treated as a GPU is: by operations of torch, after marks."""

    def mark(self) -> str:
        return MARK

    @contextlib.contextmanager
    def after(self, marks: Sequence[str]) -> Iterator[None]:
        assert all(mark == MARK for mark in marks)
        yield


@contextlib.contextmanager
def marked_memories() -> Iterator[None]:
    """Let exchanges that are made within work by operations of torch."""
    with mock.patch.object(session, "memory_of", MarkedMemory):
        yield


def assert_alike(found: list[Found]) -> None:
    for other in found[1:]:
        assert_same_bits(other["parameters"], found[0]["parameters"])
    assert all(p.isfinite().all() for p in found[0]["parameters"].values())


def model(*, channels_last: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    if channels_last:
        convolution = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
        return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), convolution, nn.Flatten(), nn.Linear(8, 4))
    middle = nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    return nn.Sequential(nn.Linear(8, 32), *middle, nn.Linear(32, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def with_the_hook(
    net: nn.Module | None = None,
    *,
    check: bool = False,
    group: dist.ProcessGroup | None = None,
    ddp: Found | None = None,
    **recipe: Any,
) -> tuple[Any, DistributedDataParallel, GTopKState]:
    """Return a model, its wrapper and the hook's state, at density 0.05."""
    net = model() if net is None else net
    wrapped = DistributedDataParallel(net, **(ddp or {}))
    state = GTopKState(wrapped, Recipe(**({"density": 0.05} | recipe)), group, check=check)
    wrapped.register_comm_hook(state, gtopk)
    return net, wrapped, state


def trained(
    recipe: Found,
    steps: int,
    *,
    state: Found | None = None,
    first: int = 0,
    begin: dict[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
    ahead: bool = False,
    accumulate: int = 1,
    **ddp: Any,
) -> tuple[Found, Found]:
    """Train with the hook; return what can be compared bit for bit, and the hook's state."""
    net = model(channels_last=channels_last).to(device)
    if begin is not None:
        net.load_state_dict(begin)
    _, wrapped, kept = with_the_hook(net, check=True, ddp={"bucket_cap_mb": 0.002} | ddp, **recipe)
    if state is not None:
        kept.load_state_dict(state)
    done = range(first, first + steps)
    losses = train(wrapped, done, ahead=kept if ahead else None, accumulate=accumulate)
    saved = kept.state_dict()
    assert saved["step"] == kept.step == first + steps
    parameters = {n: p.clone() for n, p in net.state_dict().items()}
    kept_back = {what: saved[what] for what in ("residuals", "velocities")}
    return {"losses": losses, "parameters": parameters, **kept_back}, saved


def train(
    wrapped: nn.Module,
    steps: range,
    *,
    momentum: float = 0.0,
    ahead: GTopKState | None = None,
    accumulate: int = 1,
) -> list[float]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0, momentum=momentum)
    if ahead is not None:
        ahead.step_ahead(optimizer)
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.9**step
        device = next(wrapped.parameters()).device
        inputs, targets = (tensor.to(device) for tensor in batch(step, dist.get_rank()))
        optimizer.zero_grad()
        for number in range(accumulate):
            last = number == accumulate - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = nn.functional.mse_loss(wrapped(inputs + number), targets)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def hooked(recipe: Found, steps: int, options: Found | None = None) -> Found:
    return trained(recipe, steps, **(options or {}))[0]


def unhooked(steps: int, momentum: float, channels_last: bool, accumulate: int) -> Found:
    net = model(channels_last=channels_last)
    wrapped = DistributedDataParallel(net)
    losses = train(wrapped, range(steps), momentum=momentum, accumulate=accumulate)
    return {"losses": losses, "parameters": net.state_dict()}


def made_before_the_model(steps: int) -> bool:
    """Train with a state that was made first, and with one of a model that has made one step.

    Say whether the first step is as without a hook, the others as with a state of the model.
    """
    recipe = Recipe(density=0.05, unit="model")
    nets = [model(), model()]
    early, plain = (DistributedDataParallel(net) for net in nets)
    early.register_comm_hook(GTopKState(recipe, check=True), gtopk)
    train(early, range(1))
    train(plain, range(1))
    first = all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    later = DistributedDataParallel(nets[1])
    later.register_comm_hook(GTopKState(later, recipe), gtopk)
    train(early, range(1, steps))
    train(later, range(1, steps))
    return first and all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def by_torch(recipe: Found) -> list[Found]:
    """Return the ends of trainings by the native core and by operations of torch."""
    native, _ = trained(recipe, 6)
    with marked_memories():
        return [native, trained(recipe, 6)[0]]


def on_a_gpu(recipe: Found) -> Found:
    """Train on this rank's GPU, or on one for all; return what becomes of it."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    found, _ = trained(recipe, 6, device=device)
    assert all(residual.device.type == "cpu" for residual in found["residuals"].values())
    return found | {"parameters": {n: p.cpu() for n, p in found["parameters"].items()}}


def velocities_and_changes(recipe: Found) -> tuple[np.ndarray, np.ndarray]:
    """Return which velocities are 0 after a step, and which parameters have changed."""
    before = torch.cat([p.detach().flatten() for p in model().parameters()])
    found, _ = trained(recipe, 1)
    velocities = torch.cat([found["velocities"][name] for name in found["parameters"]])
    after = torch.cat([p.flatten() for p in found["parameters"].values()])
    return (velocities == 0).numpy(), (after != before).numpy()


def resumed(recipe: Found, ahead: bool = False) -> tuple[Found, Found]:
    """Return the end of six steps, and that of three, a checkpoint, and three."""
    whole, _ = trained(recipe, 6, ahead=ahead)
    half, state = trained(recipe, 3, ahead=ahead)
    begin = half["parameters"]
    rest, _ = trained(recipe, 3, state=state, first=3, begin=begin, ahead=ahead)
    return whole, rest | {"losses": half["losses"] + rest["losses"]}


def joined_early() -> tuple[int, torch.Tensor, float]:
    """Train on uneven inputs; return steps, a residual and how far parameters are from rank 0's."""
    net, wrapped, state = with_the_hook(check=True)
    with wrapped.join():
        train(wrapped, range(3 + 2 * dist.get_rank()))
    apart = 0.0
    for parameter in net.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        apart = max(apart, float((first - parameter).abs().max()))
    return state.step, state.state_dict()["residuals"]["3.weight"], apart


def clipped(norm: float) -> float:
    """Return the norm of the average of independent gradients, each of norm 10."""
    net, wrapped, _ = with_the_hook(nn.Linear(8, 1, bias=False), density=1.0, clip_norm=norm)
    given = torch.zeros(1, 8)
    given[0, dist.get_rank()] = 10.0
    wrapped(given).sum().backward()
    return float(net.weight.grad.norm())


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters as they are now, where ``state_dict`` puts them back."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def moved_ahead() -> tuple[Found, Found]:
    """Return where the weights are after the second forward pass, and where they should be."""
    net, wrapped, state = with_the_hook()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state.step_ahead(optimizer)
    for step in range(2):
        before, residuals = weights_of(net), state.state_dict()["residuals"]
        loss = wrapped(batch(step, dist.get_rank())[0]).square().mean()
        found = weights_of(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    share = 0.1 / dist.get_world_size()
    assert all(residual.any() for residual in residuals.values())
    return found, {n: w - share * residuals[n].view_as(w) for n, w in before.items()}


def overshoots(ahead: bool) -> float:
    """Return how far from the minimum of a parabola the weights end; they begin at 1.

    Each waits for 50 steps, and what 50 gradients add up to is 5 times the way.
    """
    net, wrapped, state = with_the_hook(nn.Linear(100, 1, bias=False), density=0.02)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if ahead:
        state.step_ahead(optimizer)
    for _ in range(1000):
        optimizer.zero_grad()
        (wrapped(torch.eye(100)).square().sum() / 2).backward()
        optimizer.step()
    return float(net.weight.detach().abs().max())


@telling
def one_ahead_alone() -> str:
    _, wrapped, state = with_the_hook()
    train(wrapped, range(1), ahead=state if dist.get_rank() == 1 else None)
    return "trained"


@telling
def ahead_refusals(case: str) -> str:
    net = model()
    state = GTopKState(net, Recipe(density=0.05, dense_names=("*",) if case == "all dense" else ()))
    stepping: Found = {
        "dampening": {"momentum": 0.5, "dampening": 0.1},
        "ascent": {"maximize": True},
        "momentum": {"momentum": 1.0},
    }.get(case, {})
    parameters = (model() if case == "other model" else net).parameters()
    kind = torch.optim.Adam if case == "adam" else torch.optim.SGD
    optimizer = kind(parameters, lr=0.1, **stepping)
    state.step_ahead(optimizer)
    state.step_ahead(optimizer)
    return "accepted"


@telling
def refusals(case: str) -> str:
    odd = dist.get_rank() == 1
    net: Any = model()
    if case == "half" and odd:
        net = net.half()
    if case == "other model" and odd:
        net = nn.Linear(2, 2)
    recipe = Recipe(density=0.02 if case == "recipe" and odd else 0.01)
    if case == "no model":
        GTopKState(recipe).load_state_dict({})
    # A scaler that is not enabled changes nothing.
    state = GTopKState(net, recipe, scaler=torch.amp.GradScaler("cpu", enabled=False))
    saved = state.state_dict()
    if case == "checkpoint recipe":
        saved["recipe"]["density"] = 0.5
    if case == "checkpoint version":
        saved["version"] = 0
    state.load_state_dict(saved)
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(state, gtopk)
    if case == "steps" and odd:
        state.load_state_dict(saved | {"step": 1})
    if case == "nan" and odd:
        net[3].weight.register_hook(lambda grad: grad * float("nan"))
    train(wrapped, range(1))
    return "trained"


def freed() -> tuple[bool, bool]:
    """Say whether a state and its thread are gone once nothing refers to the state."""
    before = threading.enumerate()
    _, wrapped, state = with_the_hook()
    train(wrapped, range(2))
    new = [thread for thread in threading.enumerate() if thread not in before]
    [thread] = [thread for thread in new if thread.name == "syncline-sparse"]
    gone = weakref.ref(state)
    del wrapped, state, _
    gc.collect()
    thread.join(DEADLINE_S)
    return gone() is None, not thread.is_alive()


@telling
def lost_peer() -> str:
    _, wrapped, _ = with_the_hook(group=group_that_gives_up(2.0))
    if dist.get_rank() == 1:
        return "absent"
    train(wrapped, range(1))
    return "trained"
