"""Linear-pipeline, Table 1: what it prints, and what is counted from the programs.

Every cell is taken apart into what stands before alpha, beta n and gamma n, in exact fractions. The
programs of ``syncline.comm.collectives`` are costed step by step (``derived_cost``) and, for the
picture, simulated transfer by transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from matplotlib.figure import Figure

from reproduce.chunks import simulate_chunks
from reproduce.common import BLUE, GREEN, ORANGE, Result, figure, run
from reproduce.counted_cost import Cost, derived_cost
from reproduce.fabric import Fabric
from syncline.comm.collectives import Collective, Schedule, program
from syncline.plan.collective_costs import doubling_rounds

NAME = "pipeline_table1"
RANKS = range(2, 65)
"""Compared; of ``SHOWN`` everything is written down."""
SHOWN = (*range(2, 10), 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 48, 56, 63, 64)
BLOCKS = 16
"""n / b."""
SIZE_BYTES = 1 << 20
ALPHA_S, BETA, GAMMA = 1e-5, 1e-9, 1e-11
"""The paper's 10^9 bytes a second; a latency that shows; adding at the memory speed of a K40m."""

LINEAR_PIPELINE, TREE, EXCHANGE = (
    "linear-pipeline",
    "minimum-spanning-tree",
    "bidirectional-exchange",
)
ALGORITHMS = {
    LINEAR_PIPELINE: ("linear pipeline", BLUE),
    TREE: ("minimum spanning tree", ORANGE),
    EXCHANGE: ("bidirectional exchange", GREEN),
}


def _cost(latencies: int, transmitted: Fraction | int, added: Fraction | int) -> Cost:
    return Cost(latencies=latencies, transmitted=Fraction(transmitted), added=Fraction(added))


def _share(p: int) -> Fraction:
    return Fraction(p - 1, p)


PRINTED: dict[tuple[Collective, str], Callable[[int, int], Cost]] = {
    ("broadcast", EXCHANGE): lambda p, _: _cost(doubling_rounds(p) + p - 1, 2 * _share(p), 0),
    ("reduce", EXCHANGE): lambda p, _: _cost(2 * doubling_rounds(p), 2 * _share(p), _share(p)),
    ("all-reduce", EXCHANGE): lambda p, _: _cost(2 * doubling_rounds(p), 2 * _share(p), _share(p)),
    ("broadcast", TREE): lambda p, _: _cost(doubling_rounds(p), doubling_rounds(p), 0),
    ("reduce", TREE): lambda p, _: _cost(*[doubling_rounds(p)] * 3),
    ("all-reduce", TREE): lambda p, _: _cost(
        2 * doubling_rounds(p), 2 * doubling_rounds(p), doubling_rounds(p)
    ),
    ("broadcast", LINEAR_PIPELINE): lambda p, m: _cost(p - 1 + m, Fraction(p - 1, m) + 1, 0),
    ("reduce", LINEAR_PIPELINE): lambda p, m: _cost(
        p - 1 + m, Fraction(p - 1, m) + 1, Fraction(p - 1, m) + 1
    ),
    ("all-reduce", LINEAR_PIPELINE): lambda p, m: _cost(
        2 * (p - 1 + m), 2 * (Fraction(p - 1, m) + 1), Fraction(p - 1, m) + 1
    ),
}
"""The cells for p workers and m = n / b blocks; log p with the ceiling that the paper omits."""


def make(collective: Collective, algorithm: str, ranks: int, blocks: int) -> Schedule:
    """Return a program, cut into blocks where it is a pipeline."""
    cut = blocks if algorithm == LINEAR_PIPELINE else None
    return program(collective, algorithm, ranks, blocks=cut)


def _terms(cost: Cost) -> list[str]:
    return [str(cost.latencies), str(cost.transmitted), str(cost.added)]


def _seconds(schedule: Schedule) -> float:
    fabric = Fabric.flat(
        schedule.ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA
    )
    return simulate_chunks(schedule, fabric, size_bytes=SIZE_BYTES, order="program").total_s


def compute() -> Result:
    """Compare every cell for every number of ranks."""
    costs = {"alpha_s": ALPHA_S, "beta_s_per_byte": BETA, "gamma_s_per_byte": GAMMA}
    cells = []
    for (collective, algorithm), formula in PRINTED.items():
        rows, unequal = [], []
        for ranks in RANKS:
            printed = formula(ranks, BLOCKS)
            schedule = make(collective, algorithm, ranks, BLOCKS)
            found = derived_cost(schedule)
            if printed != found:
                unequal.append(ranks)
            if ranks in SHOWN:
                rows.append(
                    {
                        "ranks": ranks,
                        "printed": _terms(printed),
                        "derived": _terms(found),
                        "printed_s": printed.seconds(SIZE_BYTES, **costs),
                        "program_s": _seconds(schedule),
                    }
                )
        cells.append(
            {
                "collective": collective,
                "algorithm": algorithm,
                "equal_on_powers_of_two": not any(p & (p - 1) == 0 for p in unequal),
                "equal_on_all": not unequal,
                "rows": rows,
            }
        )
    # The row that the exchange's broadcast prints is another algorithm's.
    ring = all(
        derived_cost(program("broadcast", "scatter-ring", ranks))
        == PRINTED["broadcast", EXCHANGE](ranks, BLOCKS)
        for ranks in RANKS
    )
    return {
        "source": "linear-pipeline, Table 1",
        "blocks": BLOCKS,
        "size_bytes": SIZE_BYTES,
        "scatter_ring_is_the_printed_exchange_broadcast": ring,
        "steps_of_fig_2c": program("all-reduce", LINEAR_PIPELINE, 3, blocks=4).steps,
        "steps_of_fig_2a_and_2b": sum(
            program(collective, LINEAR_PIPELINE, 3, blocks=4).steps
            for collective in ("broadcast", "reduce")
        ),
        "cells": cells,
    }


def draw(result: Result) -> Figure:
    """Draw what is printed as lines and the programs as dots."""
    made, axes = figure(1, 3, width=11.2, height=4.2, sharey=True)
    for cell in result["cells"]:
        axis = axes[("broadcast", "reduce", "all-reduce").index(cell["collective"])]
        name, colour = ALGORITHMS[cell["algorithm"]]
        ranks = [row["ranks"] for row in cell["rows"]]
        printed, found = (
            [1e3 * row[key] for row in cell["rows"]] for key in ("printed_s", "program_s")
        )
        axis.plot(ranks, printed, color=colour, linewidth=1.2, label=name)
        axis.plot(ranks, found, "o", color=colour, markersize=2.6)
        axis.set_title(cell["collective"])
        axis.set_xlabel("workers")
        axis.set_xticks([2, 8, 16, 32, 48, 64])
        axis.set_ylim(0, 14)
    axes[0].set_ylabel("1 MiB, ms")
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(handles, names, loc="outside lower center", ncols=3)
    made.suptitle(
        "Lines: Table 1 as printed. Dots: the programs, simulated. 1 GB/s, 10 us, blocks of 64 KiB",
        x=0.01,
        ha="left",
        fontsize=9.5,
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
