"""Train with Lightning on scanned digits, two processes on this machine.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/train_lightning.py [FOLDER]

The report is in FOLDER/lightning_logs/version_0/syncline.
"""

import sys

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline.integrations.lightning  # noqa: F401 - makes strategy="syncline" known


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))

    def training_step(self, batch, _):
        """Return the loss."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        """Log the accuracy."""
        images, labels = batch
        right = self.net(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        """Return the optimizer; the strategy overlaps it."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
train, test = (
    torch.utils.data.Subset(data, range(1437)),
    torch.utils.data.Subset(data, range(1437, 1797)),
)
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
trainer = lightning.Trainer(
    strategy="syncline",  # was "ddp"
    accelerator="cpu",
    devices=2,
    max_epochs=8,
    gradient_clip_val=1.0,
    logger=CSVLogger(folder),
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(train, 32, shuffle=True), DataLoader(test, 64))
if trainer.is_global_zero:
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.1%}")
    print(f"{trainer.logger.log_dir}/syncline/report.html")
