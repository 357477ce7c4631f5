"""A worker process of ``syncline replay``: ``python -m syncline.replay.worker JOBFILE``.

The file is a :data:`~syncline.replay.job.Job`; torchrun's environment variables say which worker
this is. Rank 0 writes the result, and a line of JSON after each lap.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from syncline.errors import PeerError, SynclineError
from syncline.measure.probe import probe
from syncline.replay.contest import planned, run_contest, stock_ddp
from syncline.replay.job import Job, LapDone, ProbeJob, load_job, save_laps

__all__ = ["main", "run_job"]


def run_job(job: Job) -> None:
    """Do a worker's part of a job, in the default process group.

    Raises:
        SynclineError: a plan cannot be run, another rank failed, or the result cannot be written.
    """
    first = dist.get_rank() == 0
    if isinstance(job, ProbeJob):
        network = probe(largest_bytes=job.largest_bytes, name="emulated cluster, probed")
        if first:
            network.save(job.result)
        return
    laps = run_contest(
        job.profile,
        [stock_ddp(c.name) if c.plan is None else planned(c.plan, c.name) for c in job.contenders],
        rounds=job.rounds,
        iterations=job.iterations,
        warmup=job.warmup,
        progress=_tell if first else None,
    )
    if first:
        save_laps(Path(job.result), laps)


def _tell(contestant: str, _: int, done: int, total: int) -> None:
    line = LapDone(name=contestant, done=done, total=total)
    print(msgspec.json.encode(line).decode(), flush=True)


def main(arguments: list[str]) -> int:
    """Do what the job file says; return the exit code."""
    # Hosts that emulate computation by waiting have no use for more.
    torch.set_num_threads(1)
    try:
        job = load_job(Path(arguments[0]))
        dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
        run_job(job)
        # Together: Gloo can abort a process that a peer leaves behind with its threads running.
        dist.barrier()
        dist.destroy_process_group()
    except SynclineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except dist.DistError as error:
        print(f"error: {_lost(error)}", file=sys.stderr)
        return PeerError.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _lost(error: Exception) -> PeerError:
    what = str(error).splitlines()[0]
    return PeerError(f"rank {os.environ.get('RANK')} lost another worker: {what}")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: threads of a process group whose peers are gone would hold up the interpreter.
    os._exit(code)
