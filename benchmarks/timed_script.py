"""Times the passes of an unmodified script: ``python -m benchmarks.timed_script JOB SCRIPT ARGS``.

``JOB`` is JSON: ``passes`` through the first wrapped model after which the script ends, ``into``
(the file for what rank 0 finds), and ``bucket_cap_mb`` (of torch's DDP; null leaves it). All starts
draw the same random numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
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


def main() -> None:
    job, (script, *arguments) = json.loads(sys.argv[1]), sys.argv[2:]
    begins_s: list[float] = []
    models: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return
        if not (module.module.training and torch.is_grad_enabled()):
            return
        if not models:
            models.append(module)
        if module is not models[0]:
            return  # a second model, such as a GAN's
        begins_s.append(time.perf_counter())
        if len(begins_s) > job["passes"]:
            if dist.get_rank() == 0:
                found = {"begins_s": begins_s, "digest": digest([*module.parameters()])}
                found["phase"] = getattr(module, "phase", "torch's DDP")
                Path(job["into"]).write_text(json.dumps(found))
            dist.barrier()  # nobody ends while another one still exchanges with it
            sys.stdout.flush()
            os._exit(0)

    register_module_forward_pre_hook(note)
    if job["bucket_cap_mb"] is not None:
        give_buckets(job["bucket_cap_mb"])
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    raise SystemExit(f"error: the script ended after {len(begins_s)} of {job['passes']} passes")


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
