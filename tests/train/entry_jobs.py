"""What the workers of ``tests/test_torch_entry.py`` run: training under another version of torch.

Only its number is another: what torch itself would do differently is not known.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.errors import UserError
from syncline.train.ddp import DistributedDataParallel
from tests.train.jobs import OPTIMIZERS, differing, train
from tests.train.models import Plain


def trains_under(version: str) -> dict[str, Any]:
    """Train beside DDP."""
    said: list[str] = []
    torch.manual_seed(1)
    stock = TorchDDP(Plain())
    theirs = OPTIMIZERS["adamw"](stock.parameters())
    with (
        mock.patch.object(torch, "__version__", version),
        mock.patch("syncline.train.planned_training.warn", said.append),
    ):
        ours = DistributedDataParallel(copy.deepcopy(stock.module), overlap_optimizers=True)
        optimizer = ours.overlap(OPTIMIZERS["adamw"](ours.parameters()))
        train(stock, theirs, 4)
        train(ours, optimizer, 4)
        try:
            DistributedDataParallel(Plain(), compression="bfloat16")
            compression = ""
        except UserError as error:
            compression = str(error)
    return {
        "differing": differing(ours.module, stock.module),
        "phase": ours.phase,
        "deferred": "step" in vars(optimizer),
        "said": said,
        "compression": compression,
    }


def refuses_under(version: str) -> list[str]:
    """Return what the constructor and ``convert`` say."""
    messages = []
    stock = TorchDDP(Plain())
    with mock.patch.object(torch, "__version__", version):
        for wrap in (
            lambda: DistributedDataParallel(Plain()),
            lambda: DistributedDataParallel.convert(stock),
        ):
            try:
                wrap()
            except UserError as error:
                messages.append(str(error))
    return messages


def refuses_on_one(version: str) -> str:
    """Return what all ranks say where rank 1 has another torch."""
    known = version if dist.get_rank() == 1 else torch.__version__
    try:
        with mock.patch.object(torch, "__version__", known):
            DistributedDataParallel(Plain())
    except UserError as error:
        return str(error)
    return ""
