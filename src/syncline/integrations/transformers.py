"""The Hugging Face Trainer: a callback that lets it exchange gradients by plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from syncline.errors import UserError
from syncline.torch_private import uncompiled
from syncline.train.ddp import DistributedDataParallel


class SynclineCallback(TrainerCallback):
    """``trainer.add_callback(SynclineCallback(trainer))`` trains with Syncline.

    The model is planned and its optimizer overlapped before the first step. At the end rank 0
    writes the report into ``syncline`` in the Trainer's ``output_dir``.

    Args:
        trainer: of several processes, with torch's DistributedDataParallel (the Trainer's default).
        options: ``planner``, ``plan`` and so on of ``syncline.DistributedDataParallel``.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer = trainer
        self._options = options

    @property
    def model(self) -> DistributedDataParallel | None:
        """The wrapped model while it trains; None in a single process."""
        model = uncompiled(self._trainer.model_wrapped)
        return model if isinstance(model, DistributedDataParallel) else None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Plan the model's exchange and overlap its optimizer.

        Raises:
            UserError: several processes train otherwise than with torch's class.
        """
        wrapped = uncompiled(self._trainer.model_wrapped)
        if isinstance(wrapped, TorchDDP):
            if not isinstance(wrapped, DistributedDataParallel):
                DistributedDataParallel.convert(wrapped, **self._options).overlap(
                    kwargs["optimizer"]
                )
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "the Trainer has not wrapped the model in DistributedDataParallel but in "
                f"{type(wrapped).__name__}; Syncline plans data-parallel training only, so train "
                "without FSDP and DeepSpeed, or without SynclineCallback"
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Write the report."""
        model = self.model
        if model is not None and state.is_world_process_zero and args.output_dir is not None:
            model.save_report(Path(args.output_dir) / "syncline")
