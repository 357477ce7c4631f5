"""Trains with Accelerate: ``run_accelerate.py FOLDER KIND...``, under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.accelerate import SynclineKwargs
from tests.adoption.outcome import Overlapping, planned, train_all, write

WIDTH = 48


def train(kind: str, which: str, folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    handlers: list[Any] = [SynclineKwargs(**planned(model))] if which == "syncline" else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, gradient_accumulation_steps=2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    data: Any = DataLoader(TensorDataset(torch.randn(3200, WIDTH)), batch_size=16)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    overlapping = Overlapping()
    for number, (x,) in enumerate(data):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            schedule.step()
            overlapping.note(model)
            optimizer.zero_grad()
        if number == 61 and kind == "saved":
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder / "state"))
    write(
        folder,
        accelerator.process_index,
        accelerator.unwrap_model(model),
        wrapper=type(model).__module__,
        overlapped=overlapping.steps,
        steps=len(data) // 2,
    )


if __name__ == "__main__":
    train_all(train)
