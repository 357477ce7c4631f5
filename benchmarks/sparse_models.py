"""The four models of the gTop-k paper's speed tables: their tensors, and its figures for them.

Table VI gives the seconds of an iteration on one GPU, Table VII images a second on 32. The paper
does not give the models' sizes. Its 403 images a second of dense VGG-16 are what Eq. 5 makes of the
138 million parameters of the ImageNet configuration (419), so these are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.step_models import MODELS, Layer, Model, convolution, linear, norm, profile_of
from syncline.model.profile import Profile

__all__ = ["ALPHA_S", "BETA_S_PER_BYTE", "DENSITY", "PAPER", "Published"]

ALPHA_S, BETA_S_PER_BYTE = 0.436e-3, 9e-9
"""Section IV.C prints beta as "9 x 10^-6 ms": it is a time per byte, 0.89 Gbit/s."""
DENSITY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model with what the paper has measured."""

    model: Model
    batch: int
    """Images an iteration and worker."""
    iteration_s: float
    """Table VI."""
    dense: float
    """Images a second of 32 workers: Table VII."""
    top_k: float
    gtop_k: float

    def profile(self) -> Profile:
        """Return the model's profile, with the paper's iteration time."""
        return profile_of(self.model, scale=self.iteration_s / self.model.computation_s)


def _alexnet() -> Model:
    sizes = (
        ("features.0", 3, 64, 11, 55),
        ("features.3", 64, 192, 5, 27),
        ("features.6", 192, 384, 3, 13),
        ("features.8", 384, 256, 3, 13),
        ("features.10", 256, 256, 3, 13),
    )
    layers = [
        convolution(name, into, out, kernel, side, block="features", bias=True)
        for name, into, out, kernel, side in sizes
    ]
    for name, into, out in (
        ("classifier.1", 256 * 6 * 6, 4096),
        ("classifier.4", 4096, 4096),
        ("classifier.6", 4096, 1000),
    ):
        layers.append(linear(name, into, out, block=name))
    return Model(
        name="alexnet",
        title="AlexNet",
        layers=tuple(layers),
        source="A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, "
        "2014; names as in torchvision",
    )


def _resnet20() -> Model:
    layers: list[Layer] = [
        convolution("conv1", 3, 16, 3, 32, block="stem"),
        norm("bn1", 16, 32**2, block="stem"),
    ]
    into, side = 16, 32
    for stage, width in enumerate((16, 32, 64), start=1):
        side = 32 // 2 ** (stage - 1)
        for number in range(3):
            block = f"layer{stage}.{number}"
            for index, channels in enumerate((into, width), start=1):
                layers.append(
                    convolution(f"{block}.conv{index}", channels, width, 3, side, block=block)
                )
                layers.append(norm(f"{block}.bn{index}", width, side**2, block=block))
            into = width
    layers.append(linear("fc", 64, 10, block="fc"))
    return Model(
        name="resnet20",
        title="ResNet-20",
        layers=tuple(layers),
        source="K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section "
        "4.2: shortcuts without parameters",
    )


PAPER: dict[str, Published] = {
    each.model.name: each
    for each in (
        Published(
            model=MODELS["vgg16"], batch=128, iteration_s=0.097, dense=403, top_k=2016, gtop_k=3020
        ),
        Published(
            model=_resnet20(), batch=128, iteration_s=0.146, dense=9212, top_k=22272, gtop_k=25280
        ),
        Published(model=_alexnet(), batch=64, iteration_s=0.369, dense=39, top_k=296, gtop_k=505),
        Published(
            model=MODELS["resnet50"],
            batch=256,
            iteration_s=4.842,
            dense=343,
            top_k=978,
            gtop_k=1251,
        ),
    )
}
"""By name, in the order of the paper's tables."""
