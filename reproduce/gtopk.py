"""gTop-k's cluster, models and printed figures: what its scripts share.

The paper does not print the models' sizes. Its VGG-16 is trained on CIFAR-10: the authors' public
code (github.com/hclhkbu/gtopkssgd, ``models/vgg.py``) has 13 convolutions with batch normalisation
and one linear layer, 14.7 million parameters, not the 138 million of ImageNet's. The numbers behind
Fig. 10 and 11, which the paper only draws, are in ``scripts/icdcs2019/communication.py`` there.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import raw
from reproduce.common import FOLDER, Result
from syncline.plan.exchange import Link

__all__ = [
    "DENSITY",
    "FIG_10_WORKERS",
    "LINK",
    "MODELS",
    "WORKERS",
    "Published",
    "measured",
]

LINK = Link(alpha_s=0.436e-3, beta_s_per_byte=9e-9, gamma_s_per_byte=0.0)
"""Fig. 8: 1 Gbit/s Ethernet. Section IV.C prints beta as "9 x 10^-6 ms", a time per byte."""
DENSITY = 0.001
WORKERS = 32
FIG_10_WORKERS = (4, 8, 16, 32)


def measured(benchmark: str) -> Result:
    """Return what one of our benchmarks measured; its raw results are kept with the project."""
    path = FOLDER.parent / "benchmarks" / "results" / f"{benchmark}.json"
    found: Result = raw.read(path)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model and what the paper prints or draws of it."""

    title: str
    elements: int
    batch: int
    """Images an iteration and worker."""
    iteration_s: float
    """On one GPU: Table VI."""
    table_7: tuple[float, float, float]
    """Images a second of 32 workers: dense, Top-k, gTop-k."""
    fig_10: dict[str, tuple[float, float, float, float]]
    """Images a second and worker, for each of ``FIG_10_WORKERS``."""
    fig_11: tuple[float, float, float]
    """Seconds of an iteration of gTop-k with 32 workers: computing, compressing, communicating."""


def _vgg16() -> int:
    """Return the parameters of the CIFAR-10 VGG-16: a bias and a normalisation a channel."""
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    inputs = (3, *widths[:-1])
    convolutions = sum(9 * i * o + 3 * o for i, o in zip(inputs, widths, strict=True))
    return convolutions + 512 * 10 + 10


MODELS = {
    "vgg16": Published(
        title="VGG-16 (CIFAR-10)",
        elements=_vgg16(),
        batch=128,
        iteration_s=0.097,
        table_7=(403, 2016, 3020),
        fig_10={
            "ring": (104.200, 92.560, 39.480, 12.600),
            "top-k": (110.576, 109.900, 97.865, 63.002),
            "gtop-k": (131.060, 130.551, 126.434, 123.200),
        },
        fig_11=(0.139536, 0.091353, 0.811753),
    ),
    "resnet20": Published(
        title="ResNet-20",
        elements=269_722,
        batch=128,
        iteration_s=0.146,
        table_7=(9212, 22272, 25280),
        fig_10={
            "ring": (821.700, 705.200, 520.400, 287.900),
            "top-k": (908.837, 752.985, 737.594, 696.029),
            "gtop-k": (916.260, 868.730, 808.500, 789.300),
        },
        fig_11=(0.146005, 0.001618, 0.024686),
    ),
    "alexnet": Published(
        title="AlexNet",
        elements=61_100_840,
        batch=64,
        iteration_s=0.369,
        table_7=(39, 296, 505),
        fig_10={
            "ring": (14.010, 12.118, 4.936, 1.234),
            "top-k": (14.238, 13.865, 13.352, 9.236),
            "gtop-k": (16.536, 16.446, 16.359, 15.777),
        },
        fig_11=(0.257205, 0.383776, 3.36298),
    ),
    "resnet50": Published(
        title="ResNet-50",
        elements=25_557_032,
        batch=256,
        iteration_s=4.842,
        table_7=(343, 978, 1251),
        fig_10={
            "ring": (39.002, 36.989, 23.176, 10.721),
            "top-k": (37.729, 35.703, 34.495, 30.583),
            "gtop-k": (39.795, 39.713, 39.060, 39.119),
        },
        fig_11=(4.882041, 0.15405, 1.424253),
    ),
}
"""In the order of the paper's tables. Sizes: He et al. (ResNet-20 without parameters in its
shortcuts, ResNet-50), Krizhevsky's AlexNet of 2014 as in torchvision."""
