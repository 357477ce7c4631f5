"""The autograd graph behind a model's output: its nodes, edges and who made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

__all__ = ["AutogradGraph", "read_graph", "sequence_number", "tensors_in"]

ACCUMULATE = "AccumulateGrad"


class AutogradGraph(NamedTuple):
    """The nodes that backward will run, without those that accumulate gradients."""

    nodes: list[Node]
    names: list[str]
    """Class name of each node's function, such as ``"ConvolutionBackward0"``."""
    sequence: list[int]
    """Autograd's sequence number of each node: increases in the order of the forward pass."""
    consumers: list[list[int]]
    """For each node, the nodes that must run before it in backward."""


def read_graph(output: Any) -> AutogradGraph:
    """Walk the autograd graph from every tensor in a model's output.

    O(nodes + edges). The nodes are kept alive by the result; drop it after use.
    """
    nodes: list[Node] = []
    index: dict[Node, int] = {}
    edges: list[tuple[int, int]] = []
    stack = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    for root in stack:
        if root not in index:
            index[root] = len(nodes)
            nodes.append(root)
    stack = list(nodes)
    while stack:
        node = stack.pop()
        for before, _ in node.next_functions:
            if before is None or before.name().endswith(ACCUMULATE):
                continue
            if before not in index:
                index[before] = len(nodes)
                nodes.append(before)
                stack.append(before)
            edges.append((index[node], index[before]))
    consumers: list[list[int]] = [[] for _ in nodes]
    for consumer, node_index in edges:
        consumers[node_index].append(consumer)
    return AutogradGraph(
        nodes=nodes,
        names=[node.name() for node in nodes],
        sequence=[node._sequence_nr() for node in nodes],
        consumers=consumers,
    )


def sequence_number() -> int:
    """Return the sequence number that autograd gives to the next operation of this thread."""
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert probe is not None
    return probe._sequence_nr()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of mappings, sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
