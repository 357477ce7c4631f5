"""Train a small language model with the Hugging Face Trainer, two processes on this machine.

    OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 \
        examples/train_transformers.py [FOLDER]

The report is in FOLDER/syncline.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from syncline.integrations.transformers import SynclineCallback

LENGTH = 64

letters = torch.tensor(list(Path(__file__).read_bytes() * 40))
lines = letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)
torch.manual_seed(0)
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/transformers"
trainer = Trainer(
    model=GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4)
    ),
    train_dataset=[{"input_ids": line, "labels": line} for line in lines],
    args=TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=150,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    ),
)
trainer.add_callback(SynclineCallback(trainer))  # the only new line
trainer.train()
if trainer.is_world_process_zero():
    print(f"{trainer.model_wrapped.phase}: loss {trainer.state.log_history[-1]['train_loss']:.2f}")
    print(f"{folder}/syncline/report.html")
