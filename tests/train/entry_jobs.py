"""What the workers of ``tests/test_torch_entry.py`` run: training under another version of torch.

Only its number is another: what torch itself would do differently is not known.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.train.ddp import DistributedDataParallel
from tests.train.fault_jobs import error_of
from tests.train.jobs import OPTIMIZERS, Twins, differing
from tests.train.models import Plain


def under(version: str) -> Any:
    return mock.patch.object(torch, "__version__", version)


def trains_under(version: str) -> dict[str, Any]:
    said: list[str] = []
    torch.manual_seed(1)
    with under(version), mock.patch("syncline.train.planned_training.warn", said.append):
        twins = Twins(Plain(), OPTIMIZERS["adamw"], overlaps=True, overlap_optimizers=True)
        twins.train(4)
        _, refused = error_of(lambda: DistributedDataParallel(Plain(), compression="bfloat16"))
    return {
        "differing": differing(*twins.pairs),
        "phase": twins.ours.phase,
        "deferred": "step" in vars(twins.pairs[0][1]),
        "said": said,
        "compression": refused,
    }


def refuses_under(version: str) -> list[str]:
    stock = TorchDDP(Plain())
    with under(version):
        _, constructor = error_of(lambda: DistributedDataParallel(Plain()))
        _, convert = error_of(lambda: DistributedDataParallel.convert(stock))
    return [constructor, convert]


def refuses_on_one(version: str) -> str:
    """Return what all ranks say where rank 1 has another torch."""
    with under(version if dist.get_rank() == 1 else torch.__version__):
        return error_of(lambda: DistributedDataParallel(Plain()))[1]
