"""Training one kind after another with a framework, and what each came to for the test."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.torch_private import uncompiled
from syncline.train.ddp import DistributedDataParallel
from syncline.train.launched.conversion import prepare
from syncline.train.launched.request import OFF
from syncline.train.log import logger
from tests.adoption import unmodified
from tests.mortal import Place
from tests.programs import ran
from tests.timeouts import TIMEOUT
from tests.train.overlap.overlap_plans import Style, plan_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMEOUT_S = 600


def ended(command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    """Return a command that has ended well, in the repository's folder."""
    environment = {"OMP_NUM_THREADS": "1", **environment}
    done = ran(*command, cwd=Path(__file__).parents[2], timeout_s=TIMEOUT_S, **environment)
    assert done.returncode == 0, done.stderr
    return done


def planned(module: nn.Module) -> dict[str, Any]:
    """Return arguments with a plan whose messages go on under the next forward pass.

    It runs from the third step on. Messages begin late, so that they are still under way after the
    step. Clipping gets its norm from the reduce-scatters.
    """
    order = [name for name, _ in module.named_parameters()][::-1]
    style = Style(piece_elements=4000, decoupled=True, norm="2", delay_s=0.004)
    return {"plan": plan_of(module, order, 2, style), "check": False}


class Overlapping(logging.Handler):
    """Counts steps after which updates were left to the next forward pass; keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps = 0
        self.warned: list[str] = []
        logger.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.warned.append(record.getMessage())

    def note(self, model: nn.Module) -> None:
        """Look at a wrapped model right after a step."""
        model = uncompiled(model)
        if isinstance(model, DistributedDataParallel):
            deferral = model._training.deferral
            self.steps += deferral is not None and deferral.anything_deferred


def train_all(train: Callable[[str, str, Path], None]) -> None:
    """Call ``train(kind, which, folder)`` for each of ``SCRIPT FOLDER KIND...``, in three ways.

    All share the processes, which take longer to import a framework than to train, and their group.
    ``syncline run`` has started them, switched off; the last trainings, ``"run"``, switch it on. A
    kind that is sharded differs from another one with Syncline alone.
    """
    folder, *kinds = sys.argv[1:]
    for which in ("stock", "syncline", "run"):
        if which == "run":
            del os.environ[OFF]
            prepare.cache_clear()
            prepare()
        for kind in kinds:
            if kind.startswith("sharded") and which != "syncline":
                continue
            own = Path(folder, kind, which)
            own.mkdir(parents=True, exist_ok=True)
            train(kind, which, own)
            dist.barrier()
    dist.destroy_process_group()


def write(
    folder: Path, rank: int, module: nn.Module, overlapping: Overlapping, **noted: Any
) -> None:
    """Write the digest of a model's parameters and what else was noted."""
    logger.logger.removeHandler(overlapping)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    noted |= {"overlapped": overlapping.steps, "warned": overlapping.warned}
    noted["norm"] = float(flat.double().norm())
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    Path(folder, f"{rank}.json").write_text(json.dumps({"digest": digest, **noted}))


def alone(place: Place, kind: str) -> None:
    """Train a kind of the unmodified script in a fork, which need not import torch."""
    dist.init_process_group("gloo", f"file://{place.folder}/meet", TIMEOUT, place.ranks, place.rank)
    unmodified.train(str(place.folder), kind)


def outcomes(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return what each process has noted."""
    return [json.loads((folder / f"{kind}{rank}.json").read_text()) for rank in range(2)]
