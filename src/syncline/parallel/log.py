"""What the wrapper says while it trains: on one rank, through ``logging``."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger("syncline")


def warn(text: str) -> None:
    """Log a warning on rank 0; the other ranks have the same reason to."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text)
