"""Time an iteration loses to hooks and the GIL: overlap with its communication removed.

One worker, so nothing has to be exchanged. One model trains on under one wrapper after the other:
torch's DistributedDataParallel, with its default gradients (twice, which shows what is noise) and
with gradients as views of the buckets (which saves a copy, and which the engine needs), and
Syncline's with a plan of ``overlap`` for four workers on 1 Gbit/s, whose messages are as many as
there, and take no time:

- ``at once``: each has arrived as soon as it is sent. What is lost then is what hooks, the engine's
  two threads and the GIL cost.
- ``in forward``: each arrives when the next forward pass has begun, so that every gradient is
  pending when the update is asked for, and every update is made in a pre-forward hook.

They take turns in blocks of iterations; the ratio of two blocks of one round is one sample, so that
slow drifts of the machine cancel. It is the same model each time, because two copies can differ in
speed by where they lie in memory. Processor time of all threads is taken beside the time that
passes: other processes disturb it less.

Afterwards, iterations are run in which every entry into our code is timed: where it goes.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.common import median, save
from benchmarks.own_time import OwnTimes, Watched
from syncline.lab.training.models.language import TransformerLanguageModel
from syncline.lab.training.models.vision import ResNet20, ResNet50
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.overlap import Overlap
from syncline.train import engine_executor
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.engine.dense_transport import DenseTransport, Work
from syncline.train.engine.engine import Engine
from syncline.train.engine_executor import EngineExecutor
from syncline.train.measure.profiler import profile
from syncline.train.measured_iterations import MeasuredIterations
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer

STOCK, AGAIN, VIEWS = "stock", "stock again", "stock, views"
AT_ONCE, IN_FORWARD = "at once", "in forward"
VARIANTS = (STOCK, AGAIN, VIEWS, AT_ONCE, IN_FORWARD)
NETWORK = Network.line(workers=4, a_s=2e-4, b_s_per_byte=1.2e-8, name="1 Gbit/s")
"""An all-reduce of four workers in a ring at 1 Gbit/s."""
ASKED = 0.01
"""What may be lost at most."""
UNMEASURED = 6
"""Iterations before the first that counts: the engine takes over in the third."""


UPDATE = "update"
OURS = (
    Watched(UPDATE, torch.optim.SGD, "step"),
    Watched("step", DeferredOptimizer, "step"),
    Watched("pre-forward hooks", Deferral, "make_updates"),
    Watched("end of backward", EngineExecutor, "_end"),
    Watched("gradients", EngineExecutor, "_before"),
    Watched("gradients", EngineExecutor, "_accumulated"),
    Watched("ready", Engine, "ready"),
    Watched("iterations", MeasuredIterations, "begin_forward"),
)
"""Where the training thread enters our code."""


class Workload(NamedTuple):
    """What is trained."""

    name: str
    module: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    block: int
    """Iterations of a turn."""


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "resnet50",
            lambda: ResNet50(1000),
            lambda: (torch.randn(8, 3, 64, 64), torch.randint(1000, (8,))),
            block=3,
        ),
        Workload(
            "resnet20",
            lambda: ResNet20(10),
            lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))),
            block=5,
        ),
        Workload(
            "transformer",
            lambda: TransformerLanguageModel(4000),
            lambda: (torch.randint(4000, (16, 64)), torch.randint(4000, (16, 64))),
            block=5,
        ),
    )
}


class NoTransport(DenseTransport):
    """Carries nothing: with one worker, every slice is its own average.

    Args:
        group: of one worker.
        gone: what must have happened before anything has arrived.
    """

    def __init__(self, group: dist.ProcessGroup, gone: threading.Event) -> None:
        super().__init__(group)
        self._gone = gone

    def prepare(self, *_: Any) -> None:
        """Multiply by nothing: torch's reducer does that while it copies, for the same result."""

    def send(self, *_: Any) -> Work:
        """Send nothing."""
        return Work(self._wait, _nothing)

    def gather_numbers(self, own: Sequence[int]) -> tuple[Work, Callable[[], list[list[int]]]]:
        """Return the numbers of the only worker."""
        return Work(_nothing, _nothing), lambda: [list(own)]

    def _wait(self) -> None:
        self._gone.wait()


def _nothing() -> None:
    pass


class Contestant:
    """A model in training under one kind of wrapper."""

    def __init__(
        self, name: str, module: nn.Module, plan: Plan, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self._gone = threading.Event()
        self._holds = name == IN_FORWARD
        self._gone.set()
        self._inputs, self._targets = batch
        self.ddp: TorchDDP
        if name in (STOCK, AGAIN, VIEWS):
            self.ddp = TorchDDP(module, gradient_as_bucket_view=name == VIEWS)
        else:
            self.ddp = DistributedDataParallel(module, plan=plan, check=False)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        if isinstance(self.ddp, DistributedDataParallel):
            self.ddp.overlap(self.optimizer)

    def train(self, iterations: int) -> tuple[float, float]:
        """Return the seconds and the processor seconds of an iteration."""
        began_s, busy_s = time.perf_counter(), time.process_time()
        for _ in range(iterations):
            self.optimizer.zero_grad()
            output = self.ddp(self._inputs)
            loss = cross_entropy(output.flatten(0, -2), self._targets.flatten())
            if self._holds:
                self._gone.clear()
            loss.backward()
            self.optimizer.step()
            self._gone.set()
        if isinstance(self.ddp, DistributedDataParallel):
            self.ddp.synchronize()
        return (
            (time.perf_counter() - began_s) / iterations,
            (time.process_time() - busy_s) / iterations,
        )

    def start(self) -> None:
        """Train until the engine runs."""
        gone = self._gone
        transport_for = engine_executor.transport_for
        engine_executor.transport_for = lambda group, _: NoTransport(group, gone)
        try:
            self.train(1)
        finally:
            engine_executor.transport_for = transport_for
        self.train(UNMEASURED)
        if isinstance(self.ddp, DistributedDataParallel):
            assert not self.ddp.measuring, self.ddp.phase


def plan_for(workload: Workload) -> Plan:
    """Return the plan of ``overlap`` for four workers, as one that one worker can run."""
    found = profile(
        workload.module(),
        [workload.batch()],
        lambda output, targets: cross_entropy(output.flatten(0, -2), targets.flatten()),
        iterations=6,
        warmup=2,
    )
    return msgspec.structs.replace(Overlap().plan(found, NETWORK), workers=1)


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Let the variants take turns; return what each block took."""
    torch.manual_seed(0)
    plan = plan_for(workload)
    module, batch = workload.module(), workload.batch()
    blocks: list[dict[str, tuple[float, float]]] = []
    own_s: dict[str, dict[str, dict[str, float]]] = {}
    for number in range(rounds):
        block = {}
        for i in range(len(VARIANTS)):
            name = VARIANTS[(number + i) % len(VARIANTS)]
            contestant = Contestant(name, module, plan, batch)
            contestant.start()
            block[name] = contestant.train(workload.block)
            if number == rounds - 1:
                own_s[name] = own_code(contestant, workload.block)
            del contestant
            gc.collect()
        blocks.append(block)
    return {
        "blocks_s": [{name: block[name] for name in VARIANTS} for block in blocks],
        "messages": len(plan.messages),
        "tensors": len(plan.tensors),
        "own_s": {name: own_s[name] for name in VARIANTS},
    }


def own_code(contestant: Contestant, iterations: int) -> dict[str, dict[str, float]]:
    """Return by place the processor seconds and the calls of an iteration in our code.

    The update itself is there too, to be compared: in pre-forward hooks it is made in parts.
    """
    times = OwnTimes()
    ddp = contestant.ddp
    threads: dict[str, int] = {}
    watched = [*OURS]
    if isinstance(ddp, DistributedDataParallel):
        # A step that need not be deferred is made by the method that the optimizer had.
        watched += [
            Watched(UPDATE, deferred, "_whole_step")
            for deferred in ddp._training.wrapped.optimizers
        ]
        stage = planned_training(ddp).reducer.executor
        assert stage is not None
        threads = {t.name: time.pthread_getcpuclockid(t.ident or 0) for t in stage._engine.threads}
    before = {name: time.clock_gettime(clock) for name, clock in threads.items()}
    with times.watching(watched):
        contestant.train(iterations)
    found = {
        name: {"seconds": times.seconds[name] / iterations, "calls": calls / iterations}
        for name, calls in times.calls.items()
    }
    for name, clock in threads.items():
        seconds = (time.clock_gettime(clock) - before[name]) / iterations
        found[f"thread {name!r}"] = {"seconds": seconds, "calls": 1}
    return found


def tell(name: str, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Print what each variant loses; return the medians."""
    blocks = found["blocks_s"]
    print(
        f"\n{name}: {found['tensors']} gradients in {found['messages']} messages, "
        f"{len(blocks)} rounds; a stock iteration takes "
        f"{median([b[STOCK][0] for b in blocks]) * 1e3:.1f} ms, "
        f"{median([b[STOCK][1] for b in blocks]) * 1e3:.1f} ms of processor time"
    )
    lost: dict[str, dict[str, float]] = {}
    for reference, variants in (
        (STOCK, (AGAIN, AT_ONCE, IN_FORWARD)),
        (VIEWS, (AT_ONCE, IN_FORWARD)),
    ):
        for variant in variants:
            ratios = [[b[variant][i] / b[reference][i] - 1 for b in blocks] for i in (0, 1)]
            passed, busy = (median(r) for r in ratios)
            ordered = sorted(ratios[0])
            quarter = len(ordered) // 4
            lost[f"{variant} against {reference}"] = {"time": passed, "processor": busy}
            mark = "" if reference != STOCK or variant != AT_ONCE else f" (asked: {ASKED:.0%})"
            print(
                f"  {variant:11} against {reference:12}: {passed:+.2%} time (quartiles "
                f"{ordered[quarter]:+.2%} .. {ordered[-quarter - 1]:+.2%}), {busy:+.2%} processor "
                f"time{mark}"
            )
    busy_s = median([b[STOCK][1] for b in blocks])
    for variant, places in found["own_s"].items():
        listed = ", ".join(
            f"{place} {at['seconds'] * 1e6:.0f} us in {at['calls']:.0f}"
            for place, at in sorted(places.items(), key=lambda item: -item[1]["seconds"])
        )
        ours = sum(at["seconds"] for place, at in places.items() if place != UPDATE)
        print(f"  {variant}: our code {ours / busy_s:.2%} of processor time ({listed})")
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=",".join(WORKLOADS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for name in asked.models.split(","):
            found = measure(WORKLOADS[name], asked.rounds)
            measured[name] = {"lost": tell(name, found), **found}
        dist.destroy_process_group()
    save("overlap_overhead", {"asked": ASKED, "models": measured})


if __name__ == "__main__":
    main()
