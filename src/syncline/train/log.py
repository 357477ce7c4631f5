"""What the wrapper says while it trains: on one rank, through ``logging``."""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

logger = logging.getLogger("syncline")


def warn(text: str) -> None:
    """Log a warning on rank 0; the other ranks have the same reason to."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text)


def announce(text: str) -> None:
    """Tell this rank's user something; call on one rank.

    Without any configuration ``logging`` shows warnings only. So where the program has configured
    none, the text goes to standard error by itself. A handler, a level of the logger ``syncline``
    or ``logging.disable`` decides otherwise.
    """
    unset = logger.level == logging.NOTSET and logger.manager.disable < logging.INFO
    if logger.hasHandlers() or not unset:
        logger.info(text)
    else:
        print(f"syncline: {text}", file=sys.stderr, flush=True)
