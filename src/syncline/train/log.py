"""Messages of the wrapper during training: from one rank, through ``logging``."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist
from torch import nn


class _Named(logging.LoggerAdapter[logging.Logger]):
    """Begins messages with the logger's name, which many programs' formats leave out."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self.logger.name}: {msg}", kwargs


logger = _Named(logging.getLogger("syncline"), {})
_models: set[str] = set()  # the classes of the models that messages were about, in this process


def about(model: nn.Module, text: str) -> str:
    """Return a message about a model: with its class if this process trains several."""
    name = type(model).__name__
    _models.add(name)
    return text if len(_models) == 1 else f"{name}: {text}"


def warn(text: str) -> None:
    """Log a warning on rank 0; the other ranks would log the same."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s", text)


def announce(text: str) -> None:
    """Show the user a message; call on one rank.

    If the program has set no level or no handler for ``logging``, which then shows only warnings,
    the text is printed to standard error. The level of the logger ``syncline``, one of the root
    logger above the default, or ``logging.disable`` decides instead.
    """
    own = logger.logger
    unset = own.level == logging.NOTSET and own.manager.disable < logging.INFO
    above = own.getEffectiveLevel() - logging.WARNING
    if unset and (above == 0 or (above < 0 and not own.hasHandlers())):
        line = f"syncline: {text}"
        # A progress bar of tqdm leaves the cursor at its end: its own `write` goes above the bar.
        if (bar := getattr(sys.modules.get("tqdm"), "tqdm", None)) is not None:
            bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)
        sys.stderr.flush()
    else:
        logger.info("%s", text)
