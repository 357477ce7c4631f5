"""Kill workers of an overlapped training at random moments, resume, and compare the outcome.

``python -m benchmarks.kill_resume [--kills 50]`` trains with updates deferred into the next forward
pass and a checkpoint every few steps. One worker, or all, is ended by SIGKILL at a random moment;
those that are left must end by themselves with an error; then all are started again from the last
checkpoint. After the last kill the training goes on to its end. Its parameters and the optimizer's
state must be those of a training that nobody disturbed, bit for bit.
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

from benchmarks.common import save, spread
from benchmarks.kill_resume_worker import WORKERS, work

GRACE_S = 60.0
"""How long the workers that are left may take to notice, and a training to make a step."""
AT_MOST_S = 1.0
"""A kill comes at most so long after the first step of an attempt: that is about 40 steps."""


class Job:
    """The workers of one training in a folder, started as often as needed."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self._steps = steps
        self._attempt = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.kill_resume_worker", "torch._dynamo"])
        self.workers: list[BaseProcess] = []

    def start(self) -> None:
        """Start all workers from the last checkpoint, if there is one."""
        self._attempt += 1
        self.workers = [
            self._context.Process(
                target=work,
                args=(rank, self.folder, self._attempt, self._steps, self.errors(rank)),
                daemon=True,
            )
            for rank in range(WORKERS)
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

    def wait_until_moving(self) -> None:
        """Return when the present attempt has made a step, or ended."""
        path = self.folder / "progress"
        path.unlink(missing_ok=True)
        deadline = time.monotonic() + GRACE_S
        while not path.exists() and self.running:
            if time.monotonic() > deadline:
                raise RuntimeError(f"attempt {self._attempt} made no step in {GRACE_S} s")
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

    def finish(self) -> list[str]:
        """Let the training run to its end; return the digests of all workers."""
        moved_s, last = time.monotonic(), 0
        while any(worker.is_alive() for worker in self.workers):
            if self.progress != last:
                moved_s, last = time.monotonic(), self.progress
            if time.monotonic() > moved_s + GRACE_S:
                self.kill(range(WORKERS))
                raise RuntimeError(f"the training stands still after step {last}")
            time.sleep(0.05)
        codes = [worker.exitcode for worker in self.workers]
        if any(codes):
            texts = [self.errors(rank).read_text() for rank in range(WORKERS)]
            raise RuntimeError(f"exit codes {codes}:\n" + "\n".join(texts))
        return [(self.folder / f"digest-{rank}").read_text() for rank in range(WORKERS)]


def undisturbed(steps: int) -> list[str]:
    """Return the digests of a training that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), steps)
        job.start()
        return job.finish()


def disturbed(steps: int, kills: int, seed: int) -> dict[str, Any]:
    """Train with kills; return the digests and what happened."""
    chance = random.Random(seed)
    happened = []
    noticed_s = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), steps)
        job.start()
        while len(happened) < kills:
            job.wait_until_moving()
            time.sleep(chance.uniform(0, AT_MOST_S))
            if not job.running:
                raise RuntimeError(
                    f"the training of {steps} steps was over after {len(happened)} kills"
                )
            victims = chance.choice([[0], [1], [0, 1]])
            step = job.progress
            job.kill(victims)
            killed_s = time.monotonic()
            codes = job.wait()
            noticed_s.append(time.monotonic() - killed_s)
            survivors = [rank for rank in range(WORKERS) if rank not in victims]
            for rank in survivors:
                said = _last_line(job.errors(rank))
                if codes[rank] != 1 or "PeerError: " not in said:
                    raise RuntimeError(f"worker {rank} ended with {codes[rank]}, saying {said!r}")
            happened.append(
                {
                    "step": step,
                    "killed": victims,
                    "said": [_last_line(job.errors(rank)) for rank in survivors],
                }
            )
            job.start()
        return {"digests": job.finish(), "kills": happened, "noticed_s": noticed_s}


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=0, help="of the training; by default enough")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.steps or 40 * options.kills
    expected = undisturbed(steps)
    found = disturbed(steps, options.kills, options.seed)
    print(f"{len(found['kills'])} kills, {steps} steps; every survivor ended by a PeerError")
    print(f"seconds until the survivors had ended: {spread(found['noticed_s'])}")
    identical = found["digests"] == expected
    print(f"parameters and optimizer state identical: {identical}")
    save("kill_resume", {"steps": steps, "expected": expected, "identical": identical, **found})
    if not identical:
        sys.exit(1)


if __name__ == "__main__":
    main()
