"""Forks of one process that has imported torch: real processes, started in milliseconds.

The workers of :mod:`tests.workers` serve all tests and must live. Ranks that may die run one job
and then fall off the end of the main script, so that exit handlers, exit codes and uncaught
exceptions are those of a user's script.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from syncline.lab.workers import leave
from tests.timeouts import DEADLINE_S, JOB_DEADLINE_S, POLL_S, wait_until

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended."""

    code: int  # the exit code; minus the number of the signal that ended it
    at_s: float  # when, on the monotonic clock; seen up to ``POLL_S`` later
    out: str
    err: str


class HangError(AssertionError):
    """A rank did not end within the deadline; the message holds the stacks of its threads."""


class Mortals:
    """Starts jobs on ranks that may die, and the workers that serve all tests."""

    name = "localhost"  # a fork is a process of this host

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        job: Callable[..., None],
        ranks: int,
        *args: Any,
        folder: Path,
        deadline_s: float = JOB_DEADLINE_S,
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
        request = {"module": job.__module__, "job": job.__name__, "args": args, "ranks": ranks}
        ends, shot = self.ask({**request, "folder": str(folder), "deadline_s": deadline_s})
        ended = []
        for rank, (code, at_s) in enumerate(ends):
            out, err = ((folder / f"{name}-{rank}").read_text() for name in ("out", "err"))
            ended.append(Ended(code=code, at_s=at_s, out=out, err=err))
        if shot:
            stacks = "\n".join(f"rank {rank}:\n{ended[rank].err}" for rank in range(ranks))
            raise HangError(f"{job.__name__}: ranks {shot} did not end in {deadline_s} s\n{stacks}")
        return ended

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Fork:
        """Fork a worker; ``command`` is what :func:`tests.workers.serve_jobs` is called with."""
        assert not environment
        assert stdout is None
        assert stderr is None
        return Fork(self, self.ask({"worker": command}))

    def ask(self, request: dict[str, Any]) -> Any:
        """Return what the server answers."""
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of forks has died"
        return json.loads(answer)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait(DEADLINE_S)
            self._server.stdout.close()
            self._server = None

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    # Else a look for GPUs keeps forks from using them.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )
        return self._server


class Fork:
    """A worker that was forked, as :class:`syncline.lab.workers.Running` wants it."""

    def __init__(self, server: Mortals, process: int) -> None:
        self._server, self._process = server, process
        self._ended = os.pidfd_open(process)
        self._code: int | None = None

    def fileno(self) -> int:
        return self._ended

    def terminate(self) -> None:
        if self._code is None:
            os.killpg(self._process, signal.SIGTERM)

    def close(self, deadline_s: float) -> int:
        if self._code is None:
            select.select([self._ended], [], [], max(deadline_s - time.monotonic(), 0))
            # The server has not waited for it yet, so no other group can have its number.
            os.killpg(self._process, signal.SIGKILL)
            self._code = int(self._server.ask({"end": self._process}))
            os.close(self._ended)
        return self._code


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
        wait_until((self.folder / f"told-{what}").exists, what)


def script(_: Place, text: str) -> None:
    """Run a script of a process of its own: its names are those of the main module."""
    exec(text, vars(sys.modules["__main__"]))


def serve() -> None:
    """Fork until the input ends; return in each rank that may die, when its job is done."""
    # Torch's optimizers import it where it is there. What gc.freeze keeps of it would be reported
    # as leaks on every rank's error output.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torch
    import torch._dynamo

    import syncline.train.ddp  # noqa: F401
    from tests.workers import serve_jobs

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no ranks' garbage
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "end" in request:
            _, status = os.waitpid(request["end"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        if "module" in request:  # imported once, not in every fork
            importlib.import_module(request["module"])
            gc.freeze()
        processes = {}
        for rank in range(request.get("ranks", 1)):
            process = os.fork()
            if process == 0:
                if "worker" in request:
                    _become_worker(serve_jobs, *request["worker"])
                _become(rank, request)
                return
            processes[process] = rank
        if "worker" in request:
            os.setpgid(process, process)  # Ctrl-C reaches the tests alone
            print(process, flush=True)
        else:
            print(json.dumps(_watch(processes, request["deadline_s"])), flush=True)


def _become_worker(serve_jobs: Callable[[str, int], None], path: str, rank: str) -> NoReturn:
    """Serve jobs; end with the server, even if that is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # the server's own output is for its answers
    try:
        serve_jobs(path, int(rank))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()


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
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    place = Place(rank=rank, ranks=request["ranks"], folder=folder)
    getattr(importlib.import_module(request["module"]), request["job"])(place, *request["args"])


def _watch(
    processes: dict[int, int], deadline_s: float
) -> tuple[list[tuple[int, float]], list[int]]:
    """Return every rank's exit code and time of end, and which ranks had to be shot."""
    deadline = time.monotonic() + deadline_s
    left = dict(processes)
    ends = [(0, 0.0)] * len(processes)
    shot: list[int] = []
    while left:
        for process in list(left):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ends[left.pop(process)] = os.waitstatus_to_exitcode(status), time.monotonic()
        if left and not shot and time.monotonic() > deadline:
            shot = sorted(left.values())
            for process in left:
                os.kill(process, signal.SIGABRT)  # says where its threads are
        time.sleep(POLL_S)
    return ends, shot


if __name__ == "__main__":
    serve()
