"""A worker's rank and device, and the process group that joins the workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline.errors import UserError
from syncline.lab.training.config import DeviceName, Precision, TrainingConfig
from syncline.train.measure.exchange import gathered

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
HEAP_BLOCK_BYTES = 32 << 20
"""The largest blocks that glibc takes from the heap by itself. Larger ones stay mappings of their
own: glibc before 2.38 cannot reuse a freed aligned block for one of the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of the job."""

    rank: int
    workers: int
    device: torch.device

    @property
    def device_ids(self) -> list[int] | None:
        """What DistributedDataParallel takes as ``device_ids``."""
        return None if self.device.type == "cpu" else [self.device.index]

    def autocast(self, precision: Precision) -> torch.autocast:
        """Return the context in which a model computes with that precision."""
        enabled = precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def barrier(self) -> None:
        """Wait for all workers."""
        dist.barrier(device_ids=self.device_ids)  # else NCCL guesses the device, and warns

    def synchronize(self) -> None:
        """Wait for the GPU of this worker, if it has one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum(self, *values: float) -> list[float]:
        """Return the sums of the values over all workers, on every worker."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(v) for v in total]

    def largest(self, values: list[float]) -> list[float]:
        """Return the element-wise largest of the lists of all workers, on every worker."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return [float(v) for v in largest]

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all workers, which have one shape, on every worker, on the CPU."""
        assert dist.group.WORLD is not None
        return gathered(part.to(self.device), dist.group.WORLD)


def started_by_launcher(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a worker that torchrun, or something like it, has started."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def pick_device(device: DeviceName, workers_here: int) -> str:
    """Return ``"cuda"`` or ``"cpu"``; ``auto`` takes GPUs if there is one for each worker here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < workers_here:
        raise UserError(
            f"--device cuda needs a GPU for each of the {workers_here} workers of this host, "
            f"found {gpus}; lower --workers or take --device cpu"
        )
    if device == "auto":
        return "cuda" if gpus >= workers_here else "cpu"
    return device


def keep_freed_memory() -> None:
    """Let malloc keep what an iteration frees for the next one.

    By default glibc returns freed memory to the kernel, depending on what lies at the end of the
    heap, and the next iteration pays for page faults: a fifth of the computing of an LSTM on a CPU.
    Measured iterations then predict later ones badly, as any allocation can change the layout.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries lack it
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES)


@contextmanager
def process_group(config: TrainingConfig, store: str | None = None) -> Iterator[Worker]:
    """Join the other workers, by torchrun's environment variables, and leave them at the end.

    An existing process group is used, and is not destroyed. ``store`` is a file through which the
    workers find each other; None: at ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    # RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* are torchrun's way of passing arguments.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if pick_device(config.device, workers_here) == "cuda":
        torch.cuda.set_device(local_rank)
        place, backend = torch.device("cuda", local_rank), "nccl"
    else:
        place, backend = torch.device("cpu"), "gloo"
    joins = not dist.is_initialized()
    if joins:
        keep_freed_memory()
        dist.init_process_group(
            backend,
            init_method="env://" if store is None else f"file://{store}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=config.timeout_s),
        )
    workers = dist.get_world_size()
    if workers != config.workers:
        raise UserError(
            f"--workers is {config.workers}, but the launcher started {workers}; leave --workers "
            "out"
        )
    worker = Worker(rank=dist.get_rank(), workers=workers, device=place)
    yield worker
    # Not after an error: leaving waits for peers that may be gone, and the process ends anyway.
    if joins:
        # All leave together: Gloo can abort a process whose peer has left while its threads run.
        worker.barrier()
        dist.destroy_process_group()
