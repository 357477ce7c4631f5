"""Layers as Algorithm 1 sees them: parameters by the module in whose forward pass they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from syncline.parallel.bsp.algorithm import Job

__all__ = ["Layer", "LayerOrder"]

START = -1
"""In place of a module: the beginning of the forward pass."""


class Layer:
    """Parameters that are needed when a module begins.

    Args:
        gate: the module; None: the model's forward pass itself.
        indices: of the parameters.
    """

    def __init__(self, gate: nn.Module | None, indices: list[int]) -> None:
        self.gate = gate
        self.indices = indices


class LayerOrder(TorchFunctionMode):
    """Watches a forward pass, and then knows the layers in the order in which they begin.

    A parameter belongs to the innermost module that runs when an operation first reads it. That is
    mostly the module that owns it; not so for weights that are tied, or read by an owner's parent.
    What no operation is seen to read belongs to a layer before all others.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._modules = list(job.module.modules())
        self._unread = {id(parameter): i for i, parameter in enumerate(job.parameters)}
        self._gates = [START] * len(job.parameters)
        self._entered: dict[int, int] = {}
        """When each module began first."""
        self._running = [START]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass inside."""
        handles = []
        for number, module in enumerate(self._modules):

            def enter(module: nn.Module, args: Any, number: int = number) -> None:
                del module, args
                self._entered.setdefault(number, len(self._entered))
                self._running.append(number)

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                del module, args, output
                self._running.pop()

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note which parameters an operation reads, and let it be done."""
        del types
        for leaf in tree_leaves((args, kwargs)):
            index = self._unread.pop(id(leaf), None)
            if index is not None:
                self._gates[index] = self._running[-1]
        return func(*args, **(kwargs or {}))

    def layers(self) -> list[Layer]:
        """Return the layers as the root has seen them, on all ranks alike."""
        entered = [self._entered.get(gate, START) for gate in self._gates]
        seen = torch.tensor([self._gates, entered], dtype=torch.int64)
        self._job.channel.broadcast(seen).wait()
        gates, entered = seen.tolist()
        found: dict[int, list[int]] = {}
        for index in sorted(range(len(gates)), key=lambda index: entered[index]):
            found.setdefault(gates[index], []).append(index)
        return [
            Layer(None if gate == START else self._modules[gate], indices)
            for gate, indices in found.items()
        ]
