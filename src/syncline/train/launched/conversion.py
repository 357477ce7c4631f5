"""What ``syncline run`` does in the processes of a script: it converts wrapped models.

``syncline advise`` observes the first of them instead.

Only ``forward`` of torch's ``DistributedDataParallel`` is replaced, in this process alone. Its
first call that trains converts the wrapper to ours, in place. So what was done to it before, such
as registering a communication hook, is known.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncline.errors import MismatchError, UserError
from syncline.torch_private import TorchDDP, disable_dynamo
from syncline.train.compilation import compile_blocks
from syncline.train.launched.request import Request

if TYPE_CHECKING:
    from syncline.train.launched.observation import Observation

LIGHTNING = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


@functools.cache
def prepare() -> None:
    """Convert models from now on, as the environment variable asks; further calls do nothing."""
    request = Request.of_this_process()
    if request is None:
        return
    _Conversion(request).prepare()
    if request.compile_blocks:
        compile_blocks()


class _Conversion:
    """Converts each model of this process at its first forward pass that trains."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._left: weakref.WeakSet[TorchDDP] = weakref.WeakSet()
        """Models that were not converted and train as before."""
        self._converted = 0
        self._observation: Observation | None = None
        self._reported: list[Any] = []

    def prepare(self) -> None:
        Ddp: Any = TorchDDP  # noqa: N806 - a class, whose method is replaced
        stock = Ddp.forward

        @disable_dynamo(recursive=False)  # as torch's own: only the module is compiled
        @functools.wraps(stock)
        def forward(wrapper: TorchDDP, *inputs: Any, **kwargs: Any) -> Any:
            is_known = hasattr(wrapper, "_training") or wrapper in self._left
            if not is_known and self._trains(wrapper):
                if self._convert(wrapper):
                    return wrapper.forward(*inputs, **kwargs)
                self._left.add(wrapper)
            observation = self._observation
            if observation is not None and observation.model is wrapper and self._trains(wrapper):
                self._observe(observation)
            return stock(wrapper, *inputs, **kwargs)

        Ddp.forward = forward
        atexit.register(self._end)

    def _trains(self, wrapper: TorchDDP) -> bool:
        # Not the wrapper's mode: after evaluation, Lightning resets only the module's.
        return torch.is_grad_enabled() and bool(wrapper.module.training)

    @disable_dynamo
    def _convert(self, wrapper: TorchDDP) -> bool:
        """Convert a wrapper to ours; if that is impossible, warn on rank 0 with the reason."""
        # Imported here, so that processes that train nothing need not wait for it.
        from syncline.train.ddp import DistributedDataParallel
        from syncline.train.log import about, warn

        asked = self._request
        if asked.advises and self._converted:
            return False  # only one model is observed
        try:
            if asked.advises:
                from syncline.train.launched.observation import Observation

                self._observation = Observation(wrapper, asked)
            else:
                DistributedDataParallel.convert(
                    wrapper,
                    planner=asked.planner,
                    check=asked.check,
                    compression=asked.compression,
                    cache=asked.cache,
                    overlap_optimizers=True,
                )
        except (UserError, MismatchError) as error:
            warn(about(wrapper.module, f"this model was not converted: {error}"))
            return False
        self._converted += 1
        _follow_lightning()
        if asked.report is not None and dist.get_rank() == 0:
            self._reported.append(wrapper)
        return True

    @disable_dynamo
    def _observe(self, observation: Observation) -> None:
        observation.poll()
        if observation.is_over:
            self._observation = None

    def _end(self) -> None:
        """Write the reports; say if no model was wrapped. On rank 0."""
        if self._observation is not None:
            self._observation.end()
        for number, wrapper in enumerate(self._reported):
            name = f"-{number + 1}" if number else ""
            path = wrapper.save_report(Path(f"{self._request.report}{name}"))
            print(f"syncline run: report written to {path}", file=sys.stderr)
        if not (self._converted or self._left) and dist.is_initialized() and not dist.get_rank():
            print(
                "syncline run: no model was trained in torch's DistributedDataParallel, so nothing "
                "was changed",
                file=sys.stderr,
            )


@functools.cache
def _follow_lightning() -> None:
    """Make Lightning's strategies, if loaded, notify our wrapper of backward passes.

    With manual optimization, Lightning prepares torch's reducer itself before each of them.
    """
    for name in LIGHTNING:
        if name in sys.modules:
            _follow(sys.modules[name].DDPStrategy)


def _follow(strategy_class: Any) -> None:
    own = strategy_class.pre_backward

    @functools.wraps(own)
    def pre_backward(strategy: Any, closure_loss: Any) -> None:
        own(strategy, closure_loss)
        expect_manual_backward(strategy, closure_loss)

    strategy_class.pre_backward = pre_backward


def expect_manual_backward(strategy: Any, loss: Any) -> None:
    """Prepare our wrapper for a backward pass, if a Lightning strategy optimizes it manually."""
    from syncline.train.ddp import DistributedDataParallel

    model = strategy.model
    if (
        isinstance(model, DistributedDataParallel)
        and model.require_backward_grad_sync
        and not strategy.lightning_module.automatic_optimization
    ):
        model.expect_backward(loss)
