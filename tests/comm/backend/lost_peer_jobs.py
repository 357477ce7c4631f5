"""Everything in torch that waits for a collective, with a peer that is gone: see :data:`CASES`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.comm.groups import Transport
from tests.comm.groups.mortal_jobs import initialize
from tests.mortal import Place

How = Literal["dies", "is silent"]
Case = Iterator[None]
VICTIM = 1
WIDTH = 64
SHORT = timedelta(seconds=0.3)  # the timeout once a rank is silent


def loses_a_peer(place: Place, name: str, how: How, transport: Transport) -> None:
    """Run a case. Where it yields, rank 1 ends or stops; the others go on, to an error."""
    initialize(place, transport)
    torch.manual_seed(0)
    case = CASES[name]()
    next(case)
    place.tell(f"{place.rank} is ready")
    for rank in range(place.ranks):
        place.await_(f"{rank} is ready")
    if place.rank == VICTIM:
        (place.folder / "victim").write_text(str(os.getpid()))
        place.tell("victim goes")
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    place.await_("victim goes")
    if how == "is silent":
        world().set_timeout(SHORT)
    try:
        next(case, None)
    finally:
        if how == "is silent":
            place.tell(f"{place.rank} has ended")
            for rank in set(range(place.ranks)) - {VICTIM}:
                place.await_(f"{rank} has ended")
            os.kill(int((place.folder / "victim").read_text()), signal.SIGKILL)


# ------------------------------------------------------------------ training


class Net(nn.Module):
    """A few layers, one of which has buffers, and one of which need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, spare: bool = True) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layers(inputs))
        return self.spare(found) if spare else found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, spare: bool = True) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH), spare).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trains(
    steps: int = 3,
    *,
    wrapper: Callable[..., Any] = DistributedDataParallel,
    prepare: Callable[[Any], object] = lambda _: None,
    broadcast_buffers: bool = False,
    **options: Any,
) -> Case:
    """Train; the peer is gone after some steps."""
    model = wrapper(Net(), bucket_cap_mb=0.01, broadcast_buffers=broadcast_buffers, **options)
    prepare(model)
    optimizer, spare = sgd(model), "find_unused_parameters" not in options
    for _ in range(steps):
        step(model, optimizer, spare=spare)
    yield
    step(model, optimizer, spare=spare)


def hooked(hook: Any, state: Any = None) -> Case:
    return trains(prepare=lambda model: model.register_comm_hook(state, hook))


def constructs(wrapper: Callable[..., Any]) -> Case:
    """Construct a wrapper whose peer is gone before."""
    yield
    wrapper(Net())


def joins(steps: int) -> Case:
    """Use ``join``, with so many steps when the peer is gone."""
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    optimizer = sgd(model)
    with model.join():
        step(model, optimizer)
        yield
        for _ in range(steps):
            step(model, optimizer)


def shares_the_optimizer() -> Case:
    """Broadcast updated parameters with ZeRO."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds

    net = Net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.01)
    step(net, optimizer)
    yield
    step(net, optimizer)


def shards() -> Case:
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*net.layers, net.spare, net):
        fully_shard(module, mesh=mesh)
    optimizer = sgd(net)
    step(net, optimizer)
    yield
    step(net, optimizer)


POWER_SGD = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
ALL_REDUCE = default_hooks.allreduce_hook
OURS = syncline.DistributedDataParallel
TRAININGS: dict[str, Callable[[], Case]] = {
    "DDP": trains,
    "DDP, buffers": partial(trains, broadcast_buffers=True),
    "DDP, first step": partial(trains, 0),
    "DDP, buckets rebuilt": partial(trains, 1),
    "DDP, static graph": partial(trains, static_graph=True),
    "DDP, static graph, first step": partial(trains, 0, static_graph=True),
    "DDP, unused parameters": partial(trains, find_unused_parameters=True),
    "DDP, bucket views": partial(trains, gradient_as_bucket_view=True),
    "DDP, constructed": partial(constructs, DistributedDataParallel),
    "hook": partial(hooked, ALL_REDUCE),
    "hook, compressed": partial(hooked, default_hooks.fp16_compress_hook),
    "hook, wrapped": partial(hooked, default_hooks.fp16_compress_wrapper(ALL_REDUCE)),
    "hook, PowerSGD": partial(hooked, powerSGD_hook.powerSGD_hook, POWER_SGD),
    "hook, in C++": partial(
        trains,
        prepare=lambda model: model._register_builtin_comm_hook(
            dist.BuiltinCommHookType.ALLREDUCE  # type: ignore[attr-defined]
        ),
    ),
    "join": partial(joins, 1),
    "join, no more inputs": partial(joins, 0),
    "ZeRO": shares_the_optimizer,
    "FSDP2": shards,
    "ours": partial(trains, wrapper=OURS),
    "ours, first step": partial(trains, 0, wrapper=OURS),
    "ours, buffers": partial(trains, wrapper=OURS, broadcast_buffers=True),
    "ours, measuring": partial(trains, 15, wrapper=OURS),
    "ours, static graph": partial(trains, wrapper=OURS, static_graph=True),
    "ours, unused parameters": partial(trains, wrapper=OURS, find_unused_parameters=True),
    "ours, constructed": partial(constructs, OURS),
}

# ------------------------------------------------------------------ calls


def ones() -> torch.Tensor:
    return torch.ones(1000)


def of_each() -> list[torch.Tensor]:
    return [ones() for _ in range(dist.get_world_size())]


def world() -> Any:
    return dist.group.WORLD


def begun() -> Any:
    """Return the future of a collective that has begun."""
    work = dist.all_reduce(ones(), async_op=True)
    assert work is not None
    return work.get_future()


def value(future: Any) -> Any:
    return future.value()


def messages() -> None:
    """Exchange messages with the neighbours in a ring."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, ones(), (own + 1) % ranks)
    receive = dist.P2POp(dist.irecv, ones(), (own - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def several() -> None:
    """Wait for the first of several functional collectives."""
    kept = [functional.all_reduce(ones(), "sum", world()) for _ in range(5)]
    kept[0].sum()


def compiled() -> None:
    @torch.compile(backend="aot_eager")
    def function(given: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(given, "sum", world()) + 1

    function(ones()).sum()


CALLS: dict[str, Callable[[], object]] = {
    "future": lambda: begun().wait(),
    "future, then": lambda: begun().then(lambda done: done.value()[0] + 1).wait(),
    "future, then then": lambda: begun().then(lambda _: begun().wait()).then(value).wait(),
    "future, collected": lambda: torch.futures.wait_all([begun()])[0][0].sum(),
    "all_reduce": lambda: dist.all_reduce(ones()),
    "all_reduce, asynchronous": lambda: dist.all_reduce(ones(), async_op=True).wait(),  # type: ignore[union-attr]
    "broadcast": lambda: dist.broadcast(ones(), VICTIM),
    "broadcast, coalesced": lambda: dist._broadcast_coalesced(world(), of_each(), 1000, VICTIM),  # type: ignore[attr-defined]
    "all_gather": lambda: dist.all_gather(of_each(), ones()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.cat(of_each()), ones()),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(), of_each()),
    "all_to_all": lambda: dist.all_to_all(of_each(), of_each()),
    "gather": lambda: dist.gather(ones(), None if dist.get_rank() else of_each()),
    "scatter": lambda: dist.scatter(ones(), src=VICTIM),
    "barrier": dist.barrier,
    "monitored_barrier": lambda: world().monitored_barrier(SHORT),
    "recv": lambda: dist.recv(ones(), VICTIM),
    "batch_isend_irecv": messages,
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["x"], VICTIM),
    "new_group": lambda: dist.new_group(timeout=world().timeout),
    "functional all_reduce": lambda: functional.all_reduce(ones(), "sum", world()).sum(),
    "functional, waited for": lambda: functional.wait_tensor(
        functional.all_reduce(ones(), "sum", world())
    ),
    "functional, several": several,
    "functional, compiled": compiled,
    "functional all_gather": lambda: functional.all_gather_tensor(ones(), 0, world()).sum(),
    "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(
        torch.cat(of_each()), "sum", 0, world()
    ).sum(),
    "functional all_to_all": lambda: functional.all_to_all_single(
        torch.cat(of_each()), None, None, world()
    ).sum(),
    "all_reduce with a gradient": lambda: (
        with_gradients.all_reduce(ones().requires_grad_()).sum().backward()
    ),
}


def calls(function: Callable[[], object]) -> Case:
    """Call what waits for a peer that is gone before."""
    dist.all_reduce(ones())
    yield
    function()


CASES = TRAININGS | {name: partial(calls, function) for name, function in CALLS.items()}
"""Generators by name. Up to their ``yield`` all ranks take part."""
