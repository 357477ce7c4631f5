"""``UnexchangedWatch``: detects parameters whose gradients are not exchanged."""

from __future__ import annotations

import functools
import gc
from collections import Counter

import torch
import torch.distributed as dist

from syncline.torch_private import TorchDDP, disable_dynamo, version_of
from syncline.train.log import about, warn
from syncline.train.measure.gradient_hooks import GradientHooks, weakly
from syncline.train.overlap.pending import is_pending
from syncline.train.wrapped import Wrapped

LEAST_UPDATES = 3
"""Updates of a parameter before the warning: a single change may be restored weights."""
CHECK_EVERY = 10  # iterations between two checks of the model's parameters


class UnexchangedWatch:
    """Warns once if parameters are repeatedly updated by gradients of this rank alone.

    That happens if the model is called without its wrapper, or if a parameter did not require a
    gradient when the model was wrapped. Torch's class does not warn in either case.
    """

    def __init__(self, job: Wrapped) -> None:
        self._job = job
        self._parameters = list(job.parameters.values())
        self._versions: dict[int, int] = {}
        """For each parameter, by id: its version when its gradient was last seen."""
        self._updates: Counter[int] = Counter()
        self._iteration = 0
        self._said = False
        self._hooks = GradientHooks()
        reached = weakly(self._reached)
        if dist.get_world_size(job.group) > 1:
            for index, parameter in enumerate(self._parameters):
                self._hooks.add(parameter, functools.partial(reached, index))

    def begin(self) -> None:
        """Call before a forward pass of the wrapper whose gradients are computed."""
        self._hooks.remove()

    @disable_dynamo
    def _reached(self, index: int, *_: object) -> None:
        """Note that a parameter gets a gradient although the wrapper has prepared no exchange."""
        if self._is_certain(self._parameters[index]) and not self._has_other_wrapper():
            text = (
                f"an optimizer has updated the parameters {LEAST_UPDATES} times, but the forward "
                "pass of the wrapper was never called, so that nothing exchanges their gradients "
                "and every rank trains a model of its own; call the wrapper itself, not its "
                ".module or the model that was wrapped"
            )
            warn(about(self._job.module, text))

    def check(self) -> None:
        """Call at the end of a backward pass whose gradients were exchanged."""
        self._iteration += 1
        if self._said or self._iteration % CHECK_EVERY:
            return
        ddp, known = self._job.ddp, self._job.parameter_ids
        certain = [
            name
            for name, parameter in self._job.module.named_parameters()
            if id(parameter) not in known
            and not is_pending(parameter)
            and parameter.requires_grad
            and parameter.grad is not None
            and name not in ddp.parameters_to_ignore
            and self._is_certain(parameter)
        ]
        if certain and not self._has_other_wrapper():
            names = ", ".join(map(repr, certain[:3])) + (", ..." if len(certain) > 3 else "")
            text = (
                f"an optimizer updates parameters whose gradients nothing exchanges ({names}), so "
                "that every rank has values of its own: they did not require gradients when the "
                "model was wrapped, or were not there yet; wrap the model again after "
                "requires_grad_(True), or name them in _ddp_params_and_buffers_to_ignore if their "
                "values may differ"
            )
            warn(about(self._job.module, text))

    def _is_certain(self, parameter: torch.Tensor) -> bool:
        """Note that a parameter has a gradient; say whether it was updated often enough."""
        key, version = id(parameter), version_of(parameter)
        self._updates[key] += self._versions.setdefault(key, version) != version
        self._versions[key] = version
        return not self._said and self._updates[key] >= LEAST_UPDATES

    def _has_other_wrapper(self) -> bool:
        """Return whether another wrapper may exchange this model's parameters; ends the watch."""
        self._said = True
        ours = {id(parameter) for parameter in self._job.module.parameters()}
        return any(
            other is not self._job.ddp and not ours.isdisjoint(map(id, other.parameters()))
            for other in gc.get_objects()
            if issubclass(type(other), TorchDDP)
        )
