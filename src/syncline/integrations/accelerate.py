"""Hugging Face Accelerate: a handler that lets ``Accelerator`` exchange gradients by plan."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from syncline.errors import UserError
from syncline.train.ddp import DistributedDataParallel

DDP_ARGUMENTS = frozenset(DistributedDataParallelKwargs.__dataclass_fields__)


class SynclineKwargs(DistributedDataParallelKwargs):
    """``Accelerator(kwargs_handlers=[SynclineKwargs()])`` trains with Syncline.

    Accelerate wraps models as usual, and Syncline then plans them. Optimizers are overlapped at
    their first step.

    Args:
        arguments: those of Accelerate's ``DistributedDataParallelKwargs``, and ``planner``,
            ``plan`` and so on of ``syncline.DistributedDataParallel``.

    Raises:
        UserError: a communication hook is asked for: it would replace the planned exchange.
    """

    def __init__(self, **arguments: Any) -> None:
        ours = arguments.keys() - DDP_ARGUMENTS
        self.options = {"overlap_optimizers": True, **{name: arguments.pop(name) for name in ours}}
        super().__init__(**arguments)
        if self.comm_hook != DDPCommunicationHookType.NO:
            raise UserError(
                f"comm_hook={self.comm_hook.value!r} would replace the exchange that Syncline "
                "plans; leave it out, or give compression='bfloat16', 'float16' or 'int8'"
            )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return Accelerate's own class: it looks handlers up by class, and knows no other."""
        return DistributedDataParallelKwargs

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments for torch's class."""
        arguments: dict[str, Any] = super().to_dict(*args, **kwargs)
        del arguments["options"]
        return arguments

    def register_comm_hook(self, model: nn.Module) -> None:
        """Plan the model's exchange; Accelerate calls this when it has wrapped the model."""
        DistributedDataParallel.convert(model, **self.options)  # type: ignore[arg-type]
