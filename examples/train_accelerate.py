"""Train with Accelerate on scanned digits, two processes on this machine.

    OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 \
        examples/train_accelerate.py [FOLDER]

Writes the report into FOLDER.
"""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.accelerate import SynclineKwargs

accelerator = Accelerator(kwargs_handlers=[SynclineKwargs()])  # the only new line

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
torch.manual_seed(0)
hidden = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = DataLoader(TensorDataset(images[:1437], labels[:1437]), 32, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for _ in range(6):
    for batch, targets in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

if accelerator.is_main_process:
    with torch.no_grad():
        right = accelerator.unwrap_model(model)(images[1437:]).argmax(1) == labels[1437:]
    print(f"{model.phase}: test accuracy {right.float().mean():.1%}")
    print(model.save_report(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"))
accelerator.end_training()
