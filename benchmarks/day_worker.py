"""What ``device_day`` runs on every emulated host: ``python -m benchmarks.day_worker JOB``.

``JOB`` is a JSON file. Real models train under one wrapper after the other, in turns of equal
blocks; or all-reduces are timed. Rank 0 prints a line of JSON behind a mark for all that is found,
at once, so that what was measured before the time was up is not lost.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline
from benchmarks.common import median
from benchmarks.device_collectives import finish
from benchmarks.step_worker import processor_time
from syncline.lab.training.models.language import WINDOW, TransformerLanguageModel
from syncline.lab.training.models.vision import ResNet50
from syncline.plan.recipe import SPARSE_NAMES, Recipe

FOUND = "device_day: "
ALONE = "alone"
"""Nothing is exchanged: what computing takes."""
BUCKETS_MB = (5, 100)
"""Beside DDP's default of 25."""
CONTESTANTS = (
    ALONE,
    "ddp",
    *(f"ddp-{size}mb" for size in BUCKETS_MB),
    "ddp-bf16",
    "syncline",
    "syncline-bf16",
)
DENSITY = 0.001
GROUP_TIMEOUT = timedelta(seconds=60)
MEASURING_STEPS = 10
"""Between two looks at whether all ranks are done with measuring."""
Job = dict[str, Any]


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=GROUP_TIMEOUT)
    if "sizes_bytes" in job:
        all_reduces(job, device)
    else:
        contest(job, device)
    dist.all_reduce(torch.zeros(1, device=device))  # no rank leaves before the others are done
    finish(device)
    dist.destroy_process_group()


def say(**what: Any) -> None:
    if dist.get_rank() == 0:
        print(FOUND + json.dumps(what), flush=True)


def all_reduces(job: Job, device: torch.device) -> None:
    """Time all-reduces of float32 by the default group."""
    for size_bytes in job["sizes_bytes"]:
        say(size_bytes=size_bytes, seconds=exchange_s(size_bytes // 4, device, job["rounds"]))


def exchange_s(elements: int, device: torch.device, rounds: int) -> list[float]:
    vector = torch.zeros(elements, device=device)
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        finish(device)
        began_s = time.perf_counter()
        dist.all_reduce(vector)
        finish(device)
        times.append(over_all(time.perf_counter() - began_s, device))
    return times[1:]


def over_all(own_s: float, device: torch.device) -> float:
    """Return the slowest rank's time."""
    longest = torch.tensor(own_s, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


# ------------------------------------------------------------------ training


def network(name: str) -> tuple[nn.Module, int | None]:
    """Return a model, and the words that it knows; None if it takes images."""
    if name == "resnet50":
        return ResNet50(1000), None
    words, width, layers = {
        "gpt-30m": (10_000, 512, 8),
        "gpt2-small": (50_257, 768, 12),
        "gpt-tiny": (64, 32, 2),
    }[name]
    return TransformerLanguageModel(words, width=width, layers=layers, dropout=0.0), words


class Contestant:
    """One wrapper with a copy of the model, which trains on the same batch every time."""

    def __init__(self, name: str, net: nn.Module, job: Job, device: torch.device) -> None:
        self.name, self.job, self.device = name, job, device
        self.precision = job["precision"]
        own = copy.deepcopy(net).to(device)
        self.model: Any = own
        ours: dict[str, Any] | None = None
        if name.startswith("ddp"):
            size = name.removeprefix("ddp").strip("-mb")
            cap: dict[str, Any] = {"bucket_cap_mb": int(size)} if size.isdecimal() else {}
            self.model = TorchDDP(own, **cap)
            if name == "ddp-bf16":
                # By its name torch lets the hook pass with NCCL only; Gloo sums these, too.
                self.model.register_comm_hook(
                    None, lambda group, bucket: bf16_compress_hook(group, bucket)
                )
        elif name == "overlap":
            ours = {"planner": "overlap", "check": False}
        elif name in SPARSE_NAMES:
            recipe = Recipe(density=DENSITY, algorithm=SPARSE_NAMES[name])
            ours = {"compression": recipe, "check": False}
        elif name.startswith("syncline"):
            ours = {"compression": "bfloat16"} if name == "syncline-bf16" else {}
        if ours is not None:
            self.model = syncline.DistributedDataParallel(own, cache=False, **ours)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if ours is not None and "compression" not in ours:
            self.optimizer = self.model.overlap(self.optimizer)
        scaled = self.precision == "float16"
        self.scaler = torch.amp.GradScaler(device.type) if scaled else None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Train for one iteration."""
        dtype = getattr(torch, self.precision)
        mixed = self.precision != "float32"
        with torch.autocast(self.device.type, dtype) if mixed else nullcontext():
            output = self.model(inputs)
            loss = cross_entropy(output.flatten(0, -2).float(), targets.flatten())
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if self.job["clip"]:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def block_s(self, data: tuple[Tensor, Tensor], steps: int) -> float:
        """Return the seconds an iteration, of the slowest rank."""
        dist.barrier()
        finish(self.device)
        began_s = time.perf_counter()
        for _ in range(steps):
            self.step(*data)
        if isinstance(self.model, syncline.DistributedDataParallel):
            self.model.synchronize()
        finish(self.device)
        return over_all(time.perf_counter() - began_s, self.device) / steps

    @property
    def measuring(self) -> bool:
        """Whether it is of ours, and has not decided yet how to exchange."""
        ours = isinstance(self.model, syncline.DistributedDataParallel)
        return bool(ours and self.model.measuring)


def contest(job: Job, device: torch.device) -> None:
    torch.manual_seed(0)
    net, words = network(job["model"])
    if words is None and device.type == "cuda":
        net = net.to(memory_format=torch.channels_last)
    torch.manual_seed(1 + dist.get_rank())
    data = batch_of(job["batch"], words, device)
    elements = sum(parameter.numel() for parameter in net.parameters())
    exchanged_s = median(exchange_s(elements, device, 2))
    field = [Contestant(name, net, job, device) for name in job["contestants"]]
    laps_s = {each.name: each.block_s(data, 2) for each in field}
    say(parameters=elements, batch=job["batch"], exchange_s=exchanged_s, first_s=laps_s)
    for each in (each for each in field if each.measuring):
        until_s = time.monotonic() + job["measure_s"]
        # As soon as one rank finds that the time is up, all stop.
        while over_all(float(each.measuring and time.monotonic() < until_s), device):
            each.block_s(data, MEASURING_STEPS)
    steps = max(2, round(job["block_s"] / min(each.block_s(data, 2) for each in field)))
    for number in range(job["rounds"]):
        first = number % len(field)
        times, busy = {}, {}
        for each in (*field[first:], *field[:first]):
            before = processor_time()
            times[each.name] = each.block_s(data, steps)
            used, whole = (b - a for a, b in zip(before, processor_time(), strict=True))
            busy[each.name] = used / max(whole, 1)
        say(round=number, steps=steps, iteration_s=times, busy=busy)
    for each in field:
        if isinstance(each.model, syncline.DistributedDataParallel):
            say(record=each.name, **recorded(each.model, measuring=each.measuring))


def batch_of(batch: int, words: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    if words is None:
        images = torch.randn(batch, 3, 224, 224, device=device)
        if device.type == "cuda":
            images = images.to(memory_format=torch.channels_last)
        return images, torch.randint(1000, (batch,), device=device)
    text = torch.randint(words, (batch, WINDOW + 1), device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def recorded(model: syncline.DistributedDataParallel, *, measuring: bool) -> dict[str, Any]:
    run = model.run_record()
    return {
        "measuring": measuring,
        "decision": run.decision,
        "reason": run.reason,
        "planner": run.planner,
        "messages": run.messages,
        "deferred": run.deferred,
        "predicted_s": run.predicted_planned_s,
        "predicted_ddp_s": run.predicted_baseline_s,
        "baseline_s": None if run.baseline is None else run.baseline.iteration_s,
        "planned_s": None if run.planned is None else run.planned.iteration_s,
    }


if __name__ == "__main__":
    main()
