"""What torch, our backend's Python and the native engine each take of a small collective.

Two ranks exchange 4 KiB in shared memory, and wait at once. Each collective is called in three
ways: as ``torch.distributed`` has it, as a method of our process group, and as a call of the group
that this runs on. The three, and Gloo through ``torch.distributed``, take turns. What one way takes
beyond the next is the layer between them. The slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.common import median, save
from syncline.comm.backend.process_group import Options
from syncline.comm.backend.tensors import elements_of

RANKS = 2
COUNT = 1024
"""Elements of float32."""
GLOO, TORCH, METHOD, ENGINE = "gloo, by torch", "ours, by torch", "our method", "our engine"
WAYS = (GLOO, TORCH, METHOD, ENGINE)
TIMEOUT = dt.timedelta(minutes=2)

Call = Callable[[], Any]


def options(kind: Any, **values: Any) -> Any:
    """Return a call's options as torch makes them for who waits at once."""
    made = kind()
    made.asyncOp = False
    for name, value in values.items():
        setattr(made, name, value)
    return made


def calls(gloo: Any, ours: Any) -> dict[str, dict[str, Call]]:
    """Return each collective, called in each way."""
    values = torch.zeros(COUNT)
    whole, part = torch.zeros(COUNT), torch.zeros(COUNT // RANKS)
    engine = ours._group
    given, all_of_it, one = (elements_of(t, copies=False) for t in (values, whole, part))

    def waited(begin: Callable[..., Any], *arguments: Any) -> Call:
        return lambda: begin(*arguments, blocking=True).wait()

    by_torch: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(values, group=group),
        "broadcast": lambda group: dist.broadcast(values, 0, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
    reducing = options(c10d.AllreduceOptions)
    from_first = options(c10d.BroadcastOptions, rootRank=0)
    gathering = options(c10d.AllgatherOptions)
    scattering = options(c10d.ReduceScatterOptions)
    at_barrier = options(c10d.BarrierOptions)
    methods: dict[str, Call] = {
        "all_reduce": lambda: ours.allreduce([values], reducing),
        "broadcast": lambda: ours.broadcast([values], from_first),
        "all_gather": lambda: ours.all_gather_single(whole, part, gathering),
        "reduce_scatter": lambda: ours.reduce_scatter_single(part, whole, scattering),
        "barrier": lambda: ours.barrier(at_barrier),
    }
    native: dict[str, Call] = {
        "all_reduce": waited(engine.all_reduce, given),
        "broadcast": waited(engine.broadcast, given),
        "all_gather": waited(engine.all_gather, one, all_of_it),
        "reduce_scatter": waited(engine.reduce_scatter, all_of_it, one),
        "barrier": waited(engine.all_reduce, elements_of(torch.zeros(1), copies=False)),
    }
    return {
        name: {
            GLOO: lambda call=call: call(gloo),  # type: ignore[misc]
            TORCH: lambda call=call: call(ours),  # type: ignore[misc]
            METHOD: methods[name],
            ENGINE: native[name],
        }
        for name, call in by_torch.items()
    }


def work(rank: int, folder: str, rounds: int, repetitions: int) -> None:
    """Measure as one of the ranks; rank 0 leaves the seconds of a call, by collective and way."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "notes"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    ours: Any = dist.new_group(backend="syncline", pg_options=Options(choices="built-in"))
    measured: dict[str, dict[str, list[float]]] = {}
    for name, ways in calls(dist.group.WORLD, ours).items():
        measured[name] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way in WAYS:
                call = ways[way]
                dist.barrier(group=ours)
                start_s = time.perf_counter()
                for _ in range(repetitions):
                    call()
                took_s = torch.tensor((time.perf_counter() - start_s) / repetitions)
                dist.all_reduce(took_s, dist.ReduceOp.MAX, group=ours)
                if number > 0:  # the first warms up
                    measured[name][way].append(took_s.item())
    if rank == 0:
        torch.save(measured, Path(folder) / "measured")
    dist.destroy_process_group()


def table(measured: dict[str, dict[str, Sequence[float]]]) -> Table:
    """Return the medians, and the time in each layer."""
    shown = Table("us a call", *WAYS, "torch's own", "our Python", "times as fast as Gloo")
    for name, ways in measured.items():
        us = {way: median(times_s) * 1e6 for way, times_s in ways.items()}
        layers = (us[TORCH] - us[METHOD], us[METHOD] - us[ENGINE])
        cells = [*(us[way] for way in WAYS), *layers, us[GLOO] / us[TORCH]]
        shown.add_row(name, *(f"{cell:.2f}" for cell in cells))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=2000, help="calls in a turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = folder, arguments.rounds, arguments.repetitions
        mp.spawn(work, given, nprocs=RANKS)
        measured = torch.load(Path(folder) / "measured", weights_only=True)
    Console().print(table(measured))
    save("backend_latency", {"ranks": RANKS, "bytes": 4 * COUNT, "seconds_a_call": measured})


if __name__ == "__main__":
    main()
