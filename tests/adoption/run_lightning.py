"""Trains with Lightning: ``run_lightning.py FOLDER KIND...``, under torchrun."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.lightning import SynclineStrategy
from tests.adoption.outcome import Overlapping, planned, train_all, write

WIDTH = 48


class Plain(lightning.LightningModule):
    """One optimizer, a validation loop, a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("checked", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Silent(Plain):
    """Logs nothing in what is compiled: torch's compiler does not take Lightning's ``log``."""

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.net(batch[0])


class Manual(Plain):
    """Two optimizers that it steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        one, other = parameters[:4], parameters[4:]
        return torch.optim.SGD(one, lr=0.1, momentum=0.9), torch.optim.Adam(other, lr=0.01)


class Watch(lightning.Callback):
    def __init__(self) -> None:
        self.overlapping = Overlapping()
        self.kind = ""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.overlapping.note(trainer.strategy.model)
        self.kind = type(trainer.strategy.model).__module__


def train(kind: str, which: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = {"manual": Manual, "compiled": Silent}.get(kind, Plain)()
    shard = kind.startswith("sharded")
    strategy: Any = "ddp"
    if which == "syncline":
        strategy = SynclineStrategy(**planned(model), shard=shard)
    data = TensorDataset(torch.randn({"swa": 640, "averaging": 960}.get(kind, 1600), WIDTH))
    watch = Watch()
    callbacks: list[Any] = [watch]
    options: dict[str, Any] = {"max_epochs": 1}
    if kind.startswith("automatic") or shard:
        options |= {"gradient_clip_val": 100.0, "val_check_interval": 20}
        options["max_epochs"] = 2 if kind.endswith("resumed") else 1
        callbacks.append(ModelCheckpoint(folder, filename="saved", save_on_train_epoch_end=True))
    if kind == "accumulating":
        options |= {"accumulate_grad_batches": 2, "val_check_interval": 20, "max_epochs": 2}
    if kind == "averaging":
        options |= {"max_epochs": 2}
        callbacks += [EMAWeightAveraging(decay=0.9)]
    if kind == "swa":
        options |= {"max_epochs": 3}
        callbacks += [StochasticWeightAveraging(0.005, swa_epoch_start=2, annealing_epochs=1)]
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=CSVLogger(folder),
        callbacks=callbacks,
        log_every_n_steps=20,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    batches, check = DataLoader(data, 16), DataLoader(TensorDataset(data.tensors[0][:64]), 16)
    saved = folder.parents[1] / kind.removesuffix(" resumed") / which / "saved.ckpt"
    trained: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    trainer.fit(trained, batches, check, ckpt_path=saved if kind.endswith("resumed") else None)
    noted = {"wrapper": watch.kind, "steps": trainer.global_step}
    write(folder, trainer.global_rank, model, watch.overlapping, **noted)


if __name__ == "__main__":
    train_all(train)
