"""ResNet-50 for ImageNet. Source: He et al., Deep residual learning, table 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.training.models.spec import ImageModel

__all__ = ["MODEL", "ResNet50"]

EXPANSION = 4
"""Channels that leave a bottleneck, over those inside it."""

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""(channels inside, blocks, stride of the first block) of each stage."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, projected where the shape changes.

    The stride is on the 3x3 convolution, not on the first 1x1 as in the paper: the form that every
    published trace and benchmark of "ResNet-50" uses. The parameters are the same.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * EXPANSION
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; (N, channels_in, H, W) -> (N, 4 channels, H/s, W/s)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    """Four stages of 3, 4, 6 and 3 bottlenecks; 25.56 M parameters at 1,000 classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        stages = []
        width = 64
        for inside, blocks, stride in STAGES:
            stage = []
            for index in range(blocks):
                stage.append(Bottleneck(width, inside, stride if index == 0 else 1))
                width = inside * EXPANSION
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; (N, 3, H, W) -> (N, classes)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        x = functional.adaptive_avg_pool2d(self.stages(x), 1)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


MODEL = ImageModel(
    name="resnet50",
    summary="ResNet-50 for ImageNet, 25.56 M parameters",
    build=lambda _, classes: ResNet50(classes),
    smallest_image=32,
    folder_image=224,
)
