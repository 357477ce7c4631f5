"""``Contestant``: a training on emulated hosts that makes its steps in turns with others."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.control import Process
from syncline.lab.testbed.job import worker_environment

ROOT = Path(__file__).parents[1]
WARM_UP_S, TURN_S = 600.0, 300.0
POLL_S = 0.05
SHOWN_CHARACTERS = 3000  # of what a worker that failed has written


class Contestant(contextlib.AbstractContextManager["Contestant"]):
    """Keeps a script's workers between the turns of :mod:`benchmarks.timed_script`.

    A start takes a minute and a turn seconds, so a comparison in turns leaves the machine less time
    to change. Between its turns a contestant is stopped by SIGSTOP: idle process groups of Gloo
    would otherwise wake a hundred times a second.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cluster: Cluster,
        environment: Mapping[str, str],
        job: Mapping[str, Any],
        launched: Sequence[str] = (),
        python: str,
        folder: str,
    ) -> None:
        self._cluster, self._environment = cluster, environment
        self._job, self._launched, self._script = job, launched, command
        self._python, self._run_in = python, folder
        self._stack = contextlib.ExitStack()
        self._workers: list[Process] = []
        self._turn = 0

    def __enter__(self) -> Self:
        """Start the script and let it warm up."""
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            bed = stack.enter_context(Testbed(self._cluster))
            job = json.dumps({**self._job, "folder": str(self._folder)})
            timed = ["-m", "benchmarks.timed_script", job, *self._script]
            command = ["env", "-C", self._run_in, self._python, *self._launched, *timed]
            searched = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
            given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": searched, **self._environment}
            for rank, host in enumerate(bed.hosts):
                added = worker_environment(self._cluster, rank, given)
                with (self._folder / f"{rank}.log").open("wb") as log:
                    self._workers.append(
                        host.start(
                            command,
                            environment={**given, **added},
                            stdout=log.fileno(),
                            stderr=log.fileno(),
                        )
                    )
            self._stop_after(WARM_UP_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self) -> dict[str, Any]:
        """Let it make the passes of one turn; return what rank 0 found.

        ``begins_s`` are the times at which the passes began, and at which the last one ended.
        """
        self._turn += 1
        (self._folder / f"go-{self._turn}").touch()
        for worker in self._workers:
            worker.send_signal(signal.SIGCONT)
        return self._stop_after(TURN_S)

    def _stop_after(self, timeout_s: float) -> dict[str, Any]:
        """Stop the workers once all have ended their turn."""
        ended = [self._folder / f"{self._turn}-{rank}.json" for rank in range(len(self._workers))]
        until_s = time.monotonic() + timeout_s
        while not all(path.exists() for path in ended):
            late = time.monotonic() > until_s
            for rank, worker in enumerate(self._workers):
                if late or select.select([worker], [], [], 0)[0]:
                    said = (self._folder / f"{rank}.log").read_text(errors="replace")
                    why = f"took more than {timeout_s:g} s" if late else "ended"
                    raise SystemExit(f"error: rank {rank} {why}: {said[-SHOWN_CHARACTERS:]}")
            time.sleep(POLL_S)
        for worker in self._workers:
            worker.send_signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(ended[0].read_text())
        return found
