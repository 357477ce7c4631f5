"""Linear-pipeline, Fig. 4: how costs grow with the number of workers, transfer by transfer.

The figure is a measurement on up to six GPUs without printed numbers. Here the programs run in the
simulator with the constants of section 3.2 on 2 to 64 ranks: where each rank has its own links, and
where four ranks share one link to the others, as GPUs behind one PCIe switch do (section 3.1).
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.chunks import simulate_chunks
from reproduce.common import GREY, PURPLE, RED, SKY, Result, figure, run
from reproduce.fabric import Fabric, FabricWire
from reproduce.pipeline_table1 import (
    ALGORITHMS,
    BETA,
    GAMMA,
    LINEAR_PIPELINE,
    TREE,
    make,
)
from syncline.comm.collectives import Collective, program

NAME = "pipeline_fig4"
RANKS = (2, 3, 4, 6, 8, 16, 32, 64)
COLLECTIVES: tuple[Collective, ...] = ("broadcast", "reduce", "all-reduce")
BLOCK_BYTES = 64 << 10
SIZE_BYTES = 256 << 20
"""AlexNet, by the caption of Table 2."""
BLOCK_COUNTS = (1, 16, 256, 4096)
ALPHA_S = 1e-7
"""Section 3.2, as are the block size and ``BETA``."""
A_SWITCH = 4
"""Ranks behind one."""
WIRE = FabricWire(alpha_s=ALPHA_S, beta_s_per_byte=BETA)


def own_links(ranks: int) -> Fabric:
    """Return ranks with a link each, both ways."""
    return Fabric.flat(ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA)


def shared_links(ranks: int) -> Fabric:
    """Return ranks behind switches, each of them with one link to the others."""
    return Fabric(
        hosts=tuple(rank // A_SWITCH for rank in range(ranks)),
        inside=WIRE,
        between=WIRE,
        gamma_s_per_byte=GAMMA,
        nic_s_per_byte=BETA,
    )


def seconds(collective: Collective, algorithm: str, fabric: Fabric, blocks: int) -> float:
    """Return how long a collective takes for a message of so many blocks."""
    schedule = make(collective, algorithm, fabric.ranks, blocks)
    return simulate_chunks(
        schedule, fabric, size_bytes=blocks * BLOCK_BYTES, order="program"
    ).total_s


def compute() -> Result:
    """Simulate all collectives, algorithms, fabrics and message sizes."""
    blocks = SIZE_BYTES // BLOCK_BYTES
    own = {
        collective: {
            algorithm: [seconds(collective, algorithm, own_links(p), blocks) for p in RANKS]
            for algorithm in ALGORITHMS
        }
        for collective in COLLECTIVES
    }
    shared = {
        algorithm: [seconds("broadcast", algorithm, shared_links(p), blocks) for p in RANKS]
        for algorithm in ALGORITHMS
    }
    by_blocks = {
        str(count): [seconds("broadcast", LINEAR_PIPELINE, own_links(p), count) for p in RANKS]
        for count in BLOCK_COUNTS
    }
    return {
        "source": "linear-pipeline, Fig. 4 and sections 3.1, 3.2",
        "alpha_s": ALPHA_S,
        "beta_s_per_byte": BETA,
        "gamma_s_per_byte": GAMMA,
        "block_bytes": BLOCK_BYTES,
        "size_bytes": SIZE_BYTES,
        "ranks": list(RANKS),
        "own_links_s": own,
        "shared_links_broadcast_s": shared,
        "pipeline_broadcast_by_blocks_s": by_blocks,
        "tree_steps_of_2_to_6": [program("broadcast", TREE, p).steps for p in range(2, 7)],
    }


def draw(result: Result) -> Figure:
    """Draw costs over ranks: own links, a shared one, and the pipeline by message size."""
    made, axes = figure(2, 2, width=9.4, height=6.6, sharex=True)
    ranks = result["ranks"]
    panels = {
        "broadcast of 256 MiB, a link for each rank": result["own_links_s"]["broadcast"],
        "all-reduce of 256 MiB, a link for each rank": result["own_links_s"]["all-reduce"],
        "broadcast of 256 MiB, a link for every four ranks": result["shared_links_broadcast_s"],
    }
    for axis, (title, rows) in zip(axes, panels.items(), strict=False):
        for algorithm, (name, colour) in ALGORITHMS.items():
            axis.plot(ranks, rows[algorithm], "-o", color=colour, label=name)
        axis.set_title(title)
        axis.set_ylabel("s")
        axis.set_ylim(bottom=0)
    relative = axes[3]
    for (count, costs), colour in zip(
        result["pipeline_broadcast_by_blocks_s"].items(), (RED, PURPLE, SKY, GREY), strict=True
    ):
        relative.plot(ranks, [cost / costs[0] for cost in costs], "-o", color=colour, label=count)
    relative.set_yscale("log", base=2)
    relative.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    relative.set_title("linear pipeline, broadcast: times the cost of two ranks")
    relative.legend(title="blocks of 64 KiB")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
        axis.minorticks_off()
    for axis in axes[2:]:
        axis.set_xlabel("workers")
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(handles, names, loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
