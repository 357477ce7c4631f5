"""What 9 minutes of a machine with 16 cores and a GPU are used for: ``tools/device-day``.

Each part has a process and a budget of its own, and is a list of steps. A step's rows are appended
to a file as they come, so whatever ends the run, they stay; the next run goes on with the steps
that are missing. ``--small`` runs a small form of every part on 2 cores without a GPU: it shows
that the script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common import median
from benchmarks.day_worker import ALONE, BUCKETS_MB, CONTESTANTS, FOUND
from benchmarks.gpu import ROOT, ended_after, facts
from benchmarks.selection import FUSED, SELECT, TORCH, TORCH_FUSED, measure_selection
from benchmarks.steady_gpu import steady_rows
from benchmarks.step_cells import Cell
from benchmarks.step_jobs import probe_cell, race_cell
from benchmarks.step_race import planned
from benchmarks.testbed_rates import measured as reached_rates
from syncline.lab.bench.collectives import measure_collectives
from syncline.lab.bench.request import PLACES, BenchmarkRequest
from syncline.lab.bench.result import GLOO, MPIS, OURS
from syncline.lab.testbed import Cluster, Testbed

__all__ = ["PARTS", "main"]

WHOLE_S = 540.0
"""Of all parts together; no part begins later, or goes on."""
OUT = ROOT / "build" / "device-day"
Row = dict[str, Any]
Step = tuple[str, float, Callable[["Settings"], list[Row]]]
"""A name by which it is found again, the seconds that it is expected to take, and what it does."""


@dataclass(frozen=True)
class Settings:
    small: bool
    until_s: float
    """On the monotonic clock: when the part must have ended."""

    @property
    def left_s(self) -> float:
        """Seconds that the part has left."""
        return self.until_s - time.monotonic()

    @property
    def device(self) -> str:
        """Where the parts for a GPU run: in their small form, on the CPU."""
        return "cpu" if self.small else "cuda"


# ------------------------------------------------------------------ trainings on emulated hosts

BACKENDS = {"cpu": "Gloo", "cuda": "NCCL"}


@dataclass(frozen=True)
class Training:
    """Real models on emulated hosts, under every contestant in turns."""

    model: str
    hosts: int
    rate: str
    batch: int
    """Of each host: so that computing and exchanging take about equally long, as far as known."""
    device: str = "cpu"
    precision: str = "float32"
    clip: bool = False
    contestants: tuple[str, ...] = CONTESTANTS
    seconds: float = 40.0
    rounds: int = 4

    @property
    def name(self) -> str:
        """The step's name."""
        clipped = ", clipped" if self.clip else ""
        where = f"{self.hosts} hosts at {self.rate}, {BACKENDS[self.device]}"
        others = "" if self.contestants[:-1] == CONTESTANTS[:-1] else f", {self.contestants[-1]}"
        return f"{self.model}, {where}, batch {self.batch}, {self.precision}{clipped}{others}"

    def step(self) -> Step:
        """Return the step."""
        return self.name, self.seconds, self.run

    def run(self, settings: Settings) -> list[Row]:
        """Train, and return one row."""
        # One core of each host is left to its messages.
        threads = max(1, (os.cpu_count() or 1) // self.hosts - 1)
        ours = sum(not name.startswith(("ddp", ALONE)) for name in self.contestants)
        job = {
            "model": self.model,
            "batch": self.batch,
            "device": settings.device if self.device == "cuda" else "cpu",
            "precision": self.precision,
            "clip": self.clip,
            "contestants": self.contestants,
            "threads": threads,
            "rounds": self.rounds,
            # Half for measuring by all of ours, a quarter for the rounds, the rest to begin.
            "measure_s": self.seconds / 2 / max(ours, 1),
            "block_s": self.seconds / 4 / self.rounds / len(self.contestants),
        }
        lines, why = on_hosts(Cluster.of(hosts=self.hosts, rate=self.rate), job, settings)
        return [{"threads": threads, **summed_up(lines), "incomplete": why}]


def on_hosts(cluster: Cluster, job: Row, settings: Settings) -> tuple[list[Row], str]:
    """Return what the workers said, and why they did not end well, if so."""
    lines: list[Row] = []

    def take(_: int, error: bool, line: bytes) -> None:
        text = line.decode(errors="replace")
        if not error and text.startswith(FOUND):
            lines.append(json.loads(text.removeprefix(FOUND)))
        elif error:
            said.append(f"{text}\n")

    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Testbed(cluster) as bed:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        result = bed.run(
            [sys.executable, "-m", "benchmarks.day_worker", str(path)],
            environment={"OMP_NUM_THREADS": str(job["threads"]), **settings_of_nccl()},
            timeout_s=max(settings.left_s, 1.0),
            grace_s=2.0,
            output=take,
        )
    if result.exit_code == 0 and not result.timed_out:
        return lines, ""
    why = "the time was up" if result.timed_out else f"exit code {result.exit_code}"
    if not lines:
        raise RuntimeError(f"{why}: {''.join(said)[-1500:]}")
    return lines, f"{why}: {''.join(said)[-500:]}"


def settings_of_nccl() -> dict[str, str]:
    """Return what NCCL must know on hosts that have one device, and share a GPU."""
    return {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


def summed_up(lines: Sequence[Row]) -> Row:
    """Return a training's figures: medians over rounds, speed-ups in the same round."""
    rounds = [line["iteration_s"] for line in lines if "round" in line]
    busy = [line["busy"] for line in lines if "round" in line]
    first = next((line for line in lines if "first_s" in line), {})
    records = {line["record"]: line for line in lines if "record" in line}
    names = list(rounds[0]) if rounds else []
    medians = {name: median([each[name] for each in rounds]) for name in names}
    row: Row = {
        "parameters": first.get("parameters"),
        "exchange_s": first.get("exchange_s"),
        "rounds": rounds,
        "iteration_s": medians,
        "busy": {name: median([each[name] for each in busy]) for name in names},
        "records": records,
    }
    stock = [name for name in ("ddp", *(f"ddp-{size}mb" for size in BUCKETS_MB)) if name in names]
    if not stock:
        return row
    best = min(stock, key=lambda name: medians[name])
    row["best bucket"] = best
    row["times as fast"] = {
        name: {
            "as ddp": median([each["ddp"] / each[name] for each in rounds]),
            "as the best bucket": median([each[best] / each[name] for each in rounds]),
        }
        for name in names
        if name not in (ALONE, *stock)
    }
    if ALONE in medians:
        bound_s = max(medians[ALONE], first["exchange_s"])
        row["share of the bound"] = {name: bound_s / took for name, took in medians.items()}
    row["prediction error"] = {
        name: record["predicted_s"] / medians[name] - 1
        for name, record in records.items()
        if record["predicted_s"] and record["decision"] == "planned"
    }
    return row


# ------------------------------------------------------------------ the parts


def part_a(small: bool) -> list[Step]:
    """Return what real computing on cores of their own shows."""
    rates = ("1gbit",) if small else ("10gbit", "25gbit")
    sizes = (1_000_000,) if small else (1_000_000, 100_000_000)

    def shaping(rate: str) -> Callable[[Settings], list[Row]]:
        return lambda _: reached_rates("tcp", 2, rate, sizes, 3)

    first: list[Step] = [(f"TCP at {rate}", 6.0, shaping(rate)) for rate in rates]
    if small:
        tiny = Training("gpt-tiny", 2, "1gbit", batch=2, clip=True, seconds=4.0, rounds=2)
        return [*first, tiny.step(), bert("1gbit", 2, 15.0)]
    trainings = [
        Training("gpt-30m", 4, "10gbit", batch=4),
        Training("resnet50", 4, "10gbit", batch=2),
        Training("gpt-30m", 4, "2.5gbit", batch=16, clip=True),
        Training("gpt-30m", 8, "10gbit", batch=2),
        Training("resnet50", 8, "2.5gbit", batch=4, clip=True, seconds=60.0),
        Training("gpt-30m", 2, "25gbit", batch=4),
        Training("resnet50", 2, "10gbit", batch=4),
        Training("gpt-30m", 2, "1gbit", batch=64, clip=True, seconds=60.0),
    ]
    return [*first, *(training.step() for training in trainings), bert("10gbit", 4, 90.0)]


def bert(rate: str, hosts: int, seconds: float) -> Step:
    """Return BERT-base by its sizes, with computing that waits: the worker of ``step_time``."""

    def run(settings: Settings) -> list[Row]:
        cell = Cell(model="bert", workers=hosts, rate=rate)
        profile = cell.profile()
        if settings.small:
            return [
                {"gradient_bytes": profile.gradient_bytes, "computing_s": profile.computation_s}
            ]
        found = probe_cell(cell, sys.executable)
        plans, forecasts = planned(profile, {None: found.network}, ("ddp", "overlap"))
        times: dict[str, list[float]] = {}
        ended = race_cell(
            cell,
            [(name, number) for number in range(WAITING_ROUNDS) for name in WAITING],
            {"overlap": plans["overlap"]},
            python=sys.executable,
            iterations=2,
            warmup=4,
            seconds=settings.left_s - seconds / len(WAITING) / WAITING_ROUNDS,
            expected_s=lambda _: seconds / len(WAITING) / WAITING_ROUNDS,
            turn=lambda name, turn: times.setdefault(name, []).append(turn.iteration_s),
        )
        return [
            {
                "all_reduce_s": found.all_reduce_s,
                "iteration_s": times,
                "predicted_s": {name: each.iteration_s for name, each in forecasts.items()},
                "bound_s": max(profile.computation_s, median(found.all_reduce_s)),
                "incomplete": ended.reason,
            }
        ]

    return f"BERT-base, computing waits, {hosts} hosts at {rate}", seconds, run


WAITING = ("ddp", "ddp-5mb", "ddp-100mb", "bf16", "overlap")
WAITING_ROUNDS = 2


NCCL = (ALONE, "ddp", "ddp-100mb", "ddp-bf16", "syncline", "overlap")
"""``overlap`` runs its plan even where it is slower, which shows why."""


def part_b(small: bool) -> list[Step]:
    """Return what overlap gives over NCCL."""
    if small:
        tiny = Training("gpt-tiny", 2, "1gbit", 2, "cuda", contestants=NCCL, seconds=6.0, rounds=2)
        return [tiny.step()]
    gpt = Training("gpt2-small", 2, "5gbit", 32, "cuda", "bfloat16", contestants=NCCL)
    images = Training("resnet50", 2, "5gbit", 64, "cuda", "float16", contestants=NCCL)
    return [
        each.step()
        for rate in ("5gbit", "10gbit", "1gbit")
        for each in (
            Training(**{**vars(gpt), "rate": rate}),
            Training(**{**vars(images), "rate": rate, "clip": rate == "10gbit"}),
        )
    ]


def part_c(small: bool) -> list[Step]:
    """Return what the wrapper costs where nothing is to be gained."""
    widths = (16,) if small else (1024, 2048, 5120)

    def run(width: int) -> Callable[[Settings], list[Row]]:
        return lambda settings: steady_rows(settings.device, width, rounds=2 if small else 20)

    return [(f"12 layers of {width}^2, one rank", 14.0, run(width)) for width in widths]


def part_d(small: bool) -> list[Step]:
    """Return how fast the largest are selected, and what that gives."""
    sizes = (1000,) if small else (100_000, 1_000_000, 25_000_000)

    def select(settings: Settings) -> list[Row]:
        densities = (0.001, 0.0005)
        found = measure_selection(sizes, densities, rounds=5, device=settings.device)
        return [
            {
                "elements": elements,
                "density": density,
                "times as fast": found.times_faster(ours, theirs, elements, density),
                "of": f"{ours} beside {theirs}",
            }
            for elements in sizes
            for density in densities
            for ours, theirs in ((SELECT, TORCH), (FUSED, TORCH_FUSED))
        ]

    sparse = (ALONE, "ddp", "gtopk", "topk")
    model, batch, seconds = ("gpt-tiny", 2, 6.0) if small else ("gpt-30m", 32, 15.0)
    rates = ("1gbit",) if small else ("1gbit", "10gbit")
    trainings = [
        Training(model, 2, rate, batch, "cuda", contestants=sparse, seconds=seconds, rounds=3)
        for rate in rates
    ]
    return [("selection", 15.0, select), *(training.step() for training in trainings)]


def part_e(small: bool) -> list[Step]:
    """Return how fast collectives are."""
    workers = (2,) if small else (2, 4, 8, 16)
    sizes = (4096, 1 << 20) if small else (4096, 1 << 20, 64 << 20)

    def beside(place: Any, count: int) -> Callable[[Settings], list[Row]]:
        def run(settings: Settings) -> list[Row]:
            found = measure_collectives(
                BenchmarkRequest(
                    collective="all-reduce",
                    sizes_bytes=sizes,
                    workers=(count,),
                    place=place,
                    contestants=(OURS, GLOO, *MPIS),
                    lap_s=0.02,
                    timeout_s=max(settings.left_s, 1.0),
                )
            )
            return [msgspec.to_builtins(found)]

        return run

    def nccl(hosts: int) -> Callable[[Settings], list[Row]]:
        def run(settings: Settings) -> list[Row]:
            job = {"device": settings.device, "threads": 1, "sizes_bytes": sizes, "rounds": 5}
            lines, why = on_hosts(Cluster.of(hosts=hosts), job, settings)
            return [{**line, "incomplete": why} for line in lines]

        return run

    steps: list[Step] = [
        (f"all-reduce, {place}, {count} workers", 6.0, beside(place, count))
        for count in workers
        for place in PLACES
    ]
    hosts = (2,) if small else (2, 4)
    return steps + [(f"all-reduce, NCCL, {n} hosts on one GPU", 8.0, nccl(n)) for n in hosts]


def part_f(small: bool) -> list[Step]:
    """Return what ``make test-gpu`` says."""

    def run(settings: Settings) -> list[Row]:
        given = {"SYNCLINE_GPU_ENDS_S": f"{max(settings.left_s - 5, 1):.0f}"}
        done = subprocess.run(
            [str(ROOT / "tools" / "gpu-run"), sys.executable, "test"],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
        )
        said = " | ".join(done.stdout.splitlines()[-3:])
        if done.returncode:
            return [{"failed": f"exit code {done.returncode}: {said} {done.stderr[-500:]}"}]
        found = json.loads((ROOT / "build" / "gpu" / "test-gpu.json").read_text())
        return [{"said": said, "tests": found["tests"]}]

    return [("make test-gpu", 60.0 if small else 80.0, run)]


@dataclass(frozen=True)
class Part:
    steps: Callable[[bool], list[Step]]
    about: str
    budget_s: float
    on_gpu: bool = True


PARTS: dict[str, Part] = {
    "D": Part(part_d, "selection on the GPU, and sparse exchange over NCCL", 55.0),
    "C": Part(part_c, "one rank, where nothing is to be gained", 45.0),
    "B": Part(part_b, "NCCL between emulated hosts on one GPU", 130.0),
    "A": Part(part_a, "real computing on cores of their own", 175.0, on_gpu=False),
    "E": Part(part_e, "collectives beside Gloo, NCCL and MPI", 45.0),
    "F": Part(part_f, "make test-gpu", 85.0),
}
"""In the order in which they run: what is least known comes first."""


# ------------------------------------------------------------------ one part, in its own process


def run_part(name: str, settings: Settings, rows: Path) -> None:
    """Run the steps that have no rows yet, as long as there is time for them."""
    done = {row["step"] for row in read(rows) if "failed" not in row}
    with sharing_the_gpu() if name in "BD" and not settings.small else nothing() as sharing:
        for step, expected_s, run in PARTS[name].steps(settings.small):
            if step in done:
                continue
            if settings.left_s < expected_s:
                note(rows, {"part": name, "step": step, "failed": "there was no time for it"})
                continue
            began_s = time.monotonic()
            try:
                found = run(settings)
            except (Exception, SystemExit) as error:  # the other steps are worth their time
                found = [{"failed": f"{type(error).__name__}: {error}"}]
            took_s = time.monotonic() - began_s
            for row in found:
                note(rows, {"part": name, "step": step, "took_s": took_s, **sharing, **row})


@contextmanager
def nothing() -> Iterator[Row]:
    yield {}


@contextmanager
def sharing_the_gpu() -> Iterator[Row]:
    """Start CUDA MPS, so that kernels of several ranks run side by side; say whether it works."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {"the GPU": "in time slices: there is no nvidia-cuda-mps-control"}
        return
    with tempfile.TemporaryDirectory() as folder:
        given = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env={**os.environ, **given}, check=False)
        try:
            why = why_not_shared(given)
            if not why:
                os.environ.update(given)
            yield {"the GPU": f"in time slices: {why}" if why else "by MPS"}
        finally:
            for variable in given:
                os.environ.pop(variable, None)
            stop = {"env": {**os.environ, **given}, "input": "quit\n", "text": True}
            subprocess.run([control], check=False, timeout=20, **stop)  # type: ignore[call-overload]


def why_not_shared(given: dict[str, str]) -> str:
    """Return why a process on an emulated host does not reach the GPU by MPS, or nothing."""
    command = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
    with Testbed(Cluster.of(hosts=1)) as bed:
        tried = bed.run(command, environment=given, timeout_s=30.0, grace_s=2.0)
    return "" if tried.exit_code == 0 else "".join(tried.stderr).strip()[-300:] or "no answer"


def read(rows: Path) -> list[Row]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def note(rows: Path, row: Row) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(line_of(row), flush=True)


def line_of(row: Row) -> str:
    """Return a row in one line."""
    if "failed" in row:
        return f"{row['part']}  {row['step']}: FAILED: {row['failed'][:300]}"
    faster = row.get("times as fast")
    if isinstance(faster, dict):
        gains = ", ".join(f"{name} {times['as ddp']:.3f}x" for name, times in faster.items())
        return f"{row['part']}  {row['step']}: {gains or 'no gain known'}"
    kept = {k: v for k, v in row.items() if isinstance(v, int | float | str) and k != "took_s"}
    shown = ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in kept.items()
    )
    return shown[:200]


# ------------------------------------------------------------------ all of them


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/device-day", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="such as D,C; in this order")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="of all parts together")
    parser.add_argument("--small", action="store_true", help="on 2 cores, without a GPU")
    parser.add_argument("--plan", action="store_true", help="only say what would run, and how long")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    began_s = time.monotonic()
    names = given.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if given.plan:
        for line in plan(names, small=given.small):
            print(line)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    rows: Path = given.out / ("rows-small.jsonl" if given.small else "rows.jsonl")
    if given.part is not None:
        run_part(given.part, Settings(given.small, began_s + given.seconds), rows)
        return
    if given.fresh:
        rows.unlink(missing_ok=True)
    result = given.out / ("device-day-small.json" if given.small else "device-day.json")
    states: dict[str, Row] = {}
    # What the parts that are left out would take goes to the others.
    scale = max(1.0, given.seconds / sum(PARTS[name].budget_s for name in names))
    for name in names:
        left_s = given.seconds - (time.monotonic() - began_s)
        budget_s = min(PARTS[name].budget_s * scale, left_s - 5)
        states[name] = {"about": PARTS[name].about, **outcome(name, given, budget_s)}
        parts = {key: {**states[key], "rows": rows_of(key, rows)} for key in states}
        kind = "device-day, small: its figures mean nothing" if given.small else "device-day"
        record = {"benchmark": kind, **facts(), "parts": parts}
        result.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {result}")
    if any("failed" in state or failures(name, rows) for name, state in states.items()):
        raise SystemExit(1)


def plan(names: Sequence[str], *, small: bool) -> Iterator[str]:
    """Yield lines: each part with its steps and their expected seconds."""
    for name in names:
        part = PARTS[name]
        steps = part.steps(small)
        whole_s = sum(expected_s for _, expected_s, _ in steps)
        yield f"{name}  {part.about}: {part.budget_s:.0f} s; all its steps take {whole_s:.0f} s"
        for step, expected_s, _ in steps:
            yield f"     {expected_s:5.0f} s  {step}"
    yield f"all: {sum(PARTS[name].budget_s for name in names):.0f} s"


def outcome(name: str, given: argparse.Namespace, budget_s: float) -> Row:
    """Run a part, and say how it ended."""
    part = PARTS[name]
    if part.on_gpu and not given.small and not torch.cuda.is_available():
        return {"skipped": f"no GPU here (torch {torch.__version__} finds none)"}
    if budget_s <= 0:
        return {"skipped": "the time of all parts was over"}
    command = [sys.executable, "-m", "benchmarks.device_day", "--part", name]
    command += ["--seconds", f"{budget_s:.1f}", "--out", str(given.out)]
    began_s = time.monotonic()
    # Steps end by themselves when the time is up.
    with ended_after([*command, *["--small"] * given.small], budget_s + 10.0) as found:
        code, said, complaint = found
        print(said, end="", flush=True)
        seconds = {"seconds": round(time.monotonic() - began_s, 1)}
        if code == 0:
            return seconds
        why = f"it did not end within {budget_s:.0f} s" if code is None else f"exit code {code}"
        return {**seconds, "failed": why, "output": complaint[-2000:]}


def rows_of(name: str, rows: Path) -> list[Row]:
    """Return a part's rows; of a step that has failed and was run again, those of the last time."""
    mine = [row for row in read(rows) if row["part"] == name]
    done = {row["step"] for row in mine if "failed" not in row}
    return [row for row in mine if "failed" not in row or row["step"] not in done]


def failures(name: str, rows: Path) -> list[Row]:
    return [r for r in rows_of(name, rows) if "failed" in r and "no time" not in r["failed"]]


if __name__ == "__main__":
    main()
