"""Trains with the Trainer: ``run_transformers.py FOLDER KIND...``, under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from syncline.integrations.transformers import SynclineCallback
from syncline.torch_private import uncompiled
from tests.adoption.outcome import Overlapping, planned, train_all, write

WORDS, LENGTH = 64, 24


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.overlapping = Overlapping()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.overlapping.note(self.trainer.model_wrapped)


def train(kind: str, which: str, folder: Path) -> None:
    for name in ("MIXED_PRECISION", "DYNAMO_BACKEND"):  # transformers 4 leaves them behind
        os.environ.pop(f"ACCELERATE_{name}", None)
    torch.manual_seed(0)
    layers = 2 - (kind == "compiled")  # to compile one takes seconds
    size: Any = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, n_layer=layers))
    # 40 to 60 steps. A plan for what is measured runs after 32 of them at most.
    lines = {"checkpointed": 480, "compiled": 320}.get(kind, 800)
    words = torch.randint(WORDS, (lines, LENGTH), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": line, "labels": line} for line in words]
    options: dict[str, Any] = {"max_grad_norm": 100.0, "gradient_accumulation_steps": 2}
    if kind == "checkpointed":
        options = {"max_grad_norm": 100.0, "gradient_checkpointing": True, "bf16": True}
    if kind == "compiled":
        options = {"torch_compile": True, "torch_compile_backend": "eager"}
    shard = kind.startswith("sharded")
    watch = Watch()
    trainer = Trainer(
        model=model,
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=[watch],
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            eval_strategy="no" if kind == "compiled" else "steps",
            eval_steps=20,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
    )
    watch.trainer = trainer
    if which == "syncline":
        # Checkpointing changes the order in which gradients become ready, so that is measured.
        measured = {"planner": "tictac", "check": False}
        options = measured if kind == "checkpointed" else planned(model)
        trainer.add_callback(SynclineCallback(trainer, shard=shard, **options))
    saved = folder.parents[1] / kind.removesuffix(" resumed") / which / "checkpoint-10"
    trainer.train(resume_from_checkpoint=str(saved) if kind.endswith("resumed") else None)
    wrapper = type(uncompiled(trainer.model_wrapped)).__module__
    noted = {"wrapper": wrapper, "steps": trainer.state.global_step}
    write(folder, trainer.args.process_index, model, watch.overlapping, **noted)


if __name__ == "__main__":
    train_all(train)
