"""``BspSgd``: trains a module by one of linear-pipeline's three algorithms."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from reproduce.bsp.algorithm import Algorithm, AllReduce, Job
from reproduce.bsp.channel import Channel, Values
from reproduce.bsp.overlapped import Overlapped
from reproduce.bsp.reduce_broadcast import ReduceBroadcast
from syncline.comm.devices import DeviceGroup
from syncline.comm.groups import Group
from syncline.errors import UserError
from syncline.plan.planners.base import MergingPlanner
from syncline.torch_private import queue_callback, tree_leaves
from syncline.train.measure.gradient_hooks import weakly
from syncline.train.measure.statistics import median

WARM_UP_ITERATIONS = 3
"""The first iterations allocate, and learn the order of the layers; the profile excludes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationProfile:
    """An iteration on the root, from the start of its forward pass to the end of its update.

    Source: linear-pipeline, Table 2; medians in place of averages.
    """

    communication_s: float
    """Time that computation waited; exchanges hidden behind it do not count."""
    computation_s: float
    """The rest."""

    @property
    def communication_share(self) -> float:
        """Communication over the whole iteration (the paper's %), from 0 to 1."""
        whole_s = self.communication_s + self.computation_s
        return self.communication_s / whole_s if whole_s > 0 else 0.0


class BspSgd(nn.Module):
    """Bulk synchronous SGD with the collectives of linear-pipeline.

    The training loop stays as it is: ``model(...)``, ``backward()``, ``optimizer.step()``. Results
    of all algorithms and collectives differ only by the order in which numbers are added; with two
    ranks there is only one order.

    All ranks take part in every forward pass through this wrapper, in every backward pass and in
    every step. With algorithms 1 and 2 gradients and the optimizer's state are the root's (rank 0);
    other ranks have no gradients after ``backward()``, and their steps change nothing.

    Args:
        module: on the CPU, or on the device of a device group; made alike on all ranks by a
            broadcast from the root.
        optimizer: of the module's parameters alone.
        group: the ranks; a :class:`~syncline.comm.devices.DeviceGroup` for a module on a GPU.
        algorithm: of linear-pipeline, section 3.3: 1, 2 or 3.
        collectives: ``"linear-pipeline"``, ``"minimum-spanning-tree"``,
            ``"bidirectional-exchange"`` or another of
            :data:`~reproduce.bsp.channel.FAMILIES`; None: the fastest for each size.
        planner: for algorithm 2, how to merge gradients into messages that are reduced during the
            backward pass (MG-WFBP, section 4.3); None: all after the backward pass, as published.
        synchronise_every: for algorithm 3, updates from one broadcast of the weights to the next.

    Raises:
        UserError: an argument cannot be used.
        PeerError: a rank has ended, or does not answer within the group's timeout; so do
            ``model(...)``, ``backward()`` and ``step()``.

    Source: linear-pipeline, section 3.3.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        group: Group | DeviceGroup,
        *,
        algorithm: int = 1,
        collectives: str | None = None,
        planner: MergingPlanner | None = None,
        synchronise_every: int = 5,
    ) -> None:
        super().__init__()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        _require(module, optimizer, algorithm, synchronise_every)
        if planner is not None and algorithm != 2:
            raise UserError(
                f"BSP-SGD's algorithm {algorithm} has no messages to plan; leave the planner "
                f"{planner.NAME!r} out, or take algorithm 2"
            )
        self.module = module
        self._number = algorithm
        self._planner = planner
        self._channel = Channel(group, collectives)
        _require_on(self._channel.device, module)
        self._job = Job(
            module=module,
            names=tuple(name for name, _ in named),
            parameters=tuple(parameter for _, parameter in named),
            channel=self._channel,
        )
        Values([*module.parameters(), *module.buffers()], self._channel).broadcast()
        self._root_buffers = Values(list(module.buffers()), self._channel)
        self._algorithm: Algorithm
        if algorithm == 1:
            self._algorithm = Overlapped(self._job)
        elif algorithm == 2:
            self._algorithm = ReduceBroadcast(self._job, planner)
        else:
            self._algorithm = AllReduce(self._job, synchronise_every)
        self._synchronises = True
        self._backward_under_way = False
        self._iteration_start: tuple[float, float] | None = None
        self._samples: list[tuple[float, float]] = []
        """Of each measured iteration: seconds of waiting for communication, and in all."""
        self._iterations = 0
        ready = weakly(self._gradient_ready)
        self._algorithm.hooks += [
            *(
                parameter.register_post_accumulate_grad_hook(partial(ready, index))
                for index, parameter in enumerate(self._job.parameters)
            ),
            optimizer.register_step_pre_hook(weakly(self._before_update)),
            optimizer.register_step_post_hook(weakly(self._after_update)),
        ]
        weakref.finalize(self, self._algorithm.close).atexit = False

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the root's latest weights and buffers on every rank."""
        self._backward_under_way = False  # the last one may have failed
        if torch.is_grad_enabled() and self._iteration_start is None:
            self._iteration_start = time.perf_counter(), self._channel.waited_s
        with self._channel.waiting():
            self._root_buffers.broadcast()
            self._algorithm.before_forward()
        with self._algorithm.watching_forward():
            output = self.module(*args, **kwargs)
        with self._channel.waiting():
            self._algorithm.after_forward()
        # The first gradient may be inside a checkpoint's own backward pass.
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of the backward passes inside without exchanging them."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def synchronize(self) -> None:
        """Give every rank the weights of the last update; all ranks call it.

        Call it before evaluation, ``state_dict()`` or any other read of weights on ranks other than
        the root, outside a forward pass through this wrapper.
        """
        self._algorithm.synchronize()

    # ------------------------------------------------------------------ measurements

    @property
    def messages(self) -> int:
        """The number of messages of the gradients."""
        return self._algorithm.messages

    @property
    def measuring(self) -> bool:
        """Whether later iterations will be different."""
        return self._iterations < WARM_UP_ITERATIONS or self._algorithm.measuring

    @property
    def iteration_profile(self) -> IterationProfile | None:
        """Computation and communication of this rank's iterations; None if none was measured."""
        if not self._samples:
            return None
        return IterationProfile(
            communication_s=median(waited for waited, _ in self._samples),
            computation_s=median(whole - waited for waited, whole in self._samples),
        )

    # ------------------------------------------------------------------ inside

    def _backward_begins(self, _gradient: Tensor | None = None) -> None:
        if self._synchronises and not self._backward_under_way:
            self._backward_under_way = True
            queue_callback(self._after_backward)

    def _gradient_ready(self, index: int, _parameter: Tensor) -> None:
        if self._synchronises:
            self._backward_begins()
            with self._channel.waiting():
                self._algorithm.gradient_ready(index)

    def _after_backward(self) -> None:
        self._backward_under_way = False
        with self._channel.waiting():
            self._algorithm.after_backward()

    def _before_update(self, _: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise UserError(
                "BSP-SGD: step() was given a closure, whose backward passes would each exchange "
                "gradients; call step() without one, with an optimizer that needs none"
            )

    def _after_update(self, *_: Any) -> None:
        measuring = self.measuring
        with self._channel.waiting():
            self._algorithm.after_update()
        self._iterations += 1
        if self._iteration_start is not None:
            start_s, waited_s = self._iteration_start
            self._iteration_start = None
            if not measuring:
                whole_s = time.perf_counter() - start_s
                self._samples.append((self._channel.waited_s - waited_s, whole_s))


def _require_on(device: torch.device, module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise UserError(
                f"BSP-SGD: {name!r} is on {tensor.device}, and the group exchanges what is on "
                f"{device}; move the model, or give a group for that device: "
                "syncline.comm.groups.Group for the CPU, or "
                "syncline.comm.devices.DeviceGroup for a GPU"
            )


def _require(
    module: nn.Module, optimizer: Optimizer, algorithm: int, synchronise_every: int
) -> None:
    if algorithm not in (1, 2, 3):
        raise UserError(f"BSP-SGD has algorithms 1, 2 and 3, found {algorithm!r}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("BSP-SGD: no parameter of this model needs a gradient: nothing to train")
    if synchronise_every < 1:
        raise UserError(f"synchronise_every must be at least 1, found {synchronise_every}")
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UserError(
            f"the optimizer holds {len(foreign)} parameters that this model does not have, which "
            "BSP-SGD would never exchange; give it an optimizer of this model's parameters alone"
        )
