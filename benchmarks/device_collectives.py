"""Linear-pipeline collectives between GPUs of this host, beside NCCL, or Gloo through host memory.

NCCL takes part where each rank has a GPU of its own; where they share, Gloo does, on copies in host
memory, there and back. The two take turns on equal tensors, and the slowest rank's time counts.
Without a GPU nothing is measured, and that is said.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.common import median, save, spread
from syncline.comm.devices import CudaDevice, DeviceGroup
from syncline.comm.devices.device_group import DEFAULT_BLOCK_BYTES, DEFAULT_WINDOW
from syncline.comm.groups import Group

COLLECTIVES = ("all-reduce", "broadcast", "reduce")
SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
ROUNDS = 11
WARM_UP = 3
TIMEOUT_S = 120.0

Call = Callable[[torch.Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--block-bytes", type=int, default=DEFAULT_BLOCK_BYTES)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"absent: a GPU (torch {torch.__version__} finds none), so neither Syncline's device "
            "collectives nor NCCL can be measured here; nothing was measured"
        )
        return
    found = measured(arguments.ranks, arguments.block_bytes, arguments.window)
    for name, reason in found["absent"].items():
        print(f"absent: {name}: {reason}; Gloo through host memory takes its place")
    for row in found["rows"]:
        print(
            f"{row['collective']:<10} {row['size_bytes']:>11} bytes  {row['contestant']:<8} "
            f"{spread(row['seconds'])} s, {row['size_bytes'] / median(row['seconds']) / 1e9:.3g} "
            "GB/s of the vector"
        )
    save("device_collectives", found)


def measured(
    ranks: int,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    window: int = DEFAULT_WINDOW,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> dict[str, Any]:
    """Measure all collectives between so many ranks, where there is a GPU."""
    gpus = torch.cuda.device_count()
    own = gpus >= ranks
    peer = "nccl" if own else "gloo"
    absent = {} if own else {"nccl": f"it needs a GPU for each of {ranks} ranks: {gpus}"}
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, folder, peer, block_bytes, window, sizes_bytes)
        context = mp.get_context("spawn")
        answers: Any = context.SimpleQueue()
        processes = [
            context.Process(target=measure, args=(rank, *given, answers)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()  # rank 0's rows are small, so that it need not be read first
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed; its traceback stands above")
        rows = answers.get()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "cuda": torch.version.cuda,
        "ranks": ranks,
        "block_bytes": block_bytes,
        "window": window,
        "absent": absent,
        "rows": rows,
    }


def measure(
    rank: int,
    ranks: int,
    folder: str,
    peer: str,
    block_bytes: int,
    window: int,
    sizes_bytes: Sequence[int],
    answers: Any,
) -> None:
    """Measure as one rank; rank 0 answers."""
    device = CudaDevice(rank % torch.cuda.device_count())
    torch.cuda.set_device(device.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if peer == "nccl" else "gloo",
        init_method=f"file://{folder}/{peer}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    store = FileStore(str(Path(folder) / "syncline"), ranks)
    group = Group(store, rank, ranks, timeout_s=TIMEOUT_S, transport="shared")
    with DeviceGroup(group, device, block_bytes=block_bytes, window=window) as ours:
        rows = contests(ours, peer, sizes_bytes)
    if rank == 0:
        answers.put(rows)
    dist.destroy_process_group()


def contests(ours: DeviceGroup, peer: str, sizes_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure every collective of every size, beside the default group's, of a peer's backend."""
    way = staged if peer == "gloo" else direct
    rows = []
    calls: dict[str, dict[str, Call]] = {
        "all-reduce": {"syncline": ours.all_reduce, peer: way(dist.all_reduce)},
        "broadcast": {"syncline": ours.broadcast, peer: way(lambda t: dist.broadcast(t, 0))},
        "reduce": {"syncline": ours.reduce, peer: way(lambda t: dist.reduce(t, 0))},
    }
    for collective in COLLECTIVES:
        for size_bytes in sizes_bytes:
            seconds = contest(list(calls[collective].values()), size_bytes, ours.device)
            rows += [
                {
                    "collective": collective,
                    "size_bytes": size_bytes,
                    "contestant": name,
                    "seconds": found,
                }
                for name, found in zip(calls[collective], seconds, strict=True)
            ]
    return rows


def direct(call: Call) -> Call:
    """Return a call that is made on the GPU."""
    return call


def staged(call: Call) -> Call:
    """Return a call that is made on a copy in host memory."""

    def made(tensor: torch.Tensor) -> None:
        host = tensor.cpu()
        call(host)
        tensor.copy_(host)

    return made


def contest(calls: Sequence[Call], size_bytes: int, device: torch.device) -> list[list[float]]:
    """Return each contestant's seconds of every round, as the slowest rank has them."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(WARM_UP + ROUNDS):
        for call, seconds in zip(calls, found, strict=True):
            tensor = torch.ones(size_bytes // 4, device=device)
            finish(device)
            dist.all_reduce(torch.zeros(1))  # all begin together
            began_s = time.perf_counter()
            call(tensor)
            finish(device)
            slowest = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                seconds.append(float(slowest))
    return found


def finish(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
