"""Ranks that may die: real processes with the interpreter's own end, started in milliseconds.

The workers of :mod:`tests.workers` serve all tests and must live. These are forks of one process
that has imported torch: each runs one job and then falls off the end of the main script, so that
exit handlers, exit codes and uncaught exceptions are those of a user's script.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 100.0
"""Of a job, which takes seconds unless the machine is loaded."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended."""

    code: int
    """The exit code; minus the number of the signal that ended it."""
    out: str
    err: str


class HangError(AssertionError):
    """A rank did not end within the deadline; the message holds the stacks of its threads."""


class Mortals:
    """Starts jobs on ranks that may die."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        job: Callable[..., None],
        ranks: int,
        *args: Any,
        folder: Path,
        deadline_s: float = DEADLINE_S,
    ) -> list[Ended]:
        """Run ``job(place, *args)`` on every rank; return how each ended, in order of rank.

        Args:
            job: a function of a module; gets a :class:`Place`.
            ranks: how many.
            args: what JSON can hold.
            folder: an empty one, which the ranks share.
            deadline_s: when the ranks that are left are shot.

        Raises:
            HangError: a rank had to be shot.
        """
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        request = {
            "module": job.__module__,
            "job": job.__name__,
            "args": args,
            "ranks": ranks,
            "folder": str(folder),
            "deadline_s": deadline_s,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of mortal ranks has died"
        codes, shot = json.loads(answer)
        ended = [
            Ended(
                code=code,
                out=(folder / f"out-{rank}").read_text(),
                err=(folder / f"err-{rank}").read_text(),
            )
            for rank, code in enumerate(codes)
        ]
        if shot:
            stacks = "\n".join(f"rank {rank}:\n{ended[rank].err}" for rank in range(ranks))
            raise HangError(f"{job.__name__}: ranks {shot} did not end in {deadline_s} s\n{stacks}")
        return ended

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait(10)
            self._server.stdout.close()
            self._server = None

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        return self._server


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job runs, and how it speaks with its peers beside the process group."""

    rank: int
    ranks: int
    folder: Path

    def tell(self, what: str) -> None:
        """Let the others know that something has happened."""
        (self.folder / f"told-{what}").touch()

    def await_(self, what: str) -> None:
        """Wait until another rank has told of it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / f"told-{what}").exists():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(POLL_S)


def serve() -> None:
    """Fork ranks until the input ends; return in each rank, when its job is done."""
    import torch
    import torch._dynamo

    import syncline.parallel.ddp  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no ranks' garbage
    while line := sys.stdin.readline():
        request = json.loads(line)
        processes = {}
        for rank in range(request["ranks"]):
            process = os.fork()
            if process == 0:
                _become(rank, request)
                return
            processes[process] = rank
        print(json.dumps(_watch(processes, request["deadline_s"])), flush=True)


def _become(rank: int, request: dict[str, Any]) -> None:
    """Run one rank's job."""
    folder = Path(request["folder"])
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    # A shell starts what runs in the background with this ignored, and so its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = Place(rank=rank, ranks=request["ranks"], folder=folder)
    getattr(importlib.import_module(request["module"]), request["job"])(place, *request["args"])


def _watch(processes: dict[int, int], deadline_s: float) -> tuple[list[int], list[int]]:
    """Return every rank's exit code, and which ranks had to be shot."""
    deadline = time.monotonic() + deadline_s
    left = dict(processes)
    codes = [0] * len(processes)
    shot: list[int] = []
    while left:
        for process in list(left):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[left.pop(process)] = os.waitstatus_to_exitcode(status)
        if left and not shot and time.monotonic() > deadline:
            shot = sorted(left.values())
            for process in left:
                os.kill(process, signal.SIGABRT)  # says where its threads are
        time.sleep(POLL_S)
    return codes, shot


if __name__ == "__main__":
    serve()
