"""BSP-SGD where computing is waiting: the overlap that linear-pipeline claims.

A network of equal layers is trained on emulated hosts with a link each. Its layers only wait, so no
rank takes another's processor, and they wait as long as one reduce and one broadcast of all weights
take at the rate of the links: where hiding one behind the other can gain most. In each round all
cells take a turn, of an unmeasured iteration and a few measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed import TCPStore

from benchmarks.common import median, save
from reproduce.bsp import BspSgd
from syncline.comm.groups import Group
from syncline.lab.processes import run_folder
from syncline.lab.testbed import Cluster, Testbed

HOSTS, RATE = 4, "200mbit"
LAYERS, LAYER_BYTES = 12, 1 << 20
FAMILY = "linear-pipeline"
ROUNDS, ITERATIONS, WARM_UP = 5, 2, 1
TIMEOUT_S = 230.0


class Cell(NamedTuple):
    """What takes a turn."""

    algorithm: int | None
    """Of linear-pipeline, section 3.3; None: one rank's computing alone, without an exchange."""
    forward: float
    """Of the forward pass, as a share of the time that one reduce of all gradients takes."""
    backward: float


EVEN = (1.0, 1.0)
USUAL = (2 / 3, 4 / 3)
"""A backward pass mostly takes twice as long as the forward pass."""
CELLS = (
    Cell(None, *EVEN),
    *(Cell(algorithm, *passes) for algorithm in (1, 2, 3) for passes in ((0.0, 0.0), EVEN)),
    Cell(1, *USUAL),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, help="work as a rank; rank 0 writes here")
    to: Path | None = parser.parse_args().to
    cluster = Cluster.of(hosts=HOSTS, rate=RATE)
    assert cluster.rate_bytes_per_s is not None
    one_way_s = LAYERS * LAYER_BYTES / cluster.rate_bytes_per_s
    if to is not None:
        work(one_way_s, to)
        return
    with run_folder() as folder, Testbed(cluster) as bed:
        found = folder / "found.json"
        command = [sys.executable, "-m", "benchmarks.bsp_hosts", "--to", str(found)]
        result = bed.run(command, timeout_s=TIMEOUT_S)
        if not found.exists():
            raise SystemExit(f"the ranks failed: {''.join(result.stderr)}")
        measured = json.loads(found.read_text())
    for row in measured:
        each_s = row["rounds_s"]
        print(
            f"algorithm {row['algorithm']}, passes {row['forward']:.2f} and {row['backward']:.2f}: "
            f"{median(each_s):.3f} s ({min(each_s):.3f} to {max(each_s):.3f})"
        )
    save(
        "bsp_hosts",
        {
            "hosts": HOSTS,
            "rate": RATE,
            "rate_bytes_per_s": cluster.rate_bytes_per_s,
            "layers": LAYERS,
            "layer_bytes": LAYER_BYTES,
            "collectives": FAMILY,
            "one_way_s": one_way_s,
            "iterations": ITERATIONS,
            "measured": measured,
        },
    )


def work(one_way_s: float, to: Path) -> None:
    """Let all cells take turns; rank 0 writes the seconds of an iteration in every round."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    place = os.environ
    rank, ranks = int(place["RANK"]), int(place["WORLD_SIZE"])
    store = TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), ranks, rank == 0)
    group = Group(store, rank, ranks, choices="built-in")
    found: dict[Cell, list[float]] = {cell: [] for cell in CELLS}
    for number in range(ROUNDS):
        first = number % len(CELLS)
        for cell in (*CELLS[first:], *CELLS[:first]):
            found[cell].append(_turn(cell, one_way_s, group))
    if rank == 0:
        rows = [{**cell._asdict(), "rounds_s": rounds_s} for cell, rounds_s in found.items()]
        to.write_text(json.dumps(rows))
    group.close()


def _turn(cell: Cell, one_way_s: float, group: Group) -> float:
    """Train a new network; return the seconds of an iteration."""
    passes_s = [share * one_way_s / LAYERS for share in (cell.forward, cell.backward)]
    module = nn.Sequential(*(Waiting(*passes_s) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model: nn.Module = module
    if cell.algorithm is not None:
        model = BspSgd(module, optimizer, group, algorithm=cell.algorithm, collectives=FAMILY)
    start = 0.0
    for iteration in range(WARM_UP + ITERATIONS):
        if iteration == WARM_UP:
            start = time.perf_counter()
        optimizer.zero_grad()
        model(torch.zeros((), requires_grad=True)).backward()
        optimizer.step()
    return (time.perf_counter() - start) / ITERATIONS


class Waiting(nn.Module):
    """A layer that waits in both passes, and whose weights have a gradient.

    Args:
        forward_s: how long it waits in the forward pass.
        backward_s: in the backward pass.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LAYER_BYTES // 4))
        self.gradient = torch.ones(LAYER_BYTES // 4)
        self.waits_s = forward_s, backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, after the wait."""
        weight = self.weight.view_as(self.weight)  # an operation that reads it, for BSP-SGD to see
        outputs: Tensor = _Wait.apply(inputs, weight, self)  # type: ignore[no-untyped-call]
        return outputs


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, layer: Waiting) -> Tensor:
        del weight
        ctx.layer = layer
        time.sleep(layer.waits_s[0])
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.layer.waits_s[1])
        return gradient, ctx.layer.gradient.clone(), None


if __name__ == "__main__":
    main()
