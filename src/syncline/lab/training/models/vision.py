"""Models of images: ResNet-20 and ResNet-50, VGG-16, AlexNet and GoogLeNet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Classifier(nn.Module):
    """Averages features over the image, or over parts of it, and classifies them."""

    features: Callable[[Tensor], Tensor]  # (N, 3, H, W) -> (N, channels, H/s, W/s)
    side = 1  # the head gets averages over this many parts of the image a side
    head: nn.Module  # (N, channels * side * side) -> (N, classes)

    def __init__(self) -> None:
        super().__init__()
        # Not in the class, where it would hide a module of this name.
        self.drop: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; (N, 3, H, W) -> (N, classes)."""
        x = functional.adaptive_avg_pool2d(self.features(x), self.side)
        logits: Tensor = self.head(self.drop(torch.flatten(x, 1)))
        return logits

    def _initialise(self, mode: Literal["fan_in", "fan_out"]) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")


def _stages(
    block: type[BasicBlock | Bottleneck], width: int, shape: Sequence[tuple[int, int, int]]
) -> Iterator[nn.Sequential]:
    """Yield the stages of a ResNet; ``shape`` has inner channels, blocks and first stride."""
    for channels, blocks, stride in shape:
        made = []
        for index in range(blocks):
            made.append(block(width, channels, stride if index == 0 else 1))
            width = channels * block.expansion
        yield nn.Sequential(*made)


def _normed(
    channels_in: int, channels: int, kernel: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Return a convolution without a bias, which batch norm would cancel, and its batch norm."""
    conv = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters.

    Where the shape changes, the shortcut takes every ``stride``-th pixel and pads the new channels
    with zeros: option A of the paper, which gives the published 0.27 M parameters.
    """

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _normed(channels_in, channels, 3, stride)
        self.conv2, self.bn2 = _normed(channels, channels, 3)
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


class ResNet20(_Classifier):
    """Three stages of three blocks with 16, 32 and 64 channels, for images of any size.

    Source: He et al., Deep residual learning, section 4.2.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _normed(3, 16, 3)
        shape = ((16, 3, 1), (32, 3, 2), (64, 3, 2))
        self.stage1, self.stage2, self.stage3 = _stages(BasicBlock, 16, shape)
        self.head = nn.Linear(64, classes)
        self._initialise("fan_in")

    def features(self, x: Tensor) -> Tensor:
        """Return the output of the last stage; (N, 3, H, W) -> (N, 64, H/4, W/4)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.stage3(self.stage2(self.stage1(x)))
        return features


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, projected where the shape changes.

    The stride is on the 3x3 convolution, not on the first 1x1 as in the paper: the form that every
    published trace and benchmark of "ResNet-50" uses. The parameters are the same.
    """

    expansion = 4  # ratio of the channels that leave it to those inside it

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.conv1, self.bn1 = _normed(channels_in, channels, 1)
        self.conv2, self.bn2 = _normed(channels, channels, 3, stride)
        self.conv3, self.bn3 = _normed(channels, channels_out, 1)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*_normed(channels_in, channels_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; (N, channels_in, H, W) -> (N, 4 channels, H/s, W/s)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + self.shortcut(x))


class ResNet50(_Classifier):
    """Four stages of 3, 4, 6 and 3 bottlenecks; 25.56 M parameters at 1,000 classes.

    Source: He et al., Deep residual learning, table 1.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _normed(3, 64, 7, 2)
        shape = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
        self.stages = nn.Sequential(*_stages(Bottleneck, 64, shape))
        self.head = nn.Linear(2048, classes)
        self._initialise("fan_out")

    def features(self, x: Tensor) -> Tensor:
        """Return the output of the last stage; (N, 3, H, W) -> (N, 2048, H/32, W/32)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.stages(functional.max_pool2d(x, 3, stride=2, padding=1))
        return features


VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between the poolings."""


class Vgg16(_Classifier):
    """Thirteen 3x3 convolutions in five stages and one linear layer; images of at least 32x32.

    The two hidden layers of 4,096 of the original are left out, as is usual for 32x32 images; that
    leaves 14.7 M parameters. The convolutions have no bias, since batch norm would cancel it.

    Source: Simonyan and Zisserman, configuration D, with batch norm.
    """

    def __init__(self, classes: int, *, width: float = 1.0) -> None:
        """Build the model, or a narrower one: ``width`` is its share of the original's channels."""
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in VGG16_STAGES:
            for original in stage:
                made = round(original * width)
                conv, norm = _normed(channels, made, 3)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                layers += [conv, norm, nn.ReLU(inplace=True)]
                channels = made
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)


SMALLEST_FULL_IMAGE = 63  # pixels a side; less would vanish in the full form's third pooling


class AlexNet(_Classifier):
    """Five convolutions and three linear layers.

    The full form, 61.1 M parameters at 1,000 classes, is for 224x224 images. Images below 63 pixels
    a side get the small form: 3x3 kernels, which keep the layers and the weight of the linear part
    but let a 32x32 image through.

    Source: Krizhevsky, One weird trick for parallelizing CNNs (the single-tower form).
    """

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        small = image_size < SMALLEST_FULL_IMAGE
        pool = 2 if small else 3
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1) if small else nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(pool, 2),
            *_convolved(64, 192, 3 if small else 5),
            nn.MaxPool2d(pool, 2),
            *_convolved(192, 384, 3),
            *_convolved(384, 256, 3),
            *_convolved(256, 256, 3),
            nn.MaxPool2d(pool, 2),
        )
        self.side = 2 if small else 6
        self.head = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * self.side**2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )


INCEPTIONS = (
    ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
    (
        (192, (96, 208), (16, 48), 64),
        (160, (112, 224), (24, 64), 64),
        (128, (128, 256), (24, 64), 64),
        (112, (144, 288), (32, 64), 64),
        (256, (160, 320), (32, 128), 128),
    ),
    ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
)
"""Channels of the modules between poolings: of the 1x1 branch, of the 3x3 and 5x5 branches before
and after their kernel, and of the pooled branch."""


class Inception(nn.Module):
    """Four branches side by side; their channels follow one another in the output."""

    def __init__(
        self, channels_in: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.branch1 = _convolved(channels_in, one, 1)
        self.branch3 = nn.Sequential(
            *_convolved(channels_in, three[0], 1), *_convolved(three[0], three[1], 3)
        )
        self.branch5 = nn.Sequential(
            *_convolved(channels_in, five[0], 1), *_convolved(five[0], five[1], 5)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), *_convolved(channels_in, pooled, 1))
        self.channels = one + three[1] + five[1] + pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' outputs; (N, channels_in, H, W) -> (N, channels, H, W)."""
        branches = (self.branch1, self.branch3, self.branch5, self.pooled)
        return torch.cat([branch(x) for branch in branches], 1)


def _convolved(channels_in: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


class GoogLeNet(_Classifier):
    """Three convolutions and nine inception modules; 7.0 M parameters at 1,000 classes.

    The two auxiliary classifiers are left out: they need images of 224x224.

    Source: Szegedy et al., Going deeper with convolutions, Table 1.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *_convolved(3, 64, 7, stride=2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.LocalResponseNorm(5),
            *_convolved(64, 64, 1),
            *_convolved(64, 192, 3),
            nn.LocalResponseNorm(5),
        ]
        width = 192
        for stage in INCEPTIONS:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            for channels in stage:
                inception = Inception(width, *channels)
                layers.append(inception)
                width = inception.channels
        self.features = nn.Sequential(*layers)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(width, classes)
        self._initialise("fan_in")
