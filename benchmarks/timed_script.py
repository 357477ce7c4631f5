"""Trains an unmodified script in turns: ``python -m benchmarks.timed_script JOB SCRIPT ARGS``.

``JOB`` is JSON: ``folder``, where :class:`benchmarks.contestant.Contestant` gives the turns;
``warm_up``, the passes through the first wrapped model before it first waits; ``most``, those of a
model of Syncline that has not decided by then; ``passes`` of a turn; ``digest_at``, the pass before
which the parameters are hashed; ``bucket_cap_mb`` of torch's DDP (null leaves it). All starts draw
the same random numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

DECIDED = ("steady", "torch's DDP")
POLL_S = 0.005
GIVE_UP_S = 3600.0  # for the other contestants to start, to warm up and to have their turns


class Passes:
    """The passes through the first wrapped model, which waits before it begins a turn's first."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._folder = job, Path(job["folder"])
        self._model: nn.Module | None = None
        self._count = self._turn = 0
        self._begins_s: list[float] = []
        self._digest = ""

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Call before every module's forward pass."""
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return
        if not (module.module.training and torch.is_grad_enabled()):
            return
        if self._model is None:
            self._model = module
        if module is not self._model:
            return  # a second model, such as a GAN's
        if self._count == self._job["digest_at"]:
            self._digest = digest([*module.parameters()])
        self._begins_s.append(time.perf_counter())
        if self._is_over(phase := getattr(module, "phase", "torch's DDP")):
            dist.barrier()  # nobody is stopped while another one still exchanges with it
            self._wait(phase)
            self._begins_s = [time.perf_counter()]
        self._count += 1

    def _is_over(self, phase: str) -> bool:
        job = self._job
        if self._turn:
            return len(self._begins_s) > job["passes"]
        return self._count >= (job["warm_up"] if phase in DECIDED else job["most"])

    def _wait(self, phase: str) -> None:
        found = {"begins_s": self._begins_s, "phase": phase, "digest": self._digest}
        written = self._folder / f"{self._turn}-{dist.get_rank()}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))
        self._turn += 1
        until_s = time.monotonic() + GIVE_UP_S
        while not (self._folder / f"go-{self._turn}").exists():
            if time.monotonic() > until_s:
                raise SystemExit(f"error: turn {self._turn} did not come within {GIVE_UP_S:g} s")
            time.sleep(POLL_S)


def main() -> None:
    job, (script, *arguments) = json.loads(sys.argv[1]), sys.argv[2:]
    register_module_forward_pre_hook(Passes(job).begin)
    if job["bucket_cap_mb"] is not None:
        give_buckets(job["bucket_cap_mb"])
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    raise SystemExit("error: the script ended before its last turn; let it make more steps")


def digest(parameters: Sequence[torch.Tensor]) -> str:
    """Return a hash of the bits of parameters."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def give_buckets(bucket_cap_mb: int) -> None:
    """Let torch's DDP make buckets of this size."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    stock = wrapper.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **{**kwargs, "bucket_cap_mb": bucket_cap_mb})

    wrapper.__init__ = init


if __name__ == "__main__":
    main()
