"""MG-WFBP, Fig. 5 and Table 4: how large gradient tensors are; PACE, Fig. 4 and Table II likewise.

Tensors follow from the architectures, so they are counted here; our own traces are counted too.
"""

from __future__ import annotations

import itertools
from collections import Counter

from matplotlib.figure import Figure

from reproduce.common import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Result, figure, run
from reproduce.inputs import CLUSTER_1, own_traces

NAME = "mgwfbp_fig5"
RESNETS = {"ResNet-50": (3, 4, 6, 3), "ResNet-152": (3, 8, 36, 3)}
DENSENETS = {
    "DenseNet-161": (48, 96, (6, 12, 36, 24)),
    "DenseNet-201": (32, 64, (6, 12, 48, 32)),
}
CLASSES = 1000
TABLE_4 = {
    "ResNet-50": (161, 25.5e6),
    "ResNet-152": (467, 60.1e6),
    "DenseNet-161": (484, 28.6e6),
    "DenseNet-201": (604, 20e6),
}
"""Tensors and parameters as printed; GoogleNet and Inception-v4 are not counted here."""
SMALL = 1 << 20


def resnet(blocks: tuple[int, ...]) -> list[int]:
    """Return the elements of every tensor of a ResNet with bottlenecks (He et al., Table 1)."""
    tensors: list[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        tensors.extend((inputs * outputs * kernel**2, outputs, outputs))  # and batch normalisation

    convolution(3, 64, 7)
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*tensors, inputs * CLASSES, CLASSES]


def densenet(growth: int, inputs: int, blocks: tuple[int, ...]) -> list[int]:
    """Return the elements of every tensor of a DenseNet-BC (Huang et al., Table 1)."""
    tensors = [3 * inputs * 49, inputs, inputs]
    for block, count in enumerate(blocks):
        for _ in range(count):
            middle = 4 * growth
            tensors += [inputs, inputs, inputs * middle]
            tensors += [middle, middle, middle * growth * 9]
            inputs += growth
        if block < len(blocks) - 1:
            tensors += [inputs, inputs, inputs * (inputs // 2)]
            inputs //= 2
    return [*tensors, inputs, inputs, inputs * CLASSES, CLASSES]


def vgg16() -> list[int]:
    """Return the elements of every tensor of VGG-16 (Simonyan and Zisserman, Table 1, D)."""
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    tensors = []
    for inputs, outputs in itertools.pairwise([3, *widths]):
        tensors += [inputs * outputs * 9, outputs]
    for inputs, outputs in itertools.pairwise([512 * 49, 4096, 4096, CLASSES]):
        tensors += [inputs * outputs, outputs]
    return tensors


def gpt2() -> list[int]:
    """Return the elements of every tensor of GPT-2 small (Radford et al., 2019)."""
    width, layers, words, places = 768, 12, 50257, 1024
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    perceptron = [width * 4 * width, 4 * width, 4 * width * width, width]
    layer = [*norm, *attention, *norm, *perceptron]
    return [words * width, places * width, *(layer * layers), *norm]


def compute() -> Result:
    """Count the tensors."""
    built = {name: resnet(blocks) for name, blocks in RESNETS.items()}
    built |= {name: densenet(*shape) for name, shape in DENSENETS.items()}
    built |= {"VGG16": vgg16(), "GPT-2": gpt2()}
    models = {name: [4 * elements for elements in sizes] for name, sizes in built.items()}
    models |= {name: [g.size_bytes for g in p.gradients] for name, p in own_traces().items()}
    return {
        "source": "MG-WFBP, Fig. 5 and Table 4; PACE, Fig. 4 and Table II",
        "models": {
            name: {
                "tensors": len(sizes),
                "parameters": sum(sizes) // 4,
                "below_1_mib": sum(size < SMALL for size in sizes) / len(sizes),
                "startup_share_below_half": sum(
                    CLUSTER_1.all_reduce.startup_s > 0.5 * CLUSTER_1.all_reduce.seconds(size)
                    for size in sizes
                )
                / len(sizes),
                "smallest_bytes": min(sizes),
                "largest_bytes": sorted(sizes)[-2:],
                "of_size": Counter(sizes).most_common(3),
                "of_1024_bytes": sizes.count(1024),
                "of_768_bytes": sizes.count(768),
                "sizes_bytes": sorted(sizes),
            }
            for name, sizes in models.items()
        },
        "table_4": TABLE_4,
    }


def draw(result: Result) -> Figure:
    """Draw the distribution of sizes, and what one message of that size costs."""
    made, (axis,) = figure(1, 1, width=7.6, height=4.3)
    colours = (BLUE, SKY, ORANGE, RED, GREEN, PURPLE, "#555555", "#aaaa00")
    for colour, (name, model) in zip(colours, result["models"].items(), strict=False):
        sizes = model["sizes_bytes"]
        axis.step(
            sizes,
            [100 * (i + 1) / len(sizes) for i in range(len(sizes))],
            where="post",
            color=colour,
            label=f"{name}, {len(sizes)} tensors",
        )
    half = CLUSTER_1.all_reduce.startup_s / CLUSTER_1.all_reduce.segments[0].s_per_byte
    axis.axvline(half, color="#777777", linestyle=":")
    axis.text(half * 0.93, 2, "startup is half\nof a message\n(cluster 1)", ha="right", fontsize=8)
    axis.set_xscale("log")
    axis.set_ylim(0, 101)
    axis.set_xlabel("gradient tensor, bytes (32 bits an element)")
    axis.set_ylabel("tensors of at most this size, %")
    axis.set_title("How large gradient tensors are")
    axis.legend(loc="upper left", fontsize=8)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
