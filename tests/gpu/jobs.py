"""What worker processes run on GPUs; each returns what the tests compare."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline
from syncline.devices import CudaDevice, DeviceGroup
from syncline.groups import Group
from syncline.parallel.bsp import BspSgd
from syncline.parallel.engine.dense_transport import CudaDenseTransport
from syncline.torch_private import default_store
from tests.parallel.overlap.overlap_plans import Style
from tests.parallel.overlap.overlap_rig import Ours, Side, Stock, differences

SLEEP_CYCLES = 20_000_000
"""Some 10 ms: longer than an iteration of these models, so that what is not waited for is late."""
LENGTH = 12


def own_gpu() -> torch.device:
    """Take this rank's GPU; ranks share where there are fewer."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )


def drawn(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(32, 64, generator=generator).to(device)


def loss_on(device: torch.device, side: Side) -> Callable[[nn.Module], torch.Tensor]:
    def loss(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(drawn(side.step, device)).square().mean()
        return found

    return loss


def trains(
    side: Side, *, clips: bool = False, compiled: bool = False, scales: bool = False
) -> None:
    """Train with Adam and a pass of accumulation now and then, as the arguments say."""
    device = own_gpu()
    net = network().to(device)
    if compiled:
        for number in (0, 2, 4):
            net[number].compile()
    loss_of = loss_on(device, side)
    ddp = side.wrap(net, loss_of)
    inner = torch.optim.Adam(ddp.parameters(), lr=1e-3, foreach=not scales)
    optimizer = side.overlap(ddp, inner)
    scaler = torch.amp.GradScaler("cuda", enabled=scales, init_scale=256.0)
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
    side.settle(ddp)
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


def beside_stock(script: dict[str, bool], style: Style) -> dict[str, Any]:
    """Train under a plan whose messages are late, and under stock DDP; say how they differ."""
    ours, stock = Ours(style), Stock()
    ours.length = stock.length = LENGTH
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with late_messages(), ours.observed():
            trains(ours, **script)
            ours.close()
        trains(stock, **script)
    torch.cuda.synchronize()
    return {"differences": differences(ours, stock), "happened": ours.happened}


def automatic(steps: int) -> dict[str, Any]:
    """Train as users do: measure, plan, train. Return facts and the distance from stock DDP."""
    device = own_gpu()
    net = network().to(device)
    model = syncline.DistributedDataParallel(net, device_ids=[device.index])
    optimizer = model.overlap(torch.optim.SGD(model.parameters(), lr=0.01))
    began_s = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        model(drawn(step, device)).square().mean().backward()
        optimizer.step()
    model.settle()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began_s
    twin = TorchDDP(network().to(device), device_ids=[device.index])
    theirs = torch.optim.SGD(twin.parameters(), lr=0.01)
    for step in range(steps):
        theirs.zero_grad()
        twin(drawn(step, device)).square().mean().backward()
        theirs.step()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return {
        "seconds": seconds,
        "apart": max(float((a - b).abs().max()) for a, b in pairs),
        "phase": model.phase,
    }


def bsp(algorithm: int, steps: int) -> float:
    """Train by BSP-SGD over a linear pipeline, and by stock DDP; return how far apart."""
    device = own_gpu()
    net, twin = network().to(device), network().to(device)
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    group = Group(default_store(), dist.get_rank(), dist.get_world_size(), name=name[0])
    with DeviceGroup(group, CudaDevice(device)) as devices:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        model = BspSgd(net, optimizer, devices, algorithm=algorithm)
        for step in range(steps):
            optimizer.zero_grad()
            model(drawn(step, device)).square().mean().backward()
            optimizer.step()
        model.settle()
        torch.cuda.synchronize()
        dist.barrier()
    ddp = TorchDDP(twin, device_ids=[device.index])
    theirs = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        theirs.zero_grad()
        ddp(drawn(step, device)).square().mean().backward()
        theirs.step()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def collectives() -> list[str]:
    """Run collectives on CUDA tensors of the group; return those whose results are wrong."""
    device, rank, ranks = own_gpu(), dist.get_rank(), dist.get_world_size()
    wrong = []

    def check(name: str, found: torch.Tensor, expected: Any) -> None:
        if found.cpu().tolist() != torch.as_tensor(expected).tolist():
            wrong.append(f"rank {rank}, {name}: {found.tolist()}, expected {expected}")

    own = torch.full((5,), float(rank + 1), device=device)
    total = [float(sum(range(1, ranks + 1)))] * 5
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor = own.clone()
    dist.all_reduce(tensor)
    check("all_reduce", tensor, total)
    tensor = own.clone()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    check("all_reduce, asynchronous", tensor, total)
    tensor = own.long()
    dist.all_reduce(tensor)
    check("all_reduce of int64", tensor, [int(total[0])] * 5)
    tensor = own.clone()
    dist.broadcast(tensor, src=ranks - 1)
    check("broadcast", tensor, [float(ranks)] * 5)
    tensor = own.clone()
    dist.reduce(tensor, dst=0)
    check("reduce", tensor, total if rank == 0 else [rank + 1.0] * 5)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    check("all_gather", torch.stack(parts)[:, 0], [each + 1.0 for each in range(ranks)])
    if ranks > 1:
        result = torch.empty(1, device=device)
        rows = [torch.full((1,), float(each), device=device) for each in range(ranks)]
        dist.reduce_scatter(result, rows)
        check("reduce_scatter", result, [float(ranks * rank)])
        if rank == 0:
            dist.send(own, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            check("recv", tensor, [1.0] * 5)
    tensor = torch.ones(3)
    dist.all_reduce(tensor) if "cpu" in _kinds() else tensor.mul_(ranks)
    check("all_reduce on the CPU", tensor, [float(ranks)] * 3)
    return wrong


def _kinds() -> set[str]:
    return {pair.split(":")[0] for pair in dist.get_backend_config().split(",")}


def captured() -> list[str]:
    """Capture a forward pass, train with overlap, and replay it after each step is settled."""
    device = own_gpu()
    net = network().to(device)
    model = syncline.DistributedDataParallel(net, device_ids=[device.index])
    optimizer = model.overlap(torch.optim.SGD(model.parameters(), lr=0.01))
    still = drawn(0, device)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        net(still)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        seen = net(still)
    wrong = []
    for step in range(LENGTH):
        optimizer.zero_grad()
        model(drawn(step, device)).square().mean().backward()
        optimizer.step()
        model.settle()
        graph.replay()
        with torch.no_grad():
            if not torch.equal(seen, net(still)):
                wrong.append(f"step {step}")
    return wrong


def out_of_memory() -> str:
    """Run out of memory in the third iteration; return the error, after which training goes on."""
    device = own_gpu()
    net = network().to(device)
    model = syncline.DistributedDataParallel(net, device_ids=[device.index])
    said = ""
    for step in range(6):
        try:
            output = model(drawn(step, device))
            if step == 3:
                torch.empty(1 << 60, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            said = type(error).__name__
        output.square().mean().backward()
        model.zero_grad()
    return said
