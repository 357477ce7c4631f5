"""What Syncline's wrapper does in an iteration of the steady state, counted, beside torch's class.

One rank on the CPU and a small model, so that nothing is to be gained. Counts do not depend on the
machine: calls of Python and of C, operations of torch, and for the engine the events and waits that
it asks CUDA for, on the stand-in of ``tests/streams``; there only calls of our own functions count,
as the stand-in makes many. The functions that are called more often than under torch's class are
listed, with their share of what is done every so many iterations.
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from tests.streams import HOST, FakeEvent, FakeNccl, FakeStream, recorded_streams
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

import syncline
from benchmarks.common import save
from syncline.plan.network import Network
from syncline.plan.planners.overlap import Overlap
from syncline.train import engine_executor
from syncline.train.ddp import DistributedDataParallel
from syncline.train.engine.dense_transport import CudaDenseTransport
from syncline.train.measure.profiler import profile

SOURCES = str(Path(syncline.__file__).parent)
STOCK, KEPT, OVERLAP = "torch's class", "Syncline, DDP's buckets kept", "Syncline, overlap"
LAYERS, WIDTH, BATCH = 12, 16, 8
LENGTHS = {STOCK: (60, 100), KEPT: (60, 100), OVERLAP: (8, 10)}
"""Iterations before those that count, and those: two windows of the steady state, so that whatever
is done now and then has its share. The stand-in of streams is slow."""


class Counts:
    """Calls in all threads while it is on."""

    def __init__(self, *, all_calls: bool) -> None:
        self.all_calls = all_calls
        self.totals: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.on = False

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; what ``sys.setprofile`` takes."""
        if not self.on or event not in ("call", "c_call"):
            return
        file = frame.f_code.co_filename
        ours = file.startswith(SOURCES)
        if file == __file__ or not (ours or self.all_calls):
            return
        other = threading.current_thread() is not threading.main_thread()
        language = "C" if event == "c_call" else "Python"
        if self.all_calls:
            self.totals[f"calls of {language}"] += 1
        if event == "call":
            where = file[len(SOURCES) + 1 :] if ours else "/".join(Path(file).parts[-2:])
            self.functions[f"{where}: {frame.f_code.co_qualname}"] += 1
            if ours:
                self.totals[f"calls of functions of ours{' in other threads' * other}"] += 1

    @contextmanager
    def of_cuda(self) -> Iterator[None]:
        """Count what the stand-in is asked for."""

        def counted(name: str, inner: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.on:
                    self.totals[name] += 1
                return inner(*args, **kwargs)

            return call

        with ExitStack() as stack:
            for owner, method, name in (
                (FakeEvent, "record", "events recorded"),
                (FakeEvent, "wait", "waits of a stream"),
                (FakeStream, "wait_event", "waits of a stream"),
                (FakeStream, "wait_stream", "waits of a stream"),
                (FakeEvent, "synchronize", "waits of the host"),
                (FakeStream, "synchronize", "waits of the host"),
            ):
                inner = counted(name, getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, inner))
            yield


class Operations(TorchDispatchMode):
    """Counts operations of torch in the thread that trains."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counts.on:
            self.counts.totals["operations of torch"] += 1
        return func(*args, **(kwargs or {}))


def counted(name: str, *, operations: bool) -> Counts:
    """Train under one wrapper, and count either operations of torch or calls."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    net, batch = nn.Sequential(*layers), torch.randn(BATCH, WIDTH)
    on_streams = name == OVERLAP
    counts = Counts(all_calls=not on_streams)
    with ExitStack() as stack:
        if operations:
            stack.enter_context(Operations(counts))
        else:
            # New threads of the engine are to be counted, too.
            threading.setprofile(counts.see)
            sys.setprofile(counts.see)
            stack.callback(threading.setprofile, None)
            stack.callback(sys.setprofile, None)
        stack.enter_context(counts.of_cuda())
        recorder = stack.enter_context(recorded_streams() if on_streams else nullcontext())
        if recorder is not None:

            def transport(group: Any, _: torch.device) -> CudaDenseTransport:
                return CudaDenseTransport(FakeNccl(group, recorder), HOST)  # type: ignore[arg-type]

            stack.enter_context(mock.patch.object(engine_executor, "transport_for", transport))
        model, optimizer = wrapped(name, net, batch)
        settled, iterations = LENGTHS[name]
        for number in range(settled + iterations):
            counts.on = number >= settled
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        counts.on = False
        if isinstance(model, DistributedDataParallel):
            model.synchronize()
            assert not model.measuring, "expected the steady state before what is counted"
    return counts


def wrapped(name: str, net: nn.Module, batch: torch.Tensor) -> tuple[nn.Module, Any]:
    if name == STOCK:
        stock = TorchDDP(net)
        return stock, torch.optim.SGD(stock.parameters(), lr=0.01)
    options: dict[str, Any] = {"planner": "ddp"}
    if name == OVERLAP:
        network = Network.line(workers=4, a_s=2e-4, b_s_per_byte=1.2e-8, name="1 Gbit/s")
        twin = copy.deepcopy(net)
        found = profile(twin, [(batch, batch)], lambda out, _: out.square().mean(), iterations=3)
        options = {"plan": msgspec.structs.replace(Overlap().plan(found, network), workers=1)}
    ours = DistributedDataParallel(net, check=False, cache=False, **options)
    optimizer: Any = torch.optim.SGD(ours.parameters(), lr=0.01)
    return ours, (ours.overlap(optimizer) if name == OVERLAP else optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=40, help="functions that are listed")
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: dict[str, Any] = {}
    stock: Counter[str] = Counter()
    for name, (_, iterations) in LENGTHS.items():
        counts = counted(name, operations=False)
        totals = counts.totals + counted(name, operations=True).totals
        if name == STOCK:
            stock = counts.functions
        each = {w: n / iterations for w, n in counts.functions.items()}
        more = {w: n - stock[w] / LENGTHS[STOCK][1] for w, n in each.items()}
        most = sorted(more, key=lambda what: -more[what])[: given.most]
        rows[name] = {
            "an iteration": {what: n / iterations for what, n in totals.items()},
            "more than torch's class": {what: more[what] for what in most if more[what] > 0},
        }
        print(f"{name}, an iteration:")
        for what, number in rows[name]["an iteration"].items():
            print(f"  {number:10.2f}  {what}")
        for what, number in rows[name]["more than torch's class"].items():
            print(f"      +{number:7.2f}  {what}")
    dist.destroy_process_group()
    save("steady_calls", {"layers": LAYERS, "iterations": LENGTHS, "rows": rows})


if __name__ == "__main__":
    main()
