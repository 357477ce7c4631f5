"""A worker process of ``syncline replay``.

``python -m syncline.lab.replay.worker SOCKET TIMEOUT_S`` is how it is started.

Its orders are :data:`~syncline.lab.replay.job.Job`; torchrun's environment variables say which
worker this is. A collective that takes longer than the timeout has lost a peer.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline.errors import PeerError
from syncline.lab.replay.interleaved import ddp_baseline, planned, run_interleaved
from syncline.lab.replay.job import Job, Laps, ProbeJob
from syncline.lab.workers import Progress, leave, serve
from syncline.plan.network import Network
from syncline.train.measure.probe import probe


def run_job(job: Job, progress: Progress) -> Network | Laps | None:
    """Do a worker's part of a job, in the default process group; rank 0 returns what was found."""
    first = dist.get_rank() == 0
    if isinstance(job, ProbeJob):
        network = probe(largest_bytes=job.largest_bytes, name="emulated cluster, probed")
        return network if first else None
    laps = run_interleaved(
        job.profile,
        [
            ddp_baseline(name) if plan is None else planned(plan, name)
            for name, plan in job.contestants.items()
        ],
        rounds=job.rounds,
        iterations=job.iterations,
        warmup=job.warmup,
        progress=(lambda name, _, done, total: progress(f"replaying {name}", done, total))
        if first
        else None,
    )
    return laps if first else None


def main(path: str, timeout_s: str) -> None:
    """Carry out the orders of the leading process."""
    # Workers that emulate computation by waiting need only one thread.
    torch.set_num_threads(1)

    def act(job: Job, progress: Progress) -> Network | Laps | None:
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout_s)))
            return run_job(job, progress)
        except dist.DistError as error:
            raise PeerError(f"lost another worker: {str(error).splitlines()[0]}") from error

    serve(path, int(os.environ["RANK"]), Job, act)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
