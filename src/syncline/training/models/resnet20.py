"""ResNet-20 for small images. Source: He et al., Deep residual learning, section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.training.models.spec import ImageModel

__all__ = ["MODEL", "ResNet20"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters.

    Where the shape changes, the shortcut takes every ``stride``-th pixel and pads the new channels
    with zeros: option A of the paper, which gives the published 0.27 M parameters.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; (N, channels_in, H, W) -> (N, channels, H/s, W/s)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1 or self.new_channels:
            x = x[:, :, :: self.stride, :: self.stride]
            before = self.new_channels // 2
            x = functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return functional.relu(x + y)


class ResNet20(nn.Module):
    """Three stages of three blocks with 16, 32 and 64 channels, for images of any size."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = _stage(16, 16, stride=1)
        self.stage2 = _stage(16, 32, stride=2)
        self.stage3 = _stage(32, 64, stride=2)
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; (N, 3, H, W) -> (N, classes)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        x = torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.head(x)
        return logits


def _stage(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels_in, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(2)))


MODEL = ImageModel(
    name="resnet20",
    summary="ResNet-20 for small images, 0.27 M parameters",
    build=lambda _, classes: ResNet20(classes),
    smallest_image=8,
    folder_image=32,
)
