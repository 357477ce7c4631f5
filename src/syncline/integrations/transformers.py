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
        shard: whether each rank keeps the optimizer's state only for its share of the parameters.
            Checkpoints hold all of it: the trainer's ``_save_optimizer_and_scheduler``, which saves
            on rank 0, is replaced by one that first collects the state from all ranks.
        options: ``planner``, ``plan`` and so on of ``syncline.DistributedDataParallel``.
    """

    def __init__(self, trainer: Trainer, *, shard: bool = False, **options: Any) -> None:
        self._trainer = trainer
        self._shard = shard
        self._options = options
        if shard:
            self._save = trainer._save_optimizer_and_scheduler
            trainer._save_optimizer_and_scheduler = self._collect_and_save  # type: ignore[method-assign]

    @property
    def model(self) -> DistributedDataParallel | None:
        """The wrapped model while it trains; None in a single process."""
        model = uncompiled(self._trainer.model_wrapped)
        return model if isinstance(model, DistributedDataParallel) else None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Plan the model's exchange and overlap its optimizer.

        Raise UserError if several processes train, but not with torch's DistributedDataParallel.
        """
        wrapped = uncompiled(self._trainer.model_wrapped)
        if isinstance(wrapped, TorchDDP):
            if not isinstance(wrapped, DistributedDataParallel):
                DistributedDataParallel.convert(wrapped, **self._options).overlap(
                    kwargs["optimizer"], shard=self._shard
                )
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "the Trainer has not wrapped the model in DistributedDataParallel but in "
                f"{type(wrapped).__name__}; Syncline plans data-parallel training only, so train "
                "without FSDP and DeepSpeed, or without SynclineCallback"
            )

    def _collect_and_save(self, output_dir: str) -> None:
        model, optimizer = self.model, self._trainer.optimizer
        if model is None or optimizer is None:
            self._save(output_dir)
            return
        whole = model.full_state_dict(optimizer)  # on all ranks
        optimizer.state_dict = lambda: whole  # type: ignore[method-assign]
        try:
            self._save(output_dir)
        finally:
            del optimizer.state_dict

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Write the report."""
        model = self.model
        if model is not None and state.is_world_process_zero and args.output_dir is not None:
            model.save_report(Path(args.output_dir) / "syncline")
