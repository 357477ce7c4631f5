"""What gTop-k as published loses of the gradient, beside ours, over worker counts and densities.

The published rule, after the paper's description: workers select their k largest, a tree of merges
keeps the k largest of each sum (Algorithm 3), and every worker puts back what it sent and the final
mask lacks (Algorithm 4, line 10). A value that a merge drops, while its index survives through
another part of the tree, is in the mask: so it is neither delivered nor put back. Ours are run as
they are, with everything written for the wire and read.

Gradients are drawn anew in every step: what all workers have in common, and noise of each; with
"alike" 0 nothing is in common, with 0.5 half of the variance is. All are multiplied by a size for
each element that stays, log-normal, as layers and rows of a model differ. Residuals go on from step
to step. What is lost is what residuals and gradients add up to before an exchange, less what
residuals and what was delivered do after it; its magnitudes are added up over elements and steps,
and divided by those of everything that was sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.common import save
from benchmarks.sparse_world import run_in_one_process
from syncline.errors import InternalError
from syncline.train.sparse.algorithms import ALGORITHMS, Share
from syncline.train.sparse.memory import HostMemory, Tracked
from syncline.train.sparse.vector import Quota, SparseVector, merged
from syncline.train.sparse.wire import WireFormat

ELEMENTS = 100_000
STEPS = 10
WORKERS = (2, 4, 8, 16, 32, 64)
OTHER_WORKERS = (3, 6, 12, 24, 48)
"""No powers of two, for which the published tree is not defined."""
DENSITIES = (0.01, 0.001)
ALIKE = (0.0, 0.5)
SEED = 6
PUBLISHED = "published"
OURS = ("gtop-k", "gtop-k-butterfly")

Dense = NDArray[np.float32]
Exact = NDArray[np.float64]
Exchange = Callable[[list[SparseVector], Quota], tuple[SparseVector, list[SparseVector]]]
"""From what every worker sends to what is delivered, and what goes back to each."""


def published(sent: list[SparseVector], quota: Quota) -> tuple[SparseVector, list[SparseVector]]:
    """Exchange by Algorithm 3 and line 10 of Algorithm 4; the workers are a power of two."""
    held = list(sent)
    while len(held) > 1:
        held = [merged(a, b, quota)[0] for a, b in zip(held[::2], held[1::2], strict=True)]
    delivered = held[0]
    return delivered, [own.divided(delivered.indices)[1] for own in sent]


def ours(name: str) -> Exchange:
    """Return one of our exchanges."""

    def exchange(sent: list[SparseVector], quota: Quota) -> tuple[SparseVector, list[SparseVector]]:
        wire = WireFormat(k=quota.k, length=quota.length, precision="float32", digest=1)
        outcomes = run_in_one_process(
            ALGORITHMS[name],
            [Share(rank, len(sent), own, quota, "float32") for rank, own in enumerate(sent)],
            lambda contents: tuple(wire.read(wire.write(content)) for content in contents),
        )
        delivered = outcomes[0].delivered
        if not isinstance(delivered, SparseVector):
            raise InternalError(f"{name} refused: {delivered}")
        return delivered, [outcome.returned for outcome in outcomes]

    return exchange


def drawn(random: np.random.Generator, workers: int, alike: float, sizes: Dense) -> list[Dense]:
    """Return every worker's gradient of one step."""
    common = random.standard_normal(len(sizes), np.float32) * np.float32(alike**0.5)
    noise = np.float32((1 - alike) ** 0.5)
    return [
        (common + noise * random.standard_normal(len(sizes), np.float32)) * sizes
        for _ in range(workers)
    ]


def lost_share(
    exchange: Exchange, workers: int, density: float, alike: float, *, elements: int, steps: int
) -> float:
    """Return what is lost of everything that was sent, as a share of the magnitudes."""
    random = np.random.default_rng(SEED)
    sizes = random.lognormal(size=elements).astype(np.float32)
    k = max(1, round(density * elements))
    quota = Quota((elements,), (k,))
    residuals = [np.zeros(elements, np.float32) for _ in range(workers)]
    lost = sent_in_all = 0.0
    for _ in range(steps):
        gradients = drawn(random, workers, alike, sizes)
        before = total([residual + g for residual, g in zip(residuals, gradients, strict=True)])
        sent: list[SparseVector] = [
            taken(residual, gradient, k)
            for residual, gradient in zip(residuals, gradients, strict=True)
        ]
        delivered, returned = exchange(sent, quota)
        for residual, back in zip(residuals, returned, strict=True):
            residual[back.indices] += back.values
        after = total(residuals) + delivered.dense()
        lost += float(np.abs(before - after).sum())
        sent_in_all += sum(float(np.abs(own.values, dtype=np.float64).sum()) for own in sent)
    return lost / sent_in_all


def taken(residual: Dense, gradient: Dense, k: int) -> SparseVector:
    """Add a gradient to its residual and take the k largest out of it."""
    tracked = Tracked(torch.from_numpy(residual), torch.from_numpy(gradient))
    found = HostMemory().take([[tracked]], [k], momentum=0.0)
    assert isinstance(found, SparseVector), "a gradient or a residual is infinite or NaN"
    return found


def total(vectors: list[Dense]) -> Exact:
    """Return the sum, in float64."""
    found: Exact = np.sum(vectors, axis=0, dtype=np.float64)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    size = {"elements": given.elements, "steps": given.steps}
    rows = []
    for alike in ALIKE:
        for density in DENSITIES:
            for workers in sorted((*WORKERS, *OTHER_WORKERS)):
                row = {"alike": alike, "density": density, "workers": workers}
                if workers in WORKERS:
                    row[PUBLISHED] = lost_share(published, workers, density, alike, **size)
                row |= {n: lost_share(ours(n), workers, density, alike, **size) for n in OURS}
                rows.append(row)
                print(row, flush=True)
    show(rows)
    save("gtopk_loss", {**size, "seed": SEED, "rows": rows})


def show(rows: list[dict[str, float]]) -> None:
    table = Table(title="lost of what was sent")
    for column in ("alike", "density", "P", PUBLISHED, *OURS):
        table.add_column(column, justify="right")
    for row in rows:
        lost = [f"{row[name]:.2e}" if name in row else "" for name in (PUBLISHED, *OURS)]
        table.add_row(f"{row['alike']:g}", f"{row['density']:g}", f"{row['workers']:.0f}", *lost)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
