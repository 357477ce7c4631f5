"""The six models of ``step_time``: their tensors and layers, from the published architectures.

A layer has parameters, and multiply-adds of its forward pass for one sample: a product counts one
for each term, an elementwise layer (normalisation, embedding) one for each element of its output.
The time of a pass is shared out over the layers by these, forward and backward alike; activations,
pooling and additions have no parameters and count as part of the layers beside them. Which layer
takes how long on a real device differs; which gradients are large, and when they come, does not.

Compute alone is in proportion to the gradients' bytes, as 1.2 s are to those of ResNet-50: about
as long as a ring all-reduce of all gradients over 4 hosts at 1 Gbit/s. There hiding communication
gains the most; what takes longer to compute hides it anyway, what takes less cannot. A third of it
is forward, as a backward pass has two products where the forward pass has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline.plan.profile import Gradient, Operation, Profile

__all__ = [
    "MODELS",
    "NOMINAL_S",
    "Layer",
    "Model",
    "bert",
    "convolution",
    "linear",
    "norm",
    "profile_of",
    "resnet",
]

NOMINAL_S = 1.2
"""Seconds that ResNet-50 computes an iteration: 0.4 forward, 0.8 backward."""
NOMINAL_ELEMENTS = 25_557_032
"""Of ResNet-50."""
FORWARD_SHARE = 1 / 3

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module that owns parameters."""

    name: str
    parameters: tuple[tuple[str, Shape], ...]
    """The name of each in the module, and its shape."""
    multiply_adds: int
    block: str
    """Layers of one block follow each other; users of FSDP shard block by block."""

    @property
    def elements(self) -> int:
        """Of all its parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's layers in the order of the forward pass."""

    name: str
    title: str
    layers: tuple[Layer, ...]
    source: str

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(layer.elements for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Of a forward pass of one sample."""
        return sum(layer.multiply_adds for layer in self.layers)

    @property
    def computation_s(self) -> float:
        """Seconds of an iteration without communication."""
        return NOMINAL_S * self.elements / NOMINAL_ELEMENTS

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each parameter by its full name."""
        return {
            f"{layer.name}.{name}": shape
            for layer in self.layers
            for name, shape in layer.parameters
        }

    def blocks(self) -> list[list[str]]:
        """Return the names of the layers of each block, in forward order."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            found.setdefault(layer.block, []).append(layer.name)
        return list(found.values())


def profile_of(model: Model, *, scale: float = 1.0) -> Profile:
    """Return the profile of one iteration.

    Args:
        model: what is trained.
        scale: every duration is multiplied by this.
    """
    forward_s = model.computation_s * FORWARD_SHARE * scale
    backward_s = model.computation_s * scale - forward_s
    shares = [layer.multiply_adds / model.multiply_adds for layer in model.layers]
    operations = [
        Operation(
            name=layer.name,
            phase="forward",
            duration_s=forward_s * share,
            after=(index - 1,) if index else (),
        )
        for index, (layer, share) in enumerate(zip(model.layers, shares, strict=True))
    ]
    gradients = []
    for index in reversed(range(len(model.layers))):
        layer = model.layers[index]
        ready = len(operations)
        operations.append(
            Operation(
                name=f"{layer.name} backward",
                phase="backward",
                duration_s=backward_s * shares[index],
                after=tuple(sorted({index, ready - 1})),
            )
        )
        gradients += [
            Gradient(
                name=f"{layer.name}.{name}",
                elements=math.prod(shape),
                ready_after=ready,
                needed_by=index,
            )
            for name, shape in reversed(layer.parameters)
        ]
    return Profile(
        model=model.name,
        device="emulated",
        workers=1,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


# --- layers ---


def convolution(
    name: str,
    into: int,
    out: int,
    kernel: int,
    side: int,
    *,
    block: str,
    bias: bool = False,
) -> Layer:
    """Return a convolution whose output has ``side * side`` places."""
    weight = ("weight", (out, into, kernel, kernel))
    return Layer(
        name=name,
        parameters=(weight, ("bias", (out,))) if bias else (weight,),
        multiply_adds=out * into * kernel**2 * side**2,
        block=block,
    )


def norm(name: str, channels: int, places: int, *, block: str) -> Layer:
    """Return a batch or layer normalisation."""
    return Layer(
        name=name,
        parameters=(("weight", (channels,)), ("bias", (channels,))),
        multiply_adds=channels * places,
        block=block,
    )


def linear(
    name: str, into: int, out: int, *, block: str, places: int = 1, besides: int = 0
) -> Layer:
    """Return a linear layer; ``besides`` is what runs with it and has no parameters."""
    return Layer(
        name=name,
        parameters=(("weight", (out, into)), ("bias", (out,))),
        multiply_adds=out * into * places + besides,
        block=block,
    )


def _embedding(name: str, rows: int, width: int, places: int, *, block: str) -> Layer:
    return Layer(
        name=name,
        parameters=(("weight", (rows, width)),),
        multiply_adds=width * places,
        block=block,
    )


# --- models ---


def resnet(name: str, title: str, depths: tuple[int, ...]) -> Model:
    """Return a ResNet with bottleneck blocks, by their number in each stage."""
    layers = [
        convolution("conv1", 3, 64, 7, 112, block="stem"),
        norm("bn1", 64, 112**2, block="stem"),
    ]
    into, side = 64, 56
    for stage, depth in enumerate(depths, start=1):
        width = 64 * 2 ** (stage - 1)
        out = 4 * width
        for number in range(depth):
            block = f"layer{stage}.{number}"
            halves = stage > 1 and number == 0
            before, side = side, side // 2 if halves else side
            # The second convolution has the stride, as in torchvision ("v1.5").
            for index, (a, b, kernel, places) in enumerate(
                ((into, width, 1, before), (width, width, 3, side), (width, out, 1, side)), start=1
            ):
                layers.append(
                    convolution(f"{block}.conv{index}", a, b, kernel, places, block=block)
                )
                layers.append(norm(f"{block}.bn{index}", b, places**2, block=block))
            if number == 0:
                layers.append(convolution(f"{block}.downsample.0", into, out, 1, side, block=block))
                layers.append(norm(f"{block}.downsample.1", out, side**2, block=block))
            into = out
    layers.append(linear("fc", into, 1000, block="fc"))
    return Model(
        name=name,
        title=title,
        layers=tuple(layers),
        source="K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, Table 1; "
        "names as in torchvision",
    )


def _densenet201() -> Model:
    growth, into, side = 32, 64, 56
    first = "features.conv0"
    layers = [
        convolution(first, 3, into, 7, 112, block="stem"),
        norm("features.norm0", into, 112**2, block="stem"),
    ]
    depths = (6, 12, 48, 32)
    for stage, depth in enumerate(depths, start=1):
        for number in range(1, depth + 1):
            block = f"features.denseblock{stage}.denselayer{number}"
            layers += [
                norm(f"{block}.norm1", into, side**2, block=block),
                convolution(f"{block}.conv1", into, 4 * growth, 1, side, block=block),
                norm(f"{block}.norm2", 4 * growth, side**2, block=block),
                convolution(f"{block}.conv2", 4 * growth, growth, 3, side, block=block),
            ]
            into += growth
        if stage < len(depths):
            block = f"features.transition{stage}"
            layers.append(norm(f"{block}.norm", into, side**2, block=block))
            layers.append(convolution(f"{block}.conv", into, into // 2, 1, side, block=block))
            into, side = into // 2, side // 2
    layers.append(norm("features.norm5", into, side**2, block="classifier"))
    layers.append(linear("classifier", into, 1000, block="classifier"))
    return Model(
        name="densenet201",
        title="DenseNet-201",
        layers=tuple(layers),
        source="G. Huang et al., Densely Connected Convolutional Networks, CVPR 2017, Table 1; "
        "names as in torchvision",
    )


def vgg16() -> Model:
    layers = []
    index, into, side = 0, 3, 224
    for stage, (count, out) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for _ in range(count):
            name = f"features.{index}"
            layers.append(convolution(name, into, out, 3, side, block=f"stage{stage}", bias=True))
            into = out
            index += 2  # a ReLU follows
        index += 1  # and a pooling
        side //= 2
    sizes = ((into * side**2, 4096), (4096, 4096), (4096, 1000))
    for number, (a, b) in enumerate(sizes):
        name = f"classifier.{3 * number}"  # ReLU and dropout between
        layers.append(linear(name, a, b, block=name))
    return Model(
        name="vgg16",
        title="VGG-16",
        layers=tuple(layers),
        source="K. Simonyan and A. Zisserman, Very Deep Convolutional Networks for Large-Scale "
        "Image Recognition, ICLR 2015, configuration D; names as in torchvision",
    )


def bert(name: str, title: str, *, width: int, depth: int) -> Model:
    """Return a BERT encoder of so many layers."""
    tokens = 128
    block = "embeddings"
    layers = [
        _embedding("embeddings.word_embeddings", 30522, width, tokens, block=block),
        _embedding("embeddings.position_embeddings", 512, width, tokens, block=block),
        _embedding("embeddings.token_type_embeddings", 2, width, tokens, block=block),
        norm("embeddings.LayerNorm", width, tokens, block=block),
    ]
    scores = 2 * tokens * tokens * width  # queries by keys, and weights by values
    for number in range(depth):
        block = f"encoder.layer.{number}"
        own = f"{block}.attention.self"
        layers += [
            linear(f"{own}.query", width, width, block=block, places=tokens),
            linear(f"{own}.key", width, width, block=block, places=tokens),
            linear(f"{own}.value", width, width, block=block, places=tokens, besides=scores),
            linear(f"{block}.attention.output.dense", width, width, block=block, places=tokens),
            norm(f"{block}.attention.output.LayerNorm", width, tokens, block=block),
            linear(f"{block}.intermediate.dense", width, 4 * width, block=block, places=tokens),
            linear(f"{block}.output.dense", 4 * width, width, block=block, places=tokens),
            norm(f"{block}.output.LayerNorm", width, tokens, block=block),
        ]
    layers.append(linear("pooler.dense", width, width, block="pooler"))
    return Model(
        name=name,
        title=title,
        layers=tuple(layers),
        source="J. Devlin et al., BERT, NAACL 2019: uncased vocabulary, 128 tokens, without "
        "heads; names as in transformers",
    )


def _lstm() -> Model:
    width, words = 1500, 10_000
    layers = [_embedding("encoder", words, width, 1, block="encoder")]
    for number in range(2):
        name = f"rnns.{number}"
        layers.append(
            Layer(
                name=name,
                parameters=(
                    ("weight_ih_l0", (4 * width, width)),
                    ("weight_hh_l0", (4 * width, width)),
                    ("bias_ih_l0", (4 * width,)),
                    ("bias_hh_l0", (4 * width,)),
                ),
                multiply_adds=8 * width**2,
                block=name,
            )
        )
    layers.append(linear("decoder", width, words, block="decoder"))
    return Model(
        name="lstm",
        title="LSTM",
        layers=tuple(layers),
        source="W. Zaremba et al., Recurrent Neural Network Regularization, 2014: the large model "
        "on Penn Treebank; each layer an nn.LSTM, with its two biases",
    )


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        resnet("resnet50", "ResNet-50", (3, 4, 6, 3)),
        resnet("resnet152", "ResNet-152", (3, 8, 36, 3)),
        _densenet201(),
        vgg16(),
        bert("bert", "BERT-base", width=768, depth=12),
        _lstm(),
    )
}
"""By name, in the order of the table."""
