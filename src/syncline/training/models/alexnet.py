"""AlexNet. Source: Krizhevsky, One weird trick for parallelizing CNNs (the single-tower form)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.training.models.spec import ImageModel

__all__ = ["MODEL", "AlexNet"]

SMALLEST_FULL_IMAGE = 63
"""Below this many pixels a side nothing is left after the third pooling of the full form."""


class AlexNet(nn.Module):
    """Five convolutions and three linear layers.

    The full form, 61.1 M parameters at 1,000 classes, is for 224x224 images. Images below 63 pixels
    a side get the small form: 3x3 kernels, which keep the layers and the weight of the linear part
    but let a 32x32 image through.
    """

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        small = image_size < SMALLEST_FULL_IMAGE
        pool = 2 if small else 3
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1) if small else nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(pool, 2),
            nn.Conv2d(64, 192, 3 if small else 5, padding=1 if small else 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(pool, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(pool, 2),
        )
        side = 2 if small else 6
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.head = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * side * side, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; (N, 3, H, W) -> (N, classes)."""
        logits: Tensor = self.head(torch.flatten(self.pool(self.features(x)), 1))
        return logits


MODEL = ImageModel(
    name="alexnet",
    summary="AlexNet, 61.1 M parameters at 224x224; a small form below 63x63",
    build=AlexNet,
    smallest_image=32,
    folder_image=224,
)
