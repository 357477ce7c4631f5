"""What runs on the hosts of ``step_time``: ``python -m benchmarks.step_worker JOB``.

``JOB`` is a JSON file. With ``"kind": "probe"`` the network is measured; with ``"race"`` the turns
that it lists are taken one after the other. Rank 0 prints a line of JSON behind a mark for all that
happens, as it happens, so that nothing is lost when a later turn fails.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.common import median
from benchmarks.own_memory import memory_bytes, reset_peak
from benchmarks.step_cells import Cell
from benchmarks.step_models import MODELS
from benchmarks.step_peers import PEERS
from benchmarks.step_results import Turn
from syncline.lab.replay.interleaved import Contestant, planned, run_interleaved
from syncline.plan.network import Contention
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.train.measure.exchange import gather_numbers
from syncline.train.measure.probe import probe

__all__ = ["BEGUN", "FOUND", "TURN"]

FOUND = "step_time: found "
"""The network and the all-reduces of a probe."""
BEGUN = "step_time: begun "
"""Contestant and round of the turn that begins."""
TURN = "step_time: turn "
"""What was measured in it."""

ALONE_REPETITIONS = 3
GROUP_TIMEOUT = timedelta(seconds=120)
"""A rank that is lost is noticed after this long at most."""
CPU = torch.device("cpu")
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    cell = Cell(**job["cell"])
    if job["kind"] == "probe":
        measure_network(cell)
    else:
        race(cell, job)
    dist.barrier()
    dist.destroy_process_group()


def say(mark: str, **what: Any) -> None:
    if dist.get_rank() == 0:
        print(mark + msgspec.json.encode(what).decode(), flush=True)


def measure_network(cell: Cell) -> None:
    size_bytes = cell.profile().gradient_bytes
    network = probe(largest_bytes=size_bytes, name=f"{cell.workers} hosts, {cell.rate}")
    # Emulated computation sleeps, so communication does not slow it.
    network = msgspec.structs.replace(network, contention=Contention())
    gradients = torch.zeros(size_bytes // 4)
    times_s = []
    for _ in range(ALONE_REPETITIONS):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(gradients)
        times_s.append(slowest(time.perf_counter() - began_s))
    say(FOUND, network=network, all_reduce_s=times_s, update_s=update_alone_s(cell))


def update_alone_s(cell: Cell) -> float:
    """Return what clipping, unscaling and AdamW take on every host, measured without exchange.

    Nothing of it is emulated, and hosts that share cores take longer for it.
    """
    if not cell.clip and not cell.scaled and not cell.adamw:
        return 0.0
    clipped = cell.profile()
    instant = tuple(msgspec.structs.replace(o, duration_s=0.0) for o in clipped.operations)
    clipped = msgspec.structs.replace(clipped, operations=instant)
    alone = Contestant(name="alone", wrap=lambda model, optimizer: (model, optimizer))

    def step_s(profile: Profile, *, whole: bool) -> float:
        shapes = MODELS[cell.model].shapes()
        laps = run_interleaved(
            profile,
            [alone],
            rounds=ALONE_REPETITIONS,
            shapes=shapes,
            scaled=whole and cell.scaled,
            optimizer=ADAMW if whole and cell.adamw else None,
        )
        return median([lap.iteration_s for lap in laps[alone.name]])

    plain = msgspec.structs.replace(clipped, norm=None)
    return max(step_s(clipped, whole=True) - step_s(plain, whole=False), 0.0)


def slowest(own_s: float) -> float:
    """Return the largest of all ranks' numbers."""
    group = dist.group.WORLD
    assert group is not None
    return max(numbers[0] for numbers in gather_numbers([own_s], group, CPU))


def race(cell: Cell, job: dict[str, Any]) -> None:
    profile, model = cell.profile(), MODELS[cell.model]
    until_s = time.monotonic() + job["seconds"] if job["seconds"] is not None else None
    known: dict[str, Contestant] = {}
    for name, number in job["turns"]:
        # As soon as one rank finds that the time is up, all stop: none begins a turn alone.
        if slowest(float(until_s is not None and time.monotonic() > until_s)):
            break
        say(BEGUN, contestant=name, round=number)
        if name not in known:
            known[name] = contestant_of(name, job, cell)
        ctypes.CDLL(None).malloc_trim(0)  # what turns before have freed is no part of this one's
        reset_peak()
        resident_bytes = memory_bytes("VmRSS")
        began_s, before = time.perf_counter(), processor_time()
        laps = run_interleaved(
            profile,
            [known[name]],
            rounds=1,
            iterations=job["iterations"],
            warmup=job["warmup"],
            shapes=model.shapes(),
            scaled=cell.scaled,
            optimizer=ADAMW if cell.adamw else None,
        )
        (lap,) = laps[name]
        busy, whole = (now - then for now, then in zip(processor_time(), before, strict=True))
        say(
            TURN,
            contestant=name,
            turn=Turn(
                round=number,
                iteration_s=lap.iteration_s,
                settled_s=lap.settled_s,
                idle_s=lap.idle_s,
                steps_s=lap.steps_s,
                wall_s=time.perf_counter() - began_s,
                busy=busy / whole,
                peak_bytes=round(slowest(memory_bytes("VmHWM") - resident_bytes)),
            ),
        )


def processor_time() -> tuple[int, int]:
    """Return the ticks that this machine's cores were used, and all of them; see proc_stat(5)."""
    first, *_ = Path("/proc/stat").read_text().splitlines()
    user, nice, system, idle, waiting, *others = map(int, first.split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


def contestant_of(name: str, job: dict[str, Any], cell: Cell) -> Contestant:
    if name in PEERS:
        return PEERS[name].contestant(MODELS[cell.model])
    return planned(Plan.load(Path(job["plans"], f"{name}.json")), name)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # At once: threads that a peer has left running would hold up the interpreter.
    os._exit(0)
