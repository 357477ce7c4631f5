"""The papers' networks, layer by layer: tensors, multiplications, and profiles made of both.

Tensors follow from the architectures. Times do not: a profile divides a backward pass among layers
by their multiplications, and takes half of it forward. Layers without any, as normalisations, count
as instantaneous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from syncline.plan.profile import Gradient, Operation, Profile

__all__ = ["NETWORKS", "Layer", "by_layer", "elements", "millions_of_macs", "trained"]

CLASSES = 1000


class Layer(NamedTuple):
    """A layer with parameters."""

    elements: tuple[int, ...]
    """Of its tensors: the weight, then the bias."""
    macs: int = 0
    """Multiplications of the forward pass, for one example or token."""


def elements(layers: Iterable[Layer]) -> list[int]:
    """Return the elements of every tensor."""
    return [count for layer in layers for count in layer.elements]


def millions_of_macs(layers: Iterable[Layer]) -> float:
    """Return the multiplications of one example's forward pass, in millions."""
    return sum(layer.macs for layer in layers) / 1e6


# --- convolutional networks, for images of 224 x 224 ---


def _convolution(inputs: int, outputs: int, taps: int, side: int, *, bias: bool = False) -> Layer:
    """Return a convolution of so many taps with a square output."""
    weight = inputs * outputs * taps
    return Layer((weight, outputs) if bias else (weight,), weight * side**2)


def _norm(channels: int) -> Layer:
    return Layer((channels, channels))


def _normalised(inputs: int, outputs: int, taps: int, side: int) -> list[Layer]:
    return [_convolution(inputs, outputs, taps, side), _norm(outputs)]


def _linear(inputs: int, outputs: int) -> Layer:
    return Layer((inputs * outputs, outputs), inputs * outputs)


def resnet(blocks: tuple[int, ...]) -> list[Layer]:
    """Return a ResNet with bottlenecks (He et al., 2016, Table 1)."""
    layers = _normalised(3, 64, 49, 112)
    inputs = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            layers += _normalised(inputs, width, 1, side)
            layers += _normalised(width, width, 9, side)
            layers += _normalised(width, 4 * width, 1, side)
            if block == 0:
                layers += _normalised(inputs, 4 * width, 1, side)
            inputs = 4 * width
    return [*layers, _linear(inputs, CLASSES)]


def densenet(growth: int, inputs: int, blocks: tuple[int, ...]) -> list[Layer]:
    """Return a DenseNet-BC (Huang et al., 2017, Table 1)."""
    layers = _normalised(3, inputs, 49, 112)
    middle = 4 * growth
    for block, count in enumerate(blocks):
        side = 56 >> block
        for _ in range(count):
            layers += [_norm(inputs), _convolution(inputs, middle, 1, side)]
            layers += [_norm(middle), _convolution(middle, growth, 9, side)]
            inputs += growth
        if block < len(blocks) - 1:
            layers += [_norm(inputs), _convolution(inputs, inputs // 2, 1, side)]
            inputs //= 2
    return [*layers, _norm(inputs), _linear(inputs, CLASSES)]


def vgg16() -> list[Layer]:
    """Return VGG-16 (Simonyan and Zisserman, 2015, Table 1, D)."""
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    sides = [224, 224, 112, 112, 56, 56, 56, 28, 28, 28, 14, 14, 14]
    layers = [
        _convolution(inputs, outputs, 9, side, bias=True)
        for (inputs, outputs), side in zip(itertools.pairwise([3, *widths]), sides, strict=True)
    ]
    return layers + [_linear(*pair) for pair in itertools.pairwise([512 * 49, 4096, 4096, CLASSES])]


GOOGLENET = (
    (192, 64, 96, 128, 16, 32, 32, 28),
    (256, 128, 128, 192, 32, 96, 64, 28),
    (480, 192, 96, 208, 16, 48, 64, 14),
    (512, 160, 112, 224, 24, 64, 64, 14),
    (512, 128, 128, 256, 24, 64, 64, 14),
    (512, 112, 144, 288, 32, 64, 64, 14),
    (528, 256, 160, 320, 32, 128, 128, 14),
    (832, 256, 160, 320, 32, 128, 128, 7),
    (832, 384, 192, 384, 48, 128, 128, 7),
)
"""Channels into each module; out of its 1x1, 3x3 reduction, 3x3, 5x5 reduction, 5x5 and pooled
convolutions; side of the image."""
CLASSIFIERS_AFTER = (2, 5)
"""Modules (4a and 4d) with an auxiliary classifier."""


def googlenet() -> list[Layer]:
    """Return GoogLeNet with its two auxiliary classifiers (Szegedy et al., 2015, Table 1)."""

    def convolution(inputs: int, outputs: int, taps: int, side: int) -> Layer:
        return _convolution(inputs, outputs, taps, side, bias=True)

    layers = [convolution(3, 64, 49, 112), convolution(64, 64, 1, 56), convolution(64, 192, 9, 56)]
    for module, (inputs, one, into3, three, into5, five, pooled, side) in enumerate(GOOGLENET):
        layers += [
            convolution(inputs, one, 1, side),
            convolution(inputs, into3, 1, side),
            convolution(into3, three, 9, side),
            convolution(inputs, into5, 1, side),
            convolution(into5, five, 25, side),
            convolution(inputs, pooled, 1, side),
        ]
        if module in CLASSIFIERS_AFTER:
            outputs = one + three + five + pooled
            layers += [convolution(outputs, 128, 1, 4), _linear(2048, 1024), _linear(1024, CLASSES)]
    return [*layers, _linear(1024, CLASSES)]


def inception_v4() -> list[Layer]:
    """Return Inception-v4 (Szegedy et al., 2017, Fig. 3 to 9)."""
    stem = [
        *((3, 32, 9, 111), (32, 32, 9, 109), (32, 64, 9, 109), (64, 96, 9, 54)),
        *((160, 64, 1, 54), (64, 96, 9, 52)),
        *((160, 64, 1, 54), (64, 64, 7, 54), (64, 64, 7, 54), (64, 96, 9, 52)),
        (192, 192, 9, 25),
    ]
    a = [
        (384, 96, 1, 25),
        *((384, 64, 1, 25), (64, 96, 9, 25)),
        *((384, 64, 1, 25), (64, 96, 9, 25), (96, 96, 9, 25)),
        (384, 96, 1, 25),
    ]
    to_b = [(384, 384, 9, 12), (384, 192, 1, 25), (192, 224, 9, 25), (224, 256, 9, 12)]
    b = [
        (1024, 384, 1, 12),
        *((1024, 192, 1, 12), (192, 224, 7, 12), (224, 256, 7, 12)),
        *((1024, 192, 1, 12), (192, 192, 7, 12), (192, 224, 7, 12)),
        *((224, 224, 7, 12), (224, 256, 7, 12)),
        (1024, 128, 1, 12),
    ]
    to_c = [
        *((1024, 192, 1, 12), (192, 192, 9, 5)),
        *((1024, 256, 1, 12), (256, 256, 7, 12), (256, 320, 7, 12), (320, 320, 9, 5)),
    ]
    c = [
        (1536, 256, 1, 5),
        *((1536, 384, 1, 5), (384, 256, 3, 5), (384, 256, 3, 5)),
        *(
            (1536, 384, 1, 5),
            (384, 448, 3, 5),
            (448, 512, 3, 5),
            (512, 256, 3, 5),
            (512, 256, 3, 5),
        ),
        (1536, 256, 1, 5),
    ]
    convolutions = [*stem, *(4 * a), *to_b, *(7 * b), *to_c, *(3 * c)]
    return [layer for one in convolutions for layer in _normalised(*one)] + [_linear(1536, CLASSES)]


# --- language models, for one token ---


def gpt2() -> list[Layer]:
    """Return GPT-2 small (Radford et al., 2019), whose output shares the embedding's weight."""
    width, blocks, words, places = 768, 12, 50257, 1024
    block = [
        *(_norm(width), _linear(width, 3 * width), _linear(width, width)),
        *(_norm(width), _linear(width, 4 * width), _linear(4 * width, width)),
    ]
    return [Layer((words * width,)), Layer((places * width,)), *(block * blocks), _norm(width)]


def _weight(inputs: int, outputs: int) -> Layer:
    """Return a linear layer without a bias."""
    return Layer((inputs * outputs,), inputs * outputs)


def transformer() -> list[Layer]:
    """Return the base Transformer as Sockeye makes it (Vaswani et al., 2017, Table 3).

    Its layers give 164 tensors, as in PACE's Table II. The vocabulary is not printed; this one
    makes 91.8 million parameters.
    """
    width, inner, blocks, words = 512, 2048, 6, 31_020
    own = [_weight(width, 3 * width), _weight(width, width), _norm(width)]
    other = [*(4 * [_weight(width, width)]), _norm(width)]
    forward = [_linear(width, inner), _linear(inner, width), _norm(width)]
    return [
        Layer((words * width,)),
        *(blocks * [*own, *forward]),
        _norm(width),
        Layer((words * width,)),
        *(blocks * [*own, *other, *forward]),
        _norm(width),
        _linear(width, words),
    ]


def seq2seq() -> list[Layer]:
    """Return a translation model of LSTMs with attention (Sutskever et al., 2014; Sockeye's).

    PACE's Table II prints its 32 tensors and 67.2 million parameters, not its layers. Here they are
    an encoder of one layer in two directions, a decoder of two, attention between them, and an
    output that shares the weight of the target's embedding.
    """
    embedded, width, words = 512, 1024, 35_850

    def lstm(inputs: int, outputs: int) -> list[Layer]:
        return [_linear(inputs, 4 * outputs), _linear(outputs, 4 * outputs)]

    return [
        Layer((words * embedded,)),
        *(2 * lstm(embedded, width // 2)),
        *(4 * [_linear(width, width)]),  # the decoder's first states
        *(_weight(width, width), _weight(width, width), _weight(width, 1)),
        Layer((words * embedded,)),
        *lstm(embedded + width, width),
        *lstm(width, width),
        _linear(2 * width, embedded),
        Layer((words,), words * embedded),
    ]


NETWORKS: dict[str, list[Layer]] = {
    "ResNet-50": resnet((3, 4, 6, 3)),
    "ResNet-152": resnet((3, 8, 36, 3)),
    "DenseNet-161": densenet(48, 96, (6, 12, 36, 24)),
    "DenseNet-201": densenet(32, 64, (6, 12, 48, 32)),
    "GoogleNet": googlenet(),
    "Inception-v4": inception_v4(),
    "VGG16": vgg16(),
    "GPT-2": gpt2(),
    "Transformer": transformer(),
    "Seq2Seq": seq2seq(),
}
"""All of them, by the names that the papers use."""


# --- profiles ---


def trained(model: str, layers: list[Layer], backward_s: float) -> Profile:
    """Return the profile of a chain of layers.

    Args:
        model: its name.
        layers: from the input on.
        backward_s: the backward pass, divided among the layers by their multiplications.
    """
    count, macs = len(layers), sum(layer.macs for layer in layers)
    seconds = [backward_s * layer.macs / macs for layer in layers]
    forward = [
        Operation(
            name=f"forward {i}", phase="forward", duration_s=s / 2, after=(i - 1,) if i else ()
        )
        for i, s in enumerate(seconds)
    ]
    backward = [
        Operation(
            name=f"backward {count - 1 - i}",
            phase="backward",
            duration_s=s,
            after=(count + i - 1,),
        )
        for i, s in enumerate(reversed(seconds))
    ]
    return Profile(
        model=model,
        device="described",
        workers=1,
        iterations=1,
        operations=(*forward, *backward),
        gradients=tuple(
            Gradient(
                name=f"{tensor}.layer{index}.{tensor}",
                elements=size,
                ready_after=2 * count - 1 - index,
                needed_by=index,
            )
            for index, layer in reversed(list(enumerate(layers)))
            for tensor, size in reversed(list(enumerate(layer.elements)))
        ),
    )


def _layer_of(gradient: Gradient) -> str:
    """Return the layer of a tensor named ``NUMBER.LAYER.TENSOR``."""
    return gradient.name.partition(".")[2].rpartition(".")[0]


def by_layer(profile: Profile) -> Profile:
    """Return a profile in which the tensors of a layer, its weight and bias, are one."""
    joined: list[Gradient] = []
    for gradient in profile.gradients:
        if joined and _layer_of(joined[-1]) == _layer_of(gradient):
            both = joined.pop(), gradient
            needs = [one.needed_by for one in both if one.needed_by is not None]
            joined.append(
                msgspec.structs.replace(
                    gradient,
                    elements=sum(one.elements for one in both),
                    needed_by=min(needs, default=None),
                )
            )
        else:
            joined.append(gradient)
    return msgspec.structs.replace(
        profile, model=f"{profile.model}, by layer", gradients=tuple(joined)
    )
