"""Train a small network on scanned digits with two processes on this machine.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/train_minimal.py [FOLDER]

Writes the report into FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import syncline

STEPS = 500
BATCH = 64

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
mine = torch.arange(rank, len(labels) // 5 * 4, workers)  # the last fifth is for testing
test = torch.arange(len(labels) // 5 * 4, len(labels))

torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU()]
layers += [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
model = syncline.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = model.overlap(optimizer)

torch.manual_seed(1 + rank)
for _ in range(STEPS):
    batch = mine[torch.randint(len(mine), (BATCH,))]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()

if rank == 0:
    with torch.no_grad():
        right = model.module(images[test]).argmax(1) == labels[test]
    print(f"{model.phase}: test accuracy {right.float().mean():.1%}")
    print(model.save_report(sys.argv[1] if len(sys.argv) > 1 else "runs/minimal"))
dist.barrier()
dist.destroy_process_group()
