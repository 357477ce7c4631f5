"""Messages of the wrapper during training: from one rank, through ``logging``."""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

logger = logging.getLogger("syncline")


def warn(text: str) -> None:
    """Log a warning on rank 0; the other ranks would log the same."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text)


def announce(text: str) -> None:
    """Show the user a message; call on one rank.

    If the program has not configured ``logging``, which then shows only warnings, the text is
    printed to standard error. A handler, a level of the logger ``syncline`` or ``logging.disable``
    counts as configuration.
    """
    unset = logger.level == logging.NOTSET and logger.manager.disable < logging.INFO
    if logger.hasHandlers() or not unset:
        logger.info(text)
    else:
        print(f"syncline: {text}", file=sys.stderr, flush=True)
