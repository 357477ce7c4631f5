"""Collectives simulated transfer by transfer, for 4 to 1,024 ranks: time, memory, and the formulas.

Also what contention does to them on two hosts of four ranks, and how the linear pipeline's cost
depends on the number of ranks. All costs are predictions; only times and memory are measured.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Any

import msgspec
from reproduce.chunks import TransferOrder, simulate_chunks
from reproduce.fabric import Fabric, FabricWire, Slowdown
from reproduce.paper_costs import pipeline_curve
from rich.console import Console
from rich.table import Table

from benchmarks.own_memory import memory_bytes, reset_peak
from syncline.comm.collectives import PROGRAMS, Pipelined, Schedule, best_blocks, program
from syncline.plan.collective_costs import all_reduce_line

RUNS = 5
MIB = 1024 * 1024
ALGORITHMS = (
    "binary-tree",
    "recursive-doubling",
    "halving-doubling",
    "ring",
    "double-binary-trees",
    "linear-pipeline",
)
RANKS = (4, 16, 64, 256, 1024)
SIZE_BYTES = 64 << 20
# 10 Gbit/s with 20 us of latency; memory adds eight times as fast.
ALPHA_S, BETA_S_PER_BYTE, GAMMA_S_PER_BYTE = 20e-6, 8e-10, 1e-10
WIRE = FabricWire(alpha_s=ALPHA_S, beta_s_per_byte=BETA_S_PER_BYTE)
COSTS = {
    "alpha_s": ALPHA_S,
    "beta_s_per_byte": BETA_S_PER_BYTE,
    "gamma_s_per_byte": GAMMA_S_PER_BYTE,
}


def all_reduce(algorithm: str, ranks: int) -> Schedule:
    """Return the program, cut into the best number of blocks where it is pipelined."""
    if not isinstance(PROGRAMS["all-reduce"][algorithm], Pipelined):
        return program("all-reduce", algorithm, ranks)
    blocks = best_blocks(
        "all-reduce",
        algorithm,
        ranks,
        size_bytes=SIZE_BYTES,
        alpha_s=ALPHA_S,
        beta_s_per_byte=BETA_S_PER_BYTE,
    )
    return program("all-reduce", algorithm, ranks, blocks=blocks)


def formula_s(algorithm: str, ranks: int, blocks: int) -> float:
    """Return the analytic cost; of the double trees the corrected row of Table 2."""
    if algorithm == "linear-pipeline":
        curve = pipeline_curve(
            "all-reduce", ranks, *COSTS.values(), block_bytes=SIZE_BYTES // blocks
        )
    else:
        row = "two-tree" if algorithm == "double-binary-trees" else algorithm
        curve = all_reduce_line(row, workers=ranks, **COSTS)
    return curve.seconds(SIZE_BYTES)


def measure(case: tuple[str, int]) -> dict[str, Any]:
    """Simulate one program in a process of its own, so that its memory is its own."""
    algorithm, ranks = case
    reset_peak()
    start_mib = memory_bytes("VmHWM") / MIB
    fabric = Fabric.flat(ranks, **COSTS)
    build_s, simulate_s = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        schedule = all_reduce(algorithm, ranks)
        built = time.perf_counter()
        times = simulate_chunks(schedule, fabric, size_bytes=SIZE_BYTES)
        build_s.append(built - start)
        simulate_s.append(time.perf_counter() - built)
    most_mib = memory_bytes("VmHWM") / MIB
    queued = simulate_chunks(schedule, fabric, size_bytes=SIZE_BYTES, order="program")
    analytic_s = formula_s(algorithm, ranks, schedule.blocks)
    return {
        "algorithm": algorithm,
        "ranks": ranks,
        "blocks": schedule.blocks,
        "transfers": len(schedule),
        "predicted_s": times.total_s,
        "predicted_in_program_order_s": queued.total_s,
        "formula_s": analytic_s,
        "difference": times.total_s / analytic_s - 1,
        "difference_in_program_order": queued.total_s / analytic_s - 1,
        "build_s": build_s,
        "simulate_s": simulate_s,
        "start_mib": start_mib,
        "peak_mib": most_mib,
    }


def scale(console: Console) -> list[dict[str, Any]]:
    table = Table(title=f"{SIZE_BYTES >> 20} MiB on a flat fabric; differences to the formula")
    table.add_column("program")
    for column in ("ranks", "blocks", "transfers", "predicted", "formula", "difference"):
        table.add_column(column, justify="right")
    for column in ("in order", "build", "simulate", "peak"):
        table.add_column(column, justify="right")
    cases = [(name, ranks) for name in ALGORITHMS for ranks in RANKS]
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, cases, chunksize=1):
            rows.append(row)
            table.add_row(
                row["algorithm"],
                f"{row['ranks']:,}",
                f"{row['blocks']:,}",
                f"{row['transfers']:,}",
                f"{row['predicted_s'] * 1e3:.2f} ms",
                f"{row['formula_s'] * 1e3:.2f} ms",
                f"{row['difference']:+.1e}",
                f"{row['difference_in_program_order']:+.1e}",
                f"{statistics.median(row['build_s']):.3f} s",
                f"{statistics.median(row['simulate_s']):.3f} s",
                f"{row['peak_mib']:.0f} MiB",
            )
    console.print(table)
    return rows


def contention(console: Console) -> list[dict[str, Any]]:
    shared = Fabric.of_hosts(2, 4, inside=WIRE, between=WIRE, gamma_s_per_byte=GAMMA_S_PER_BYTE)
    fabrics = {
        "flat": Fabric.flat(8, **COSTS),
        "two hosts": shared,
        "ranks mixed": msgspec.structs.replace(shared, hosts=(0, 1) * 4),
        "rank 3 sends 4x slower": msgspec.structs.replace(
            Fabric.flat(8, **COSTS), slowdowns=(Slowdown(source=3, factor=4),)
        ),
    }
    table = Table(title="8 ranks: a shared network card a host, and a straggling link")
    table.add_column("program")
    for name in fabrics:
        table.add_column(name, justify="right")
    rows = []
    for algorithm in ALGORITHMS:
        schedule = all_reduce(algorithm, 8)
        predicted_s = {
            name: simulate_chunks(schedule, fabric, size_bytes=SIZE_BYTES).total_s
            for name, fabric in fabrics.items()
        }
        rows.append({"algorithm": algorithm, "predicted_s": predicted_s})
        table.add_row(algorithm, *(f"{s * 1e3:.1f} ms" for s in predicted_s.values()))
    console.print(table)
    return rows


def linear_pipeline(console: Console) -> list[dict[str, Any]]:
    """Linear-pipeline, Fig. 4: the cost hardly depends on the number of ranks."""
    block_bytes = 64 << 10  # section 3.2
    rows = []
    table = Table(title="linear pipeline, blocks of 64 KiB, 64 MiB")
    for column in ("ranks", "predicted", "ring", "recursive doubling"):
        table.add_column(column, justify="right")
    order: TransferOrder = "program"
    for ranks in (2, 3, 4, 6, 8, 16, 32, 64):
        fabric = Fabric.flat(ranks, **COSTS)
        predicted_s = {
            schedule.algorithm: simulate_chunks(
                schedule, fabric, size_bytes=SIZE_BYTES, order=order
            ).total_s
            for schedule in (
                program("all-reduce", "linear-pipeline", ranks, blocks=SIZE_BYTES // block_bytes),
                program("all-reduce", "ring", ranks),
                program("all-reduce", "recursive-doubling", ranks),
            )
        }
        rows.append({"ranks": ranks, "block_bytes": block_bytes, "predicted_s": predicted_s})
        table.add_row(str(ranks), *(f"{s * 1e3:.1f} ms" for s in predicted_s.values()))
    console.print(table)
    return rows


def main() -> None:
    # Not at the top: it loads torch, which the measured processes would count as theirs.
    from benchmarks.common import save

    console = Console(width=140)
    results = {
        "size_bytes": SIZE_BYTES,
        **COSTS,
        "scale": scale(console),
        "contention": contention(console),
        "linear_pipeline": linear_pipeline(console),
    }
    save("chunk_simulation", results)


if __name__ == "__main__":
    main()
