"""What `make bench-gpu` measures on the GPUs of this host: one JSON and a short table.

Each part has a process and a deadline of its own, and the file is complete after each. Without a
GPU nothing is measured; it says what would be.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline
from benchmarks.common import machine, median
from benchmarks.device_collectives import finish, measured
from benchmarks.selection import FUSED, SELECT, TORCH, TORCH_FUSED, measure_selection

__all__ = ["facts", "main"]

ROOT = Path(__file__).parents[1]
WHOLE_S = 440.0
"""After which no part is begun, nor one left running; less where SYNCLINE_GPU_SECONDS says so."""
ROUNDS = 5
STEPS = 20
MEASURING_TURNS = 40
"""Turns of so many steps in which wrappers measure and plan at most, before what counts."""
PIPELINE_BYTES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
Row = dict[str, Any]


def facts() -> Row:
    """Return the machine, its GPUs and the versions of what runs on them."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
    return {
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "cuda": torch.version.cuda,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": _said("nvcc", "--version").splitlines()[-1:],
        "nccl": nccl,
        "commit": commit,
    }


def no_gpu() -> str:
    """Say that there is no GPU."""
    return f"no GPU here (torch {torch.__version__} finds none)"


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


# ---------------------------------------------------------------------- the parts


def selection() -> list[Row]:
    found = measure_selection([1_000_000, 25_000_000], [0.01, 0.001], rounds=ROUNDS, device="cuda")
    rows = []
    for elements in (1_000_000, 25_000_000):
        for density in (0.01, 0.001):
            for ours, theirs in ((SELECT, TORCH), (FUSED, TORCH_FUSED)):
                faster = found.times_faster(ours, theirs, elements, density)
                name = f"{ours} beside {theirs}, {elements} elements, density {density:g}"
                target = 3.0 if (ours, elements, density) == (SELECT, 25_000_000, 0.001) else None
                rows.append({"name": name, "value": faster, "unit": "times", "at_least": target})
    return rows


def copies(kind: str = "cuda", size_bytes: int = 64 << 20) -> list[Row]:
    """Host to device and back, pinned and not: what staging through host memory costs."""
    rows = []
    there = torch.empty(size_bytes, dtype=torch.uint8, device=kind)
    for pinned in (False, True):
        here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned and kind == "cuda")
        for name, into, source in (("to the device", there, here), ("to the host", here, there)):
            seconds = []
            for _ in range(ROUNDS + 2):
                finish(there.device)
                began_s = time.perf_counter()
                into.copy_(source, non_blocking=True)
                finish(there.device)
                seconds.append(time.perf_counter() - began_s)
            rate = size_bytes / median(seconds[2:]) / 1e9
            memory = "pinned" if pinned else "pageable"
            rows.append(
                {"name": f"{size_bytes} bytes {name}, {memory}", "value": rate, "unit": "GB/s"}
            )
    return rows


def linear_pipeline() -> list[Row]:
    return pipeline_rows(measured(ranks=2, sizes_bytes=PIPELINE_BYTES)["rows"])


def pipeline_rows(found: list[Row]) -> list[Row]:
    return [
        {
            "name": f"{row['collective']} of {row['size_bytes']} bytes, {row['contestant']}",
            "value": median(row["seconds"]),
            "unit": "s",
            "rounds": row["seconds"],
        }
        for row in found
    ]


def steps(backend: str, ranks: int, width: int) -> list[Row]:
    """Iterations of a multi-layer network: DDP, ours without and with overlap, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        start_processes(_steps, (ranks, backend, width, folder, str(answer)), nprocs=ranks)
        rows: list[Row] = json.loads(answer.read_text())
    return rows


def _steps(rank: int, ranks: int, backend: str, width: int, folder: str, answer: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    rows = step_rows(device, width)
    if rank == 0:
        Path(answer).write_text(json.dumps(rows))
    dist.all_reduce(torch.zeros(1, device=device))  # no rank leaves before the others are done
    finish(device)
    dist.destroy_process_group()


def step_rows(device: torch.device, width: int, rounds: int = ROUNDS) -> list[Row]:
    """Measure iterations in the default process group."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(12)))
    batch = torch.randn(256, width, device=device)
    ids = None if device.index is None else [device.index]
    contestants: dict[str, tuple[nn.Module, Any]] = {}
    for name in ("DDP", "Syncline", "Syncline, overlapped"):
        own = copy.deepcopy(net).to(device)
        model = (
            TorchDDP(own, device_ids=ids)
            if name == "DDP"
            else syncline.DistributedDataParallel(own, device_ids=ids, cache=False)
        )
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        if isinstance(model, syncline.DistributedDataParallel) and name.endswith("overlapped"):
            optimizer = model.overlap(optimizer)
        contestants[name] = model, optimizer
    times: dict[str, list[float]] = {name: [] for name in contestants}
    wrappers = {
        name: module
        for name, (module, _) in contestants.items()
        if isinstance(module, syncline.DistributedDataParallel)
    }
    turns = 0
    while len(times["DDP"]) < rounds:
        measuring = any(wrapper.measuring for wrapper in wrappers.values())
        counts = not measuring or turns >= MEASURING_TURNS
        turns += 1
        for name, (module, optimizer) in contestants.items():
            finish(device)
            began_s = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                module(batch).square().mean().backward()
                optimizer.step()
            if name in wrappers:
                wrappers[name].synchronize()
            finish(device)
            if counts:
                times[name].append((time.perf_counter() - began_s) / STEPS)
    return [
        {
            "name": f"iteration of 12 layers of {width}^2, {name}",
            "value": median(found),
            "unit": "s",
            "rounds": found,
            "decision": wrappers[name].run_record().reason if name in wrappers else None,
        }
        for name, found in times.items()
    ]


@dataclass(frozen=True)
class Part:
    measure: Callable[[], list[Row]]
    about: str
    gpus: int = 1
    deadline_s: float = 100.0


PARTS: dict[str, Part] = {
    "selection": Part(selection, "the k largest of 25 million beside torch.topk, exact"),
    "copies": Part(copies, "host to device and back"),
    "linear-pipeline": Part(
        linear_pipeline, "LP broadcast, reduce, all-reduce: two ranks, beside NCCL or Gloo"
    ),
    "steps-nccl-1": Part(lambda: steps("nccl", 1, 2048), "iterations, NCCL, one rank"),
    # Gradients pass through host memory: 12 MiB of them, not 200.
    "steps-gloo-2": Part(lambda: steps("gloo", 2, 512), "iterations, Gloo, two ranks"),
    "steps-syncline-2": Part(
        lambda: steps("syncline", 2, 512), "iterations, our backend, two ranks"
    ),
    "steps-nccl-2": Part(lambda: steps("nccl", 2, 2048), "iterations, NCCL, two ranks", gpus=2),
}


# ---------------------------------------------------------------------- all of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "bench-gpu.json")
    parser.add_argument("--part", choices=PARTS, help="measure this one here, and print its rows")
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(PARTS[given.part].measure()))
        return
    began_s = time.monotonic()
    found: dict[str, Row] = {}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"form": "syncline bench-gpu", "version": 1, **facts(), "parts": found}
    for name, part in PARTS.items():
        found[name] = {"about": part.about, **outcome(name, part, began_s)}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    if not torch.cuda.is_available():
        print(f"{no_gpu()}, so nothing was measured")
    for line in table(found):
        print(line)
    print(f"written: {given.out}")
    if any("failed" in part for part in found.values()):
        raise SystemExit(1)


def outcome(name: str, part: Part, began_s: float) -> Row:
    """Return a part's rows, or why it was skipped or has failed."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return {"would run": no_gpu()}
    if gpus < part.gpus:
        return {"skipped": f"it needs {part.gpus} GPUs, torch {torch.__version__} finds {gpus}"}
    whole_s = float(os.environ.get("SYNCLINE_GPU_SECONDS", WHOLE_S))
    left_s = min(part.deadline_s, whole_s - (time.monotonic() - began_s))
    if left_s <= 0:
        return {"skipped": f"the {whole_s:g} s of all parts were over"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    with ended_after(command, left_s) as (code, said, complaint):
        if code is None:
            return {"failed": f"it did not end within {left_s:.0f} s", "output": complaint[-2000:]}
        if code != 0:
            return {"failed": f"exit code {code}", "output": complaint[-2000:]}
        return {"rows": json.loads(said.splitlines()[-1])}


@contextmanager
def ended_after(command: list[str], limit_s: float) -> Iterator[tuple[int | None, str, str]]:
    """Run a command in a session; give its exit code, None if it was ended, and what it said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, text=True, cwd=ROOT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False)
                process.wait()
        out.seek(0)
        err.seek(0)
        yield code, out.read(), err.read()


def table(found: dict[str, Row]) -> list[str]:
    """Return lines: the figures, and what was not measured."""
    lines = []
    for name, part in found.items():
        for row in part.get("rows", []):
            least = row.get("at_least")
            target = "" if least is None else f"  (target {least:g}: "
            target += "" if least is None else ("met)" if row["value"] >= least else "MISSED)")
            lines.append(f"{name:<18} {row['value']:>10.4g} {row['unit']:<6} {row['name']}{target}")
        lines += [
            f"{name:<18} {kind}: {part['about']}: {part[kind]}"
            for kind in ("skipped", "failed")
            if kind in part
        ]
        lines += [f"would run  {name:<18} {part['about']}"] if "would run" in part else []
    return lines


if __name__ == "__main__":
    main()
