"""MG-WFBP, Table 2: what all-reduce algorithms cost, the formulas against programs that are run.

The programs of ``syncline.comm.collectives`` are simulated transfer by transfer. The double binary
trees are pipelined; their row has two errata, see ``syncline.plan.collective_costs``.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.chunks import simulate_chunks
from reproduce.common import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Result, figure, run
from reproduce.fabric import Fabric
from syncline.comm.collectives import best_blocks, program
from syncline.plan.collective_costs import all_reduce_line

NAME = "mgwfbp_table2"
WORKERS = (2, 4, 8, 16, 32, 64, 128)
SIZES = {"16 KiB": 16 << 10, "100 MB": 100_000_000}
ALPHA_S, BETA, GAMMA = 3.24e-5, 1.0507e-9, 0.0
"""Of cluster 1, from its ring: 0.972 ms / 30 latencies, 1.97 ns / (30/16) a byte; gamma in beta."""
ROWS = {
    "binary-tree": ("binary tree", GREY),
    "recursive-doubling": ("recursive doubling", ORANGE),
    "halving-doubling": ("halving/doubling", GREEN),
    "ring": ("ring", BLUE),
    "double-binary-trees": ("double binary trees, as printed (with alpha)", PURPLE),
    "two-tree": ("double binary trees, bytes corrected", RED),
}


def run_program(algorithm: str, workers: int, size_bytes: int) -> float | None:
    """Return the seconds of the program; None for the row whose bytes are not those it sends."""
    fabric = Fabric.flat(workers, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA)
    if algorithm == "two-tree":
        algorithm = "double-binary-trees"
        blocks = best_blocks(
            "all-reduce",
            algorithm,
            workers,
            size_bytes=size_bytes,
            alpha_s=ALPHA_S,
            beta_s_per_byte=BETA,
        )
        schedule = program("all-reduce", algorithm, workers, blocks=blocks)
        return simulate_chunks(schedule, fabric, size_bytes=size_bytes, order="program").total_s
    if algorithm == "double-binary-trees":
        return None
    schedule = program("all-reduce", algorithm, workers)
    return simulate_chunks(schedule, fabric, size_bytes=size_bytes).total_s


def compute() -> Result:
    """Evaluate the rows and run the programs."""
    sizes = {}
    for label, size_bytes in SIZES.items():
        rows: dict[str, list[Result]] = {}
        for algorithm in ROWS:
            cells = []
            for workers in WORKERS:
                line = all_reduce_line(
                    algorithm,
                    workers=workers,
                    alpha_s=ALPHA_S,
                    beta_s_per_byte=BETA,
                    gamma_s_per_byte=GAMMA,
                )
                cells.append(
                    {
                        "workers": workers,
                        "formula_s": line.seconds(size_bytes),
                        "program_s": run_program(algorithm, workers, size_bytes),
                    }
                )
            rows[algorithm] = cells
        sizes[label] = rows
    exact = ("binary-tree", "recursive-doubling", "halving-doubling", "ring")
    worst = max(
        abs(cell["program_s"] / cell["formula_s"] - 1)
        for rows in sizes.values()
        for algorithm in exact
        for cell in rows[algorithm]
    )
    return {
        "source": "MG-WFBP, Table 2; alpha and beta of its cluster 1",
        "sizes": sizes,
        "four_rows_worst": round(worst, 4),
    }


def draw(result: Result) -> Figure:
    """Draw formulas as lines and programs as dots."""
    made, axes = figure(1, 2, width=9.4, height=4.3)
    for axis, (label, rows) in zip(axes, result["sizes"].items(), strict=True):
        for algorithm, (name, colour) in ROWS.items():
            cells = rows[algorithm]
            dashed = algorithm == "double-binary-trees"
            axis.plot(
                WORKERS,
                [1e3 * c["formula_s"] for c in cells],
                "--" if dashed else "-",
                color=colour,
                label=name,
            )
            if cells[0]["program_s"] is not None:
                axis.plot(WORKERS, [1e3 * c["program_s"] for c in cells], "o", color=colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(WORKERS, [str(w) for w in WORKERS])
        axis.set_xlabel("workers")
        axis.set_ylabel("all-reduce, ms")
        axis.set_title(f"{label}, 10 Gbit/s: lines are Table 2, dots programs")
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(handles, names, loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
