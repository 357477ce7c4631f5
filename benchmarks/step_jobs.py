"""Jobs of ``step_time`` on emulated hosts: started, watched, and what they say taken in."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.step_cells import Cell
from benchmarks.step_results import Turn
from benchmarks.step_worker import BEGUN, FOUND, TURN
from syncline.lab.processes import end_of
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.job import JobResult
from syncline.plan.network import Network
from syncline.plan.plan import Plan

__all__ = ["Ended", "Found", "probe_cell", "race_cell"]

WORKER = ("-m", "benchmarks.step_worker")
SILENT_S = 120.0
"""A turn that takes this much longer than it should has hung."""
START_S = 120.0
"""For the processes to start and find each other."""
SLOWER = 6.0
"""A turn may take this many times as long as it was expected to: a peer is not predicted."""
LEAST_FREE_BYTES = 768 * 1024 * 1024
"""A job that leaves less is stopped, before the kernel picks a process to end."""
WATCH_S = 1.0
KEPT_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a probe has measured."""

    network: Network
    all_reduce_s: tuple[float, ...]
    update_s: float
    """What clipping and unscaling take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a race ended."""

    contestant: str | None
    """Whose turn it was when the job failed; None if it did not."""
    reason: str = ""


def probe_cell(cell: Cell, python: str) -> Found:
    """Measure the network of a cell.

    Raises:
        SystemExit: the job failed.
    """
    found: list[Found] = []

    def take(mark: str, what: dict[str, Any]) -> None:
        if mark == FOUND:
            network = msgspec.convert(what["network"], Network)
            times_s = tuple(what["all_reduce_s"])
            found.append(Found(network=network, all_reduce_s=times_s, update_s=what["update_s"]))

    # All sizes up to the largest are sent twice, and the largest some times more.
    job = {"kind": "probe", "cell": dataclasses.asdict(cell)}
    with tempfile.TemporaryDirectory() as folder:
        ended = _run(cell, job, python, Path(folder), take, lambda _: 10 * cell.ring_s)
    if not found:
        raise SystemExit(f"the network of {cell} was not measured: {ended.reason}")
    return found[0]


def race_cell(
    cell: Cell,
    turns: list[tuple[str, int]],
    plans: dict[str, Plan],
    *,
    python: str,
    iterations: int,
    warmup: int,
    seconds: float | None,
    expected_s: Callable[[str], float],
    turn: Callable[[str, Turn], None],
) -> Ended:
    """Let contestants take their turns.

    Args:
        cell: where.
        turns: contestant and round, in order.
        plans: of those contestants that run one.
        python: the interpreter of the workers.
        iterations: measured in each turn.
        warmup: iterations before.
        seconds: no turn begins after this long; None lets all of them.
        expected_s: how long a contestant's turn should take.
        turn: is told what was measured.
    """

    def take(mark: str, what: dict[str, Any]) -> None:
        if mark == TURN:
            turn(what["contestant"], msgspec.convert(what["turn"], Turn))

    with tempfile.TemporaryDirectory() as folder:
        for name, plan in plans.items():
            plan.save(Path(folder, f"{name}.json"))
        job = {
            "kind": "race",
            "cell": dataclasses.asdict(cell),
            "turns": turns,
            "plans": folder,
            "iterations": iterations,
            "warmup": warmup,
            "seconds": seconds,
        }
        return _run(cell, job, python, Path(folder), take, expected_s)


class _Watch:
    """Follows the lines of a job, and stops it where it hangs or takes too much memory."""

    def __init__(
        self, take: Callable[[str, dict[str, Any]], None], expected_s: Callable[[str], float]
    ) -> None:
        self._take = take
        self._expected_s = expected_s
        self._ours, self.signals = socket.socketpair()
        self._due_s = time.monotonic() + START_S + expected_s("") * SLOWER
        self._done = threading.Event()
        self.contestant: str | None = None
        self.why_stopped = ""
        self.said: dict[int, deque[str]] = {}

    def __enter__(self) -> _Watch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._ours.close()
        self.signals.close()

    def line(self, rank: int, error: bool, line: bytes) -> None:
        text = line.decode(errors="replace")
        for mark in (FOUND, BEGUN, TURN):
            if not error and text.startswith(mark):
                self._event(mark, json.loads(text.removeprefix(mark)))
                return
        self.said.setdefault(rank, deque(maxlen=KEPT_LINES)).append(text)

    def _event(self, mark: str, what: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if mark == BEGUN:
            self.contestant = what["contestant"]
            self._due_s = now_s + SILENT_S + SLOWER * self._expected_s(what["contestant"])
        else:
            self.contestant = None
            self._due_s = now_s + SILENT_S
        self._take(mark, what)

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            if free_bytes() < LEAST_FREE_BYTES:
                self._stop("it does not fit into this machine's memory")
            elif time.monotonic() > self._due_s:
                self._stop("it made no progress in time")

    def _stop(self, why: str) -> None:
        if not self.why_stopped:
            self.why_stopped = why
            self._ours.send(bytes([signal.SIGTERM]))


def _run(
    cell: Cell,
    job: dict[str, Any],
    python: str,
    folder: Path,
    take: Callable[[str, dict[str, Any]], None],
    expected_s: Callable[[str], float],
) -> Ended:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    cluster = Cluster.of(hosts=cell.workers, rate=cell.rate)
    with Testbed(cluster) as bed, _Watch(take, expected_s) as watch:
        result = bed.run(
            [python, *WORKER, str(path)],
            environment={
                "DS_ACCELERATOR": "cpu",
                # DeepSpeed compiles an extension, or finds it here, with the project's ninja.
                "TORCH_EXTENSIONS_DIR": str(Path(python).parents[1] / "extensions"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            output=watch.line,
            signals=watch.signals,
        )
    if result.exit_code == 0:
        return Ended(contestant=None)
    return Ended(contestant=watch.contestant, reason=watch.why_stopped or _reason(result, watch))


def _reason(result: JobResult, watch: _Watch) -> str:
    """Return the last words of the rank that failed first."""
    cause = result.cause
    if cause is None:
        return f"the job ended with exit code {result.exit_code}"
    said = [line.strip() for line in watch.said.get(cause.rank, ()) if line.strip()]
    errors = [line for line in said if "Error" in line] or said
    # torch puts the rank before every line of a traceback.
    last = errors[-1].removeprefix(f"[rank{cause.rank}]: ") if errors else "it said nothing"
    return f"rank {cause.rank} {end_of(cause.code)}: {last}"


def free_bytes() -> int:
    """Return how much memory can still be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
