"""Kill workers of an overlapped training at random moments, resume, and compare the outcome.

``python -m benchmarks.kill_resume [--kills 50]`` trains with updates deferred into the next forward
pass and a checkpoint every few steps. One worker, or all, is ended by SIGKILL at a random moment;
those that are left must end by themselves with an error; then all are started again from the last
checkpoint. After the last kill the training goes on to its end. Its parameters and the optimizer's
state must be those of a training that nobody disturbed, bit for bit.

With ``--shard`` each rank keeps the optimizer's state for its share alone, checkpoints are those of
``torch.distributed.checkpoint``, and every attempt has another number of ranks than the one before.
All train on the same data, so that this changes no gradient; but a kernel may round a share's last
digits otherwise, so parameters and state must only agree within a relative 1e-4.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import save, spread
from benchmarks.kill_resume_worker import WORKERS, work, work_in_shards

SHARDED_WORKERS = (2, 4)
"""In turns. Powers of two: dividing by them rounds nothing."""
LARGEST_DIFFERENCE = 1e-4
GRACE_S = 60.0
"""How long the workers that are left may take to notice, and a training to make a step."""
MOST_STEPS = 40
"""A kill comes within so many steps of an attempt, or a moment later."""
MOMENT_S = 0.05


class Job:
    """The workers of one training in a folder, started as often as needed."""

    def __init__(self, folder: Path, steps: int, *, shard: bool) -> None:
        self.folder = folder
        self._steps = steps
        self._shard = shard
        self._attempt = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.kill_resume_worker", "torch._dynamo"])
        self.workers: list[BaseProcess] = []

    def start(self) -> None:
        """Start all workers from the last checkpoint, if there is one."""
        self._attempt += 1
        count = WORKERS
        if self._shard:
            count = SHARDED_WORKERS[self._attempt % len(SHARDED_WORKERS)]
        self.workers = [
            self._context.Process(
                target=work_in_shards if self._shard else work,
                args=(rank, self.folder, self._attempt, self._steps, self.errors(rank), count),
                daemon=True,
            )
            for rank in range(count)
        ]
        for worker in self.workers:
            worker.start()

    def errors(self, rank: int) -> Path:
        """Return where a worker's standard error output goes."""
        return self.folder / f"errors-{self._attempt}-{rank}"

    @property
    def progress(self) -> int:
        """Steps done, as the first worker has told last."""
        path = self.folder / "progress"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_until_moving(self, steps: int) -> None:
        """Return when the present attempt has made so many steps, or ended."""
        path = self.folder / "progress"
        path.unlink(missing_ok=True)
        deadline, first = time.monotonic() + GRACE_S, 0
        while self.running and not 0 < first <= self.progress - steps + 1:
            first = first or self.progress
            if time.monotonic() > deadline:
                raise RuntimeError(f"attempt {self._attempt} made no {steps} steps in {GRACE_S} s")
            time.sleep(0.005)

    @property
    def running(self) -> bool:
        """Whether no worker has ended."""
        return all(worker.is_alive() for worker in self.workers)

    def kill(self, ranks: Sequence[int]) -> None:
        """End some workers by SIGKILL."""
        for rank in ranks:
            process = self.workers[rank].pid
            assert process is not None
            os.kill(process, signal.SIGKILL)

    def wait(self) -> list[int]:
        """Return the exit codes once all workers have ended by themselves."""
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            worker.join(max(deadline - time.monotonic(), 0))
        hanging = [rank for rank, worker in enumerate(self.workers) if worker.is_alive()]
        for worker in self.workers:
            worker.kill()
            worker.join()
        if hanging:
            raise RuntimeError(f"workers {hanging} did not end within {GRACE_S} s of a kill")
        return [worker.exitcode or 0 for worker in self.workers]

    def finish(self) -> list[Any]:
        """Let the training run to its end; return what all workers have come to."""
        moved_s, last = time.monotonic(), 0
        while any(worker.is_alive() for worker in self.workers):
            if self.progress != last:
                moved_s, last = time.monotonic(), self.progress
            if time.monotonic() > moved_s + GRACE_S:
                self.kill(range(len(self.workers)))
                raise RuntimeError(f"the training stands still after step {last}")
            time.sleep(0.05)
        codes = [worker.exitcode for worker in self.workers]
        if any(codes):
            texts = [self.errors(rank).read_text() for rank in range(len(codes))]
            raise RuntimeError(f"exit codes {codes}:\n" + "\n".join(texts))
        if self._shard:
            return [torch.load(self.folder / "final.pt", weights_only=True)]
        return [(self.folder / f"digest-{rank}").read_text() for rank in range(WORKERS)]


def undisturbed(steps: int, *, shard: bool) -> list[Any]:
    """Return what a training has come to that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), steps, shard=shard)
        job.start()
        return job.finish()


def disturbed(
    steps: int, kills: int, seed: int, *, shard: bool, most_steps: int = MOST_STEPS
) -> dict[str, Any]:
    """Train with kills; return what it has come to and what happened."""
    chance = random.Random(seed)
    happened = []
    noticed_s = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), steps, shard=shard)
        job.start()
        while len(happened) < kills:
            job.wait_until_moving(chance.randint(1, most_steps))
            time.sleep(chance.uniform(0, MOMENT_S))
            if not job.running:
                raise RuntimeError(
                    f"the training of {steps} steps was over after {len(happened)} kills"
                )
            ranks = range(len(job.workers))
            victims = chance.choice([*([rank] for rank in ranks), list(ranks)])
            step = job.progress
            job.kill(victims)
            killed_s = time.monotonic()
            codes = job.wait()
            noticed_s.append(time.monotonic() - killed_s)
            survivors = [rank for rank in ranks if rank not in victims]
            for rank in survivors:
                said = _last_line(job.errors(rank))
                # DCP raises errors of its own.
                if codes[rank] != 1 or not (shard or "PeerError: " in said):
                    raise RuntimeError(f"worker {rank} ended with {codes[rank]}, saying {said!r}")
            happened.append(
                {
                    "step": step,
                    "killed": victims,
                    "ranks": len(ranks),
                    "said": [_last_line(job.errors(rank)) for rank in survivors],
                }
            )
            job.start()
        return {"ends": job.finish(), "kills": happened, "noticed_s": noticed_s}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two trainings' tensors, over the largest value of each."""
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(
        float((value - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12))
        for name, value in ours.items()
    )


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=0, help="of the training; by default enough")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", action="store_true", help="shares, and other numbers of ranks")
    options = parser.parse_args()
    steps = options.steps or 40 * options.kills
    expected = undisturbed(steps, shard=options.shard)
    found = disturbed(steps, options.kills, options.seed, shard=options.shard)
    print(f"{len(found['kills'])} kills, {steps} steps; every survivor ended by a PeerError")
    print(f"seconds until the survivors had ended: {spread(found['noticed_s'])}")
    ends = found.pop("ends")
    if options.shard:
        difference = largest_difference(ends[0], expected[0])
        print(f"largest relative difference of parameters and state: {difference:.2g}")
        found = {"steps": steps, "difference": difference, **found}
        save("kill_resume_sharded", found, module="kill_resume")
        sys.exit(difference > LARGEST_DIFFERENCE)
    identical = ends == expected
    print(f"parameters and optimizer state identical: {identical}")
    results = {"expected": expected, "digests": ends, "identical": identical}
    save("kill_resume", {"steps": steps, **results, **found})
    if not identical:
        sys.exit(1)


if __name__ == "__main__":
    main()
