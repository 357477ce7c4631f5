"""What worker processes run on GPUs, or on the CPU; each returns what the tests compare."""

from __future__ import annotations

import itertools
import shutil
import sysconfig
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline
from reproduce.bsp import BspSgd
from syncline.comm.devices import DeviceGroup
from syncline.comm.groups import Group
from syncline.train.engine.dense_transport import CudaDenseTransport
from tests.comm.devices.jobs import device_of
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import STEPS, Ours, Side, Stock, differences

SLEEP_CYCLES = 20_000_000
"""Some 10 ms: longer than an iteration of these models, so that what is not waited for is late."""


def own_device(kind: str) -> torch.device:
    """Take this rank's device; ranks share GPUs where there are fewer."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ids(device: torch.device) -> list[int] | None:
    """Return a device as DDP takes it."""
    return None if device.index is None else [device.index]


def why_not_compiled() -> str | None:
    """Say why ``torch.compile`` cannot work on a GPU here, where Triton needs a C compiler."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "torch.compile needs a C compiler here (cc, gcc or clang), and there is none"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "torch.compile needs Python.h here, and it is not there"
    return None


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )


def drawn(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(32, 64, generator=generator).to(device)


def loss_on(device: torch.device, step: int, model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(drawn(step, device)).square().mean()
    return found


def train(model: nn.Module, optimizer: Any, steps: range, device: torch.device) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_on(device, step, model).backward()
        optimizer.step()


def by_ddp(device: torch.device, steps: int, momentum: float = 0.0) -> nn.Module:
    """Return the network as DDP trains it."""
    model = TorchDDP(network().to(device), device_ids=ids(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    train(model, optimizer, range(steps), device)
    return model


def overlapped(net: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Return a network in our wrapper, and its optimizer."""
    model = syncline.DistributedDataParallel(net, device_ids=ids(device))
    return model, model.overlap(torch.optim.SGD(model.parameters(), lr=0.01))


def trains(
    side: Side, kind: str, *, clips: bool = False, compiled: bool = False, scales: bool = False
) -> None:
    """Train with Adam and a pass of accumulation now and then, as the arguments say."""
    device = own_device(kind)
    net = network().to(device)
    if compiled:
        for number in (0, 2, 4):
            net[number].compile()

    def loss_of(model: nn.Module) -> torch.Tensor:
        return loss_on(device, side.step, model)

    ddp = side.wrap(net, loss_of)
    inner = torch.optim.Adam(ddp.parameters(), lr=1e-3, foreach=not scales)
    optimizer = side.overlap(ddp, inner)
    scaler = torch.amp.GradScaler(kind, enabled=scales, init_scale=256.0)
    for step in side.steps:
        optimizer.zero_grad()
        if step % 4 == 3:
            with ddp.no_sync():
                loss_of(ddp).backward()
        loss = loss_of(ddp)
        scaler.scale(loss).backward()
        if clips:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        side.note("loss", loss)
    side.synchronize(ddp)
    side.finish(ddp, inner)


@contextmanager
def late_messages() -> Iterator[None]:
    """Let a kernel sleep before every message, so that nothing arrives by chance."""
    send = CudaDenseTransport.send

    def delayed(self: CudaDenseTransport, *given: Any) -> Any:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return send(self, *given)

    with mock.patch.object(CudaDenseTransport, "send", delayed):
        yield


def beside_ddp(kind: str, script: dict[str, bool], style: Style) -> dict[str, Any]:
    """Train under a plan, whose messages are late on a GPU, and under DDP; compare."""
    ours, stock = Ours(style), Stock()
    # A norm by messages is added up in another order.
    ours.near = stock.near = style.norm is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with late_messages(), ours.observed():
            trains(ours, kind, **script)
            ours.close()
        trains(stock, kind, **script)
    return {"differences": differences(ours, stock), "happened": ours.happened}


def automatic(kind: str, steps: int) -> dict[str, Any]:
    """Train as users do: measure, plan, train. Return facts and the distance from DDP."""
    device = own_device(kind)
    model, optimizer = overlapped(network().to(device), device)
    began_s = time.perf_counter()
    train(model, optimizer, range(steps), device)
    model.synchronize()
    finish(device)
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "apart": apart(model, by_ddp(device, steps))}


def apart(net: nn.Module, twin: nn.Module) -> float:
    """Return by how much parameters differ at most."""
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def bsp(kind: str, folder: str, algorithm: int, steps: int) -> float:
    """Train by BSP-SGD over a linear pipeline, and by DDP; return how far apart."""
    device = own_device(kind)
    net = network().to(device)
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    store = dist.distributed_c10d._get_default_store()
    group = Group(store, dist.get_rank(), dist.get_world_size(), name=name[0])
    with DeviceGroup(group, device_of(kind, folder)) as devices:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        model = BspSgd(net, optimizer, devices, algorithm=algorithm)
        train(model, optimizer, range(steps), device)
        model.synchronize()
        finish(device)
        dist.barrier()
    return apart(net, by_ddp(device, steps, momentum=0.9))


def collectives(kind: str) -> list[str]:
    """Run collectives on tensors of the device; return those whose results are wrong."""
    device, rank, ranks = own_device(kind), dist.get_rank(), dist.get_world_size()
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    wrong = []

    def check(name: str, found: torch.Tensor, expected: Any) -> None:
        if found.cpu().tolist() != torch.as_tensor(expected).tolist():
            wrong.append(f"rank {rank}, {name}: {found.tolist()}, expected {expected}")

    own = torch.full((5,), float(rank + 1), device=device)
    total = [float(sum(range(1, ranks + 1)))] * 5
    if kind == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    for tensor in (own.clone(), own.long()):
        dist.all_reduce(tensor)
        check(f"all_reduce of {tensor.dtype}", tensor, total)
    tensor = own.clone()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    check("all_reduce, asynchronous", tensor, total)
    tensor = own.clone()
    dist.broadcast(tensor, src=ranks - 1)
    check("broadcast", tensor, [float(ranks)] * 5)
    tensor = own.clone()
    dist.reduce(tensor, dst=0)
    if rank == 0:
        check("reduce", tensor, total)
    elif backends[kind] == "syncline":  # others leave partial sums
        check("reduce, elsewhere", tensor, own)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    check("all_gather", torch.stack(parts)[:, 0], [each + 1.0 for each in range(ranks)])
    # Gloo reads no message in a GPU's memory, and scatters no sums there.
    if ranks > 1 and backends[kind] != "gloo":
        result = torch.empty(1, device=device)
        rows = [torch.full((1,), float(each), device=device) for each in range(ranks)]
        dist.reduce_scatter(result, rows)
        check("reduce_scatter", result, [float(ranks * rank)])
        if rank == 0:
            dist.send(own, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            check("recv", tensor, [1.0] * 5)
    if "cpu" in backends:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        check("all_reduce on the CPU", tensor, [float(ranks)] * 3)
    return wrong


def captured(kind: str) -> list[str]:
    """Capture a forward pass, train with overlap, and replay it after each step is settled."""
    device = own_device(kind)
    net = network().to(device)
    still = drawn(0, device)
    replay = _captured(net, still)
    model, optimizer = overlapped(net, device)
    wrong, before = [], torch.empty(0)
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1), device)
        model.synchronize()
        seen = replay().clone()
        with torch.no_grad():
            if not torch.equal(seen, net(still)):
                wrong.append(f"step {step}: not what the module gives")
        if torch.equal(seen.cpu(), before):
            wrong.append(f"step {step}: as before it")
        before = seen.cpu()
    return wrong


def _captured(net: nn.Module, still: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a forward pass over the memory where the parameters are now."""
    if still.device.type == "cpu":  # where there are no graphs
        memory = {name: parameter.detach() for name, parameter in net.named_parameters()}
        return lambda: torch.func.functional_call(net, memory, (still,))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        net(still)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        seen: torch.Tensor = net(still)

    def replay() -> torch.Tensor:
        graph.replay()
        return seen

    return replay


def out_of_memory(kind: str) -> str:
    """Run out of memory in the third iteration; return the error, after which training goes on."""
    device = own_device(kind)
    net = network().to(device)
    model = syncline.DistributedDataParallel(net, device_ids=ids(device))
    said = ""
    for step in range(6):
        output = model(drawn(step, device))
        try:
            if step == 3:
                torch.empty(1 << 60, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            said = type(error).__name__
        output.square().mean().backward()
        model.zero_grad()
    return said


class Timed(NamedTuple):
    """What an iteration takes with the copy of its batch to the device, in seconds."""

    profiled_s: float
    copied_s: float  # of that, the copy
    by_clock_s: tuple[float, float]  # before the profile, and after


def profiled(kind: str, width: int, layers: int = 12) -> Timed:
    """Profile iterations of linear layers, and time as many in a row by two moments."""
    device = torch.device(kind)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    batch = (torch.randn(width // 4, width), torch.randn(width // 4, width))

    def in_a_row() -> float:
        moments: list[float] = []
        for turn in range(13):
            if turn in (2, 12):
                finish(device)
                moments.append(time.perf_counter())
            inputs, targets = (part.to(device) for part in batch)
            nn.functional.mse_loss(model(inputs), targets).backward()
            model.zero_grad(set_to_none=True)
        return (moments[1] - moments[0]) / 10

    before_s = in_a_row()
    profile = syncline.profile(
        model, itertools.repeat(batch), nn.functional.mse_loss, iterations=12
    )
    copied_s = sum(each.duration_s for each in profile.operations if each.phase == "copy")
    return Timed(profile.computation_s, copied_s, (before_s, in_a_row()))
