"""The four models of the gTop-k paper's speed tables: their tensors, and its iteration times.

Table VI gives the seconds of an iteration on one GPU. VGG-16 is the one for ImageNet here, with 138
million parameters, as an example of a large model. The paper's is for CIFAR-10, with 14.7 million
(``reproduce/gtopk.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.step_models import MODELS, Layer, Model, convolution, linear, norm, profile_of
from syncline.plan.profile import Profile

__all__ = ["DENSITY", "PAPER", "Published"]

DENSITY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model with the paper's batch and iteration time."""

    model: Model
    batch: int
    """Images an iteration and worker."""
    iteration_s: float
    """Table VI."""

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
        Published(model=MODELS["vgg16"], batch=128, iteration_s=0.097),
        Published(model=_resnet20(), batch=128, iteration_s=0.146),
        Published(model=_alexnet(), batch=64, iteration_s=0.369),
        Published(
            model=MODELS["resnet50"],
            batch=256,
            iteration_s=4.842,
        ),
    )
}
"""By name, in the order of the paper's tables."""
