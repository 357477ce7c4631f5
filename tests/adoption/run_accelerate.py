"""Trains with Accelerate: ``run_accelerate.py FOLDER KIND...``, under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.accelerate import SynclineKwargs
from syncline.torch_private import uncompiled
from tests.adoption.outcome import Overlapping, planned, train_all, write

WIDTH = 48


class Net(nn.Module):
    """Equal blocks, which Accelerate can compile one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(kind: str, which: str, folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    handlers: list[Any] = [SynclineKwargs(**planned(model))] if which == "syncline" else []
    AcceleratorState._reset_state()  # so that each kind may have a compiler of its own
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=handlers,
        gradient_accumulation_steps=2,
        dynamo_plugin=TorchDynamoPlugin(
            backend="eager" if kind in ("compiled", "regional") else "no",
            use_regional_compilation=kind == "regional",
        ),
    )
    if kind == "scaled":  # as in fp16 on a GPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    data: Any = DataLoader(TensorDataset(torch.randn(3200, WIDTH)), batch_size=16)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    overlapping = Overlapping()
    for number, (x,) in enumerate(data):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                if accelerator.scaler is not None:  # clip_grad_norm_ does that in fp16
                    accelerator.scaler.unscale_(optimizer.optimizer)
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            schedule.step()
            overlapping.note(model)
            optimizer.zero_grad()
        if number == 61 and kind == "saved":
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder / "state"))
    wrapper = type(uncompiled(model)).__module__  # unwrap_model takes it out
    rank, net = accelerator.process_index, accelerator.unwrap_model(model)
    write(folder, rank, net, overlapping, wrapper=wrapper, steps=len(data) // 2)


if __name__ == "__main__":
    train_all(train)
