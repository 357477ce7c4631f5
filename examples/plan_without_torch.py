"""Plan the gradient exchange of a model that is described by hand: no torch, no cluster.

    python examples/plan_without_torch.py [FOLDER]

The model is a stack of 24 equal blocks with four gradient tensors each, an embedding below and a
head above, which take 62 ms forward and 119 ms backward: made-up figures of a plausible size. The
network is the all-reduce line a + b M that MG-WFBP measured on 16 GPUs with 10 Gbit/s Ethernet
(Fig. 4). Writes profile.json, network.json and plan.json into FOLDER, for ``syncline simulate``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import syncline
from syncline import Gradient, Network, Operation, Profile

BLOCKS = 24
WIDTH = 512
BLOCK_TENSORS = {  # in the order in which backward makes them: elements
    "mlp.weight": 2 * WIDTH * WIDTH,
    "mlp.bias": WIDTH,
    "attention.weight": 4 * WIDTH * WIDTH,
    "norm.weight": WIDTH,
}


def described_profile() -> Profile:
    """Return one iteration on one worker: forward and backward block by block, update."""
    operations: list[Operation] = []
    forward = {"embedding": 1e-3, **{f"block{i}": 2.4e-3 for i in range(BLOCKS)}, "head": 3.4e-3}
    for layer, duration_s in forward.items():
        after = (len(operations) - 1,) if operations else ()
        operations.append(
            Operation(name=layer, phase="forward", duration_s=duration_s, after=after)
        )
    first_reader = {layer: index for index, layer in enumerate(forward)}
    gradients: list[Gradient] = []

    def backward(layer: str, tensor: str, duration_s: float, elements: int) -> None:
        before = len(operations) - 1
        name = f"{layer} {tensor}"
        operations.append(
            Operation(name=name, phase="backward", duration_s=duration_s, after=(before,))
        )
        gradients.append(
            Gradient(
                name=f"{layer}.{tensor}",
                elements=elements,
                ready_after=before + 1,
                needed_by=first_reader[layer],
            )
        )

    backward("head", "weight", 5e-3, 8_000 * WIDTH)
    for block in reversed(range(BLOCKS)):
        for tensor, elements in BLOCK_TENSORS.items():
            share = elements / sum(BLOCK_TENSORS.values())
            backward(f"block{block}", tensor, 4e-3 * share + 1.5e-4, elements)
    backward("embedding", "weight", 3.6e-3, 8_000 * WIDTH)
    operations.append(
        Operation(name="sgd", phase="update", duration_s=0.004, after=(len(operations) - 1,))
    )
    return Profile(
        model="24 blocks",
        device="cuda",
        workers=1,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def main(folder: Path) -> None:
    """Compare the planners, print the table, save what ``syncline simulate`` needs."""
    profile = described_profile()
    network = Network.line(workers=16, a_s=9.08e-4, b_s_per_byte=7.4e-10, name="10 Gbit/s")
    choice = syncline.choose(profile, network)
    print(f"{'planner':<10}{'iteration, ms':>14}{'messages':>10}{'exposed, ms':>13}")
    for row in sorted(choice.comparison.predictions, key=lambda row: row.iteration_s):
        print(
            f"{row.planner:<10}{row.iteration_s * 1e3:>14.1f}{row.messages:>10}"
            f"{row.exposed_s * 1e3:>13.1f}"
        )
    print(f"{choice.comparison.chosen}: {choice.comparison.reason}")
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / "profile.json")
    network.save(folder / "network.json")
    choice.plan.save(folder / "plan.json")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/described"))
