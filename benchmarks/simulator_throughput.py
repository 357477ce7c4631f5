"""How fast the simulator is.

Tasks a second of the core beside a ``heapq`` engine in plain Python, and the time and memory of
2,048 workers with 161 tensors, each case in a process of its own.

A published figure to hold them against: ASTRA-sim needs 482 s and 1.4 GB for 2,048 ranks with 5
buckets on a machine of two cores (it simulates every chunk, which is more work than a collective).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks import heapq_engine
from benchmarks.common import median, save, spread
from syncline.plan.network import Network
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.graph import TaskGraph
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.workers import Workers

RUNS = 5
TASKS = 200_000
LANES = 512


def random_tasks(seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return lanes, durations and, for each task from ``LANES`` on, one that it waits for."""
    draw = np.random.default_rng(seed)
    lanes = np.arange(TASKS) % LANES
    durations = draw.integers(1_000, 1_000_000, TASKS)
    before = np.arange(LANES, TASKS) - draw.integers(1, LANES, TASKS - LANES)
    return lanes, durations, before


def graph_of(seed: int, *, in_order: bool = True, contended: bool = False) -> TaskGraph:
    lanes, durations, before = random_tasks(seed)
    graph = TaskGraph()
    for _ in range(LANES):
        graph.add_lane(in_order=in_order)
    if contended:
        graph.add_contention(0, 1, 1.5, 1.5)
    graph.add_tasks(lanes, durations)
    graph.add_edges(before, np.arange(LANES, TASKS))
    return graph


def heapq_seconds(seed: int) -> float:
    lanes, durations, before = (column.tolist() for column in random_tasks(seed))
    table: list[list[int]] = [[] for _ in range(LANES)] + [[b] for b in before]
    start = time.perf_counter()
    stop = heapq_engine.simulate(LANES, lanes, durations, table)
    seconds = time.perf_counter() - start
    assert stop == graph_of(seed).run()[1].tolist(), "the engines disagree"
    return seconds


def native_seconds(seed: int, **kind: bool) -> float:
    graph = graph_of(seed, **kind)
    start = time.perf_counter()
    graph.run()
    return time.perf_counter() - start


def deep_profile(tensors: int = 161) -> Profile:
    """Return a chain like ResNet-50's: 161 tensors, 25.6 million elements, 76 ms of backward."""
    draw = np.random.default_rng(tensors)
    elements = np.exp(draw.normal(10, 2, tensors))
    elements = np.maximum(1, elements / elements.sum() * 25.6e6).astype(int).tolist()
    times = draw.exponential(76e-3 / tensors, tensors).tolist()
    forward = [
        Operation(name=f"f{i}", phase="forward", duration_s=t / 2, after=(i - 1,) if i else ())
        for i, t in enumerate(times)
    ]
    backward = [
        Operation(name=f"b{i}", phase="backward", duration_s=t, after=(tensors + i - 1,))
        for i, t in enumerate(reversed(times))
    ]
    update = Operation(name="update", phase="update", duration_s=2e-3, after=(2 * tensors - 1,))
    return Profile(
        model="161 tensors",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(*forward, *backward, update),
        gradients=tuple(
            Gradient(
                name=f"g{i}",
                elements=elements[tensors - 1 - i],
                ready_after=tensors + i,
                needed_by=tensors - 1 - i,
            )
            for i in range(tensors)
        ),
    )


CASES = {
    "alike, wfbp": (Wfbp(), Workers()),
    "alike, ddp": (Ddp(), Workers()),
    "alike, overlap": (Overlap(), Workers()),
    "all different, wfbp": (Wfbp(), Workers(spread=0.1)),
    "all different, ddp": (Ddp(), Workers(spread=0.1)),
    "all different, overlap": (Overlap(), Workers(spread=0.1)),
    "different each iteration, wfbp": (Wfbp(), Workers(jitter=0.1)),
}


def run_case(name: str) -> None:
    """Simulate one strategy for 2,048 workers and print what it took."""
    planner, workers = CASES[name]
    profile = deep_profile()
    network = Network.line(workers=2048, a_s=1e-4, b_s_per_byte=1e-9)
    plan = planner.plan(profile, network)
    start = time.perf_counter()
    prediction = predict(profile, network, plan, workers=workers).prediction
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([seconds, peak_bytes, prediction.iteration_s]))


def main() -> None:
    if len(sys.argv) > 1:
        run_case(sys.argv[1])
        return
    engines: dict[str, list[float]] = {}
    for run in range(RUNS):
        for name, seconds in (
            ("heapq", heapq_seconds(run)),
            ("one pass", native_seconds(run)),
            ("events", native_seconds(run, in_order=False)),
            ("contended", native_seconds(run, contended=True)),
        ):
            engines.setdefault(name, []).append(TASKS / seconds)
    peer = median(engines["heapq"])
    for name, rates in engines.items():
        times = median(rates) / peer
        print(f"{name:10} {spread([r / 1e6 for r in rates]):32} million tasks/s  {times:6.1f} x")
    workers: dict[str, list[list[float]]] = {}
    for name in CASES:
        for _ in range(RUNS):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.simulator_throughput", name],
                check=True,
                capture_output=True,
                text=True,
            )
            workers.setdefault(name, []).append(json.loads(done.stdout))
        taken_s, peak_bytes, iteration_s = zip(*workers[name], strict=True)
        print(
            f"{name:31} {spread(taken_s):28} s  {median(peak_bytes) / 2**20:6.0f} MiB at most  "
            f"iteration {median(iteration_s) * 1e3:.2f} ms"
        )
    save("simulator_throughput", {"tasks_per_s": engines, "workers_2048": workers})


if __name__ == "__main__":
    main()
