"""VGG-16 for 32x32 images. Source: Simonyan and Zisserman, configuration D, with batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.training.models.spec import ImageModel

__all__ = ["MODEL", "Vgg16"]

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between the poolings."""


class Vgg16(nn.Module):
    """Thirteen 3x3 convolutions in five stages and one linear layer.

    The two hidden layers of 4,096 of the original are left out, as is usual for 32x32 images; that
    leaves 14.7 M parameters. The convolutions have no bias, since batch norm would cancel it.
    """

    def __init__(self, classes: int, *, width: float = 1.0) -> None:
        """Build the model, or a narrower one.

        Args:
            classes: number of logits.
            width: channels of each convolution, as a share of the original's.
        """
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for original in stage:
                made = round(original * width)
                conv = nn.Conv2d(channels, made, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                layers += [conv, nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
                channels = made
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; (N, 3, H, W) -> (N, classes), H and W at least 32."""
        x = functional.adaptive_avg_pool2d(self.features(x), 1)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


MODEL = ImageModel(
    name="vgg16",
    summary="VGG-16 with batch norm for 32x32 images, 14.7 M parameters",
    build=lambda _, classes: Vgg16(classes),
    smallest_image=32,
    folder_image=32,
)
