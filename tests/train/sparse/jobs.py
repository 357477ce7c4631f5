"""What worker processes run: exchanges over a process group, and training with the hook."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from syncline.errors import SynclineError, UserError
from syncline.hooks import GTopKState, Recipe, gtopk, resharded
from syncline.train.sparse.algorithms import ALGORITHMS, Content, Refusal, Share
from syncline.train.sparse.sparse_transport import SparseTransport
from syncline.train.sparse.vector import Precision, Quota, SparseVector, rounded
from syncline.train.sparse.wire import WireFormat
from tests.timeouts import DEADLINE_S, TIMEOUT, group_that_gives_up
from tests.train.sparse.marked_memory import marked_memories
from tests.train.sparse.vectors import largest

LENGTH, K = 1000, 37
QUOTA = Quota((LENGTH,), (K,))


def vector_of(rank: int, precision: Precision) -> SparseVector:
    """Return what a rank takes part with, the same in every process."""
    values = np.random.default_rng(rank).standard_normal(LENGTH, np.float32)
    return rounded(largest(values, K), precision)[0]


def share_of(rank: int, ranks: int, precision: Precision) -> Share:
    return Share(rank, ranks, vector_of(rank, precision), QUOTA, precision)


def wire_of(precision: Precision, digest: int = 5) -> WireFormat:
    return WireFormat(k=K, length=LENGTH, precision=precision, digest=digest)


def own_group() -> dist.ProcessGroup:
    group = dist.new_group(timeout=TIMEOUT)
    assert group is not None
    return group


def exchanges(precision: Precision) -> dict[str, list[np.ndarray]]:
    """Return what every algorithm delivers and returns on this rank."""
    transport = SparseTransport(own_group(), TIMEOUT)
    found = {}
    for name, algorithm in ALGORITHMS.items():
        share = share_of(transport.rank, transport.ranks, precision)
        outcome = transport.run(algorithm, share, wire_of(precision))
        assert isinstance(outcome.delivered, SparseVector)
        found[name] = [outcome.delivered.dense(), outcome.returned.dense()]
    return found


def differing_exchanges(name: str, differing: int) -> str:
    """Return what is said where one rank is in another exchange."""
    transport = SparseTransport(own_group(), TIMEOUT)
    wire = wire_of("float32", 6 if transport.rank == differing else 5)
    share = share_of(transport.rank, transport.ranks, "float32")
    try:
        outcome = transport.run(ALGORITHMS[name], share, wire)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return f"{outcome.delivered}" if isinstance(outcome.delivered, Refusal) else "delivered"


def a_rank_that_does_not_come(name: str) -> str:
    """Return what is said where the last rank takes no part."""
    group = own_group()
    transport = SparseTransport(group, timedelta(seconds=1))
    if transport.rank == transport.ranks - 1:
        return "absent"
    content: Content = vector_of(transport.rank, "float32")
    share = Share(transport.rank, transport.ranks, content, QUOTA, "float32")
    try:
        transport.run(ALGORITHMS[name], share, wire_of("float32"))
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "delivered"


# Training

MODEL_SEED = 7


def model() -> nn.Sequential:
    torch.manual_seed(MODEL_SEED)
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def with_the_hook(
    *, check: bool = False
) -> tuple[nn.Sequential, DistributedDataParallel, GTopKState]:
    """Return the model, its wrapper and the hook's state, at density 0.05."""
    net = model()
    wrapped = DistributedDataParallel(net)
    state = GTopKState(wrapped, Recipe(density=0.05), check=check)
    wrapped.register_comm_hook(state, gtopk)
    return net, wrapped, state


def trained(
    recipe: dict[str, Any],
    steps: int,
    *,
    check: bool = True,
    bucket_cap_mb: float = 0.002,
    state: dict[str, Any] | None = None,
    first: int = 0,
    begin: dict[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    ahead: bool = False,
    **ddp: Any,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Train with the hook; return the losses, the parameters and the hook's state."""
    net = model().to(device)
    if begin is not None:
        net.load_state_dict(begin)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb, **ddp)
    kept = GTopKState(wrapped, Recipe(**recipe), check=check)
    if state is not None:
        kept.load_state_dict(state)
    wrapped.register_comm_hook(kept, gtopk)
    losses = train(wrapped, range(first, first + steps), ahead=kept if ahead else None)
    return losses, {n: p.clone() for n, p in net.state_dict().items()}, kept.state_dict()


def made_before_the_model(steps: int) -> tuple[bool, bool, str]:
    """Train with a state that was made first, and with one of a model that has made one step.

    Returns:
        Whether the first steps are as without a hook, the later ones as with a state of the model;
        what loading says before there is a model.
    """
    recipe = Recipe(density=0.05, unit="model")
    early = GTopKState(recipe, check=True)
    refused = ""
    try:
        early.load_state_dict({})
    except UserError as error:
        refused = str(error)
    nets = [model(), model()]
    nets[1].load_state_dict(nets[0].state_dict())
    hooked, plain = (DistributedDataParallel(net) for net in nets)
    hooked.register_comm_hook(early, gtopk)
    train(hooked, range(1))
    train(plain, range(1))
    first = _same_parameters(*nets)
    later = DistributedDataParallel(nets[1])
    later.register_comm_hook(GTopKState(later, recipe), gtopk)
    train(hooked, range(1, steps))
    train(later, range(1, steps))
    return first, _same_parameters(*nets), refused


def _same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def train(
    wrapped: nn.Module,
    steps: range,
    *,
    momentum: float = 0.0,
    ahead: GTopKState | None = None,
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
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def hooked(
    recipe: dict[str, Any], steps: int, ddp: dict[str, Any] | None = None
) -> tuple[list[float], Any, Any]:
    losses, parameters, state = trained(recipe, steps, **(ddp or {}))
    return losses, plain(parameters), plain(state["residuals"])


def by_torch(recipe: dict[str, Any]) -> list[str]:
    """Return what differs between trainings by the native core and by operations of torch."""
    expected = trained(recipe, 6)
    with marked_memories():
        found = trained(recipe, 6)
    differing = [] if found[0] == expected[0] else ["losses"]
    differing += [
        name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])
    ]
    return differing + [
        f"{what} of {name}"
        for what in ("residuals", "velocities")
        for name, values in expected[2][what].items()
        if not torch.equal(found[2][what][name], values)
    ]


def on_a_gpu(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank's GPU, or on one for all; return what becomes of it."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    losses, parameters, state = trained(recipe, 6, device=device)
    assert all(residual.device.type == "cpu" for residual in state["residuals"].values())
    return {"losses": losses, "parameters": {n: p.cpu().numpy() for n, p in parameters.items()}}


def velocities_and_changes(recipe: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return which velocities are 0 after a step, and which parameters have changed."""
    before = torch.cat([p.detach().flatten() for p in model().parameters()])
    _, parameters, state = trained(recipe, 1)
    velocities = torch.cat([state["velocities"][name] for name in parameters])
    after = torch.cat([p.flatten() for p in parameters.values()])
    return (velocities == 0).numpy(), (after != before).numpy()


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def unhooked(steps: int, momentum: float = 0.0) -> tuple[list[float], Any]:
    """Train with DDP's own exchange."""
    net = model()
    losses = train(DistributedDataParallel(net), range(steps), momentum=momentum)
    return losses, plain(net.state_dict())


def resumed(recipe: dict[str, Any], ahead: bool = False) -> bool:
    """Return whether six steps are the same as three, a checkpoint, and three."""
    whole = trained(recipe, 6, ahead=ahead)
    _, parameters, state = trained(recipe, 3, ahead=ahead)
    rest = trained(recipe, 3, state=state, first=3, begin=parameters, ahead=ahead)
    return (
        whole[0][3:] == rest[0]
        and all(torch.equal(whole[1][name], rest[1][name]) for name in whole[1])
        and all(
            torch.equal(whole[2]["residuals"][name], rest[2]["residuals"][name])
            for name in whole[2]["residuals"]
        )
    )


def resharded_sums(recipe: dict[str, Any]) -> list[float]:
    """Train, gather the states, share them out to one rank more and to one less."""
    _, _, state = trained(recipe, 3)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)

    def total(of: list[Any]) -> torch.Tensor:
        return torch.stack([each["residuals"]["3.weight"].double() for each in of]).sum(0)

    ranks = len(states)
    return [
        float((total(resharded(states, n)) - total(states)).abs().max())
        for n in (ranks - 1, ranks, ranks + 1)
    ]


def accumulated() -> tuple[np.ndarray, np.ndarray]:
    """Return averages of two accumulated backward passes, and of one with both batches."""
    found = []
    for apart in (True, False):
        net = model()
        wrapped = DistributedDataParallel(net)
        state = GTopKState(wrapped, Recipe(density=1.0), check=True)
        wrapped.register_comm_hook(state, gtopk)
        batches = [batch(step, dist.get_rank())[0] for step in range(2)]
        if apart:
            with wrapped.no_sync():
                wrapped(batches[0]).square().sum().backward()
            wrapped(batches[1]).square().sum().backward()
        else:
            wrapped(torch.cat(batches)).square().sum().backward()
        assert state.step == 1
        gradient = net[3].weight.grad
        assert gradient is not None
        found.append(gradient.numpy().copy())
    return found[0], found[1]


def joined_early() -> tuple[int, np.ndarray, float]:
    """Train on uneven inputs; return steps, a residual and how far parameters are from rank 0's."""
    net, wrapped, state = with_the_hook(check=True)
    with wrapped.join():
        train(wrapped, range(3 + 2 * dist.get_rank()))
    apart = 0.0
    for parameter in net.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        apart = max(apart, float((first - parameter).abs().max()))
    return state.step, state.state_dict()["residuals"]["3.weight"].numpy(), apart


def clipped(norm: float) -> np.ndarray:
    """Return the average of independent gradients, each of norm 10, of a parameter."""
    wrapped = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    state = GTopKState(wrapped, Recipe(density=1.0, clip_norm=norm))
    wrapped.register_comm_hook(state, gtopk)
    given = torch.zeros(1, 8)
    given[0, dist.get_rank()] = 10.0
    wrapped(given).sum().backward()
    found = wrapped.module.weight.grad
    assert found is not None
    return found.numpy()


def channels_last() -> tuple[np.ndarray, np.ndarray]:
    """Return the average of a convolution's gradient with the hook, and without."""
    found = []
    for hook in (True, False):
        torch.manual_seed(MODEL_SEED)
        net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
        if hook:
            state = GTopKState(wrapped, Recipe(density=1.0, dense_names=("bias",)), check=True)
            wrapped.register_comm_hook(state, gtopk)
        generator = torch.Generator().manual_seed(dist.get_rank())
        wrapped(torch.randn(2, 3, 8, 8, generator=generator)).square().mean().backward()
        assert net.weight.grad is not None
        found.append(net.weight.grad.numpy().copy())
    return found[0], found[1]


def moved_ahead(momentum: float) -> dict[str, bool]:
    """Say what is right about the weights between a forward pass and the update, and after it."""
    torch.manual_seed(MODEL_SEED)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(288, 4)
    )
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.002)
    state = GTopKState(wrapped, Recipe(density=0.05, dense_names=("*.bias",)), check=True)
    wrapped.register_comm_hook(state, gtopk)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=momentum)
    state.step_ahead(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ranks = dist.get_world_size()

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    def loss() -> torch.Tensor:
        inputs = torch.randn(6, 3, 8, 8, generator=generator)
        return nn.functional.mse_loss(wrapped(inputs), torch.ones(6, 4))

    right: dict[str, bool] = {}
    for step in range(4):
        before = weights()
        residuals = state.state_dict()["residuals"]
        # What waits is to bring the weights as far as with the learning rate of the step before.
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        with wrapped.no_sync():
            loss().backward()  # gradients of two passes are accumulated at the same place
        ahead = weights()
        loss().backward()
        for name, values in before.items():
            expected = values.clone()
            if name in residuals:
                strides = expected.shape, expected.stride()
                expected -= rate / (1 - momentum) / ranks * residuals[name].as_strided(*strides)
                moved = not torch.equal(expected, values)
                right[f"{step}, {name}: moved from the second step on"] = moved == (step > 0)
            right[f"{step}, {name}: where"] = torch.allclose(ahead[name], expected, atol=1e-7)
        right[f"{step}: once"] = all(torch.equal(ahead[n], p) for n, p in weights().items())
        if step == 1:
            saved = net.state_dict()
            right["saved"] = all(torch.equal(before[n], saved[n]) for n in before)
        if step == 2:
            net.eval()
            net(torch.zeros(1, 3, 8, 8))
            net.train()
            right["judged"] = all(torch.equal(before[n], p) for n, p in weights().items())
            with wrapped.no_sync():
                loss()
            right["ahead again"] = not torch.equal(before["0.weight"], weights()["0.weight"])
        if step == 3:  # as a scaler skips it: a step whose gradients are not used
            optimizer.zero_grad()
            loss().backward()
            saved = net.state_dict()
            right["skipped"] = all(torch.equal(before[n], saved[n]) for n in before)
            loss()
            other = {name: values + 1 for name, values in before.items()}
            net.load_state_dict(other)  # ahead, and not updated
            loss()
            saved = net.state_dict()
            right["loaded"] = all(torch.equal(other[n], saved[n]) for n in other)
        optimizer.step()
        optimizer.zero_grad()
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, plain(weights()))
        right[f"{step}: same on all ranks"] = all(
            np.array_equal(other[n], everyone[0][n]) for other in everyone for n in other
        )
    return right


def joined_while_ahead() -> list[bool]:
    """Say in which steps two weights are ahead; the second joins the optimizer in step 2.

    In all of them they are put back.
    """
    net, wrapped, state = with_the_hook()
    first, second = net[0].weight, net[3].weight
    optimizer = torch.optim.SGD([first], lr=0.1)
    state.step_ahead(optimizer)
    found = []
    for step in range(4):
        before = [first.detach().clone(), second.detach().clone()]
        wrapped(batch(step, dist.get_rank())[0]).square().sum().backward()
        found += [not torch.equal(w, b) for w, b in zip([first, second], before, strict=True)]
        if step == 2:
            optimizer.add_param_group({"params": [second]})
        saved = net.state_dict()
        assert torch.equal(saved["0.weight"], before[0])
        assert torch.equal(saved["3.weight"], before[1])
        optimizer.step()
    return found


def overshoots(ahead: bool) -> float:
    """Return how far from the minimum of a parabola the weights end; they begin at 1.

    Each waits for 50 steps, and what 50 gradients add up to is 5 times the way.
    """
    net = nn.Linear(100, 1, bias=False)
    nn.init.ones_(net.weight)
    wrapped = DistributedDataParallel(net)
    state = GTopKState(wrapped, Recipe(density=0.02))
    wrapped.register_comm_hook(state, gtopk)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if ahead:
        state.step_ahead(optimizer)
    for _ in range(1000):
        optimizer.zero_grad()
        (wrapped(torch.eye(100)).square().sum() / 2).backward()
        optimizer.step()
    return float(net.weight.detach().abs().max())


def one_ahead_alone() -> str:
    """Return what is said where rank 1 steps ahead and no other does."""
    _, wrapped, state = with_the_hook()
    try:
        train(wrapped, range(1), ahead=state if dist.get_rank() == 1 else None)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def updated_ahead(by: str) -> list[bool]:
    """Say of each step whether the update was made where the weights belong.

    Args:
        by: ``"closure"``, or another optimizer than the one that is stepped ahead with.
    """
    net, wrapped, state = with_the_hook()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state.step_ahead(optimizer)
    # The other one has a parameter that is no model's, and only some of the model's.
    given = [nn.Parameter(torch.zeros(1)), *list(net.parameters())[2:]]
    other = torch.optim.SGD(given, lr=0.1)
    stepping = optimizer if by == "closure" else other
    updated = {id(p) for group in stepping.param_groups for p in group["params"]}

    def loss_of(step: int) -> float:
        net.zero_grad()
        inputs, targets = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        return loss.item()

    right = []
    for step in range(4):
        before = {name: values.clone() for name, values in net.state_dict().items()}
        if by == "closure":
            optimizer.step(functools.partial(loss_of, step))
        else:
            loss_of(step)
            other.step()
        expected = {
            name: before[name] - 0.1 * p.grad if id(p) in updated else before[name]
            for name, p in net.named_parameters()
            if p.grad is not None
        }
        found = net.state_dict()
        right.append(all(torch.allclose(found[n], e, atol=1e-7) for n, e in expected.items()))
    return right


def copied_ahead() -> list[bool]:
    """Say whether copies of a model that steps ahead can be had, and do not."""
    net, wrapped, state = with_the_hook()
    train(wrapped, range(3), ahead=state)
    copies = [pickle.loads(pickle.dumps(net)), copy.deepcopy(net)]
    right = []
    for each in copies:
        before = [p.detach().clone() for p in each.parameters()]
        each(batch(9, 0)[0]).square().sum().backward()
        right.append(all(torch.equal(p, b) for p, b in zip(each.parameters(), before, strict=True)))
    return right


def dropped_ahead() -> list[bool]:
    """Say what is left of stepping ahead once nothing refers to the state."""
    net, wrapped, state = with_the_hook()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state.step_ahead(optimizer)
    for step in range(3):
        before = [values.clone() for values in net.state_dict().values()]
        wrapped(batch(step, dist.get_rank())[0]).square().sum().backward()
        if step < 2:
            optimizer.step()
    gone = weakref.ref(state)
    ahead = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    held = [wrapped, state]
    del wrapped, state

    def let_go(*_: Any) -> None:
        held.clear()
        gc.collect()

    # In the midst of another optimizer's step, where torch goes through the hooks on all steps.
    handles = [register_optimizer_step_pre_hook(hook) for hook in (let_go, lambda *_: None)]
    torch.optim.SGD(model().parameters()).step()
    for handle in handles:
        handle.remove()
    back = [torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    hooks = [*net._forward_pre_hooks.values(), *net._state_dict_pre_hooks.values()]
    hooks += [*net._load_state_dict_pre_hooks.values()]
    another, _, state = with_the_hook()
    state.step_ahead(torch.optim.SGD(another.parameters(), lr=0.1))
    hooks_on_steps = _global_optimizer_pre_hooks.values()
    on_steps = [hook for hook in hooks_on_steps if hook.__module__.startswith("syncline.")]
    return [any(ahead), all(back), gone() is None, not hooks, len(on_steps) == 1]


def ahead_refusals(case: str) -> str:
    """Return what is said where something is stepped ahead with that cannot be."""
    net = model()
    recipe = Recipe(density=0.05, dense_names=("*",) if case == "all dense" else ())
    state = GTopKState(net, recipe)
    parameters = list(net.parameters())
    optimizers = {
        "adam": lambda: torch.optim.Adam(parameters),
        "dampening": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.5, dampening=0.1),
        "ascent": lambda: torch.optim.SGD(parameters, lr=0.1, maximize=True),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=1.0),
        "all dense": lambda: torch.optim.SGD(parameters, lr=0.1),
        "other model": lambda: torch.optim.SGD(model().parameters(), lr=0.1),
        "twice": lambda: torch.optim.SGD(parameters, lr=0.1),
    }
    optimizer = optimizers[case]()
    try:
        state.step_ahead(optimizer)
        state.step_ahead(optimizer)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(case: str) -> str:
    """Return what is said where this rank, or another, gives something that cannot be used."""
    rank = dist.get_rank()
    recipe = Recipe(density=0.02 if case == "recipe" and rank == 1 else 0.01)
    net: nn.Module = model()
    if case == "sparse":
        net = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    if case == "half" and rank == 1:
        net = net.half()
    if case == "other model" and rank == 1:
        net = nn.Linear(2, 2)
    if case == "frozen":
        net.requires_grad_(False)
    try:
        # A scaler that is not enabled changes nothing.
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        state = GTopKState(net, recipe, scaler=scaler)
        if case == "checkpoint recipe":
            saved = state.state_dict()
            saved["recipe"]["density"] = 0.5
            state.load_state_dict(saved)
        if case == "checkpoint rank":
            state.load_state_dict({**state.state_dict(), "rank": 7})
        if case == "checkpoint version":
            state.load_state_dict({"version": 0})
        if case == "checkpoint model":
            saved = state.state_dict()
            del saved["residuals"]["0.weight"]
            state.load_state_dict(saved)
        wrapped = DistributedDataParallel(net)
        wrapped.register_comm_hook(state, gtopk)
        if case == "steps" and rank == 1:
            state.load_state_dict({**state.state_dict(), "step": 1})
        if case == "nan" and rank == 1:
            with torch.no_grad():
                next(iter(net.parameters()))[0, 0] = 1.0
            net[3].weight.register_hook(lambda grad: grad * float("nan"))
        train(wrapped, range(1))
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def freed() -> tuple[bool, bool]:
    """Say whether a state and its thread are gone once nothing refers to the state."""
    wrapped = DistributedDataParallel(model())
    state = GTopKState(wrapped, Recipe(density=0.1))
    wrapped.register_comm_hook(state, gtopk)
    train(wrapped, range(2))
    thread, gone = state._executor._thread, weakref.ref(state)
    assert thread is not None
    del wrapped, state
    gc.collect()
    thread.join(DEADLINE_S)
    return gone() is None, not thread.is_alive()


def lost_peer() -> str:
    """Return what is said where a rank stops training."""
    net = model()
    wrapped = DistributedDataParallel(net)
    group = group_that_gives_up(2.0)
    state = GTopKState(wrapped, Recipe(density=0.1), group)
    wrapped.register_comm_hook(state, gtopk)
    if dist.get_rank() == 1:
        return "absent"
    try:
        train(wrapped, range(1))
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
