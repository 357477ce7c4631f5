"""Linear-pipeline's Table 2: how an iteration divides, for three algorithms x LP, MST and BE.

AlexNet in its full size (61.1 million parameters, 244 MB; the paper's is 256 MB) is trained by four
ranks on this host, with SGD and momentum as in the paper. Images are small and batches too, so that
an iteration computes for about as long as it does there, on cores that the ranks share.

The nine cells take turns: in each round every cell builds the model anew, warms up and trains a few
iterations. A figure is the median over rounds of a round's medians, of the root: seconds for which
it waited for communication, and the rest of the iteration. Where ranks share cores, one rank waits
while another computes, so "comm" holds more than transfers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reproduce.bsp.wrapper import WARM_UP_ITERATIONS
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, median, save
from reproduce.bsp import BspSgd, IterationProfile
from syncline.comm.groups import Group
from syncline.lab.training.models.vision import AlexNet

mpl.use("Agg")
from matplotlib import pyplot as plt

RANKS = 4
ROUNDS = 5
ITERATIONS = 2
"""Profiled in each turn."""
IMAGE_SIZE = 64
CLASSES = 1000
BATCH = 16
FAMILIES = {
    "MST": "minimum-spanning-tree",
    "BE": "bidirectional-exchange",
    "LP": "linear-pipeline",
}
CELLS = [(family, algorithm) for family in FAMILIES for algorithm in (1, 2, 3)]
COLOURS = {"comm": "#d95f02", "compt": "#7f7f7f"}


def train(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """Train every cell in every round; the root writes what it found."""
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    group = Group(store, rank, ranks)
    torch.manual_seed(rank)
    images = torch.randn(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(CLASSES, (BATCH,))
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for family, algorithm in CELLS:
            profile = turn(group, FAMILIES[family], algorithm, images, labels)
            name = f"{family} Alg.{algorithm}"
            found.setdefault(name, []).append(
                {"comm_s": profile.communication_s, "compt_s": profile.computation_s}
            )
            if rank == 0:
                print(f"{name}: {found[name][-1]}", flush=True)
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    group.close()


def turn(
    group: Group, family: str, algorithm: int, images: torch.Tensor, labels: torch.Tensor
) -> IterationProfile:
    """Train a new model by one cell; return this rank's profile."""
    module = AlexNet(IMAGE_SIZE, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)
    model = BspSgd(module, optimizer, group, algorithm=algorithm, collectives=family)
    for _ in range(WARM_UP_ITERATIONS + ITERATIONS):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    profile = model.iteration_profile
    assert profile is not None
    return profile


def draw(rows: list[tuple[str, IterationProfile]], path: Path) -> None:
    """Draw a bar a cell: computation, and on it what it waits for."""
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    for place, (_, row) in enumerate(rows):
        axes.bar(place, row.computation_s, color=COLOURS["compt"])
        axes.bar(
            place, row.communication_s, bottom=row.computation_s, color=COLOURS["comm"], zorder=2
        )
        axes.text(
            place,
            row.computation_s + row.communication_s,
            f"{row.communication_share * 100:.0f} %",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axes.set_xticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.set_ylabel("seconds an iteration")
    axes.set_title(
        f"AlexNet (244 MB), {RANKS} ranks on {os.cpu_count()} cores: communication that "
        "computation waits for",
        loc="left",
        fontsize=10,
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles,
        ["communication", "computation"],
        frameon=False,
        ncols=2,
        loc="outside lower center",
        fontsize=9,
    )
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def profile_table(rows: list[tuple[str, IterationProfile]]) -> str:
    """Return a table as in linear-pipeline's Table 2, a line each."""
    lines = [f"{'':<16}{'comm':>12}{'compt':>12}{'%':>8}"]
    for name, row in rows:
        lines.append(
            f"{name:<16}{row.communication_s * 1e3:>9.2f} ms{row.computation_s * 1e3:>9.2f} ms"
            f"{row.communication_share * 100:>8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args().rounds
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (RANKS, rounds, folder), nprocs=RANKS)
        found = torch.load(Path(folder) / "found")
    rows = [(name, summary(turns)) for name, turns in found.items()]
    print(profile_table(rows))
    draw(rows, RESULTS / "bsp_profile.png")
    cells: dict[str, Any] = {
        name: {
            "comm_s": row.communication_s,
            "compt_s": row.computation_s,
            "comm_share": row.communication_share,
            "rounds": found[name],
        }
        for name, row in rows
    }
    save(
        "bsp_profile",
        {
            "model": f"AlexNet, {IMAGE_SIZE} x {IMAGE_SIZE} images, {BATCH} a rank",
            "ranks": RANKS,
            "rounds": rounds,
            "iterations_a_round": ITERATIONS,
            "seconds": time.perf_counter() - start,
            "cells": cells,
        },
    )


def summary(turns: list[dict[str, float]]) -> IterationProfile:
    """Return the medians over rounds."""
    return IterationProfile(
        communication_s=median([turn["comm_s"] for turn in turns]),
        computation_s=median([turn["compt_s"] for turn in turns]),
    )


if __name__ == "__main__":
    main()
