"""Lightning's manual optimization, which prepares torch's reducer itself before each backward pass.

Ours must be told, as by the adapter for Lightning. So the class of the strategy gets one more line,
in this process alone, where a script has imported Lightning.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from syncline.train.ddp import DistributedDataParallel

MODULES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


@functools.cache
def follow_lightning() -> None:
    """Let the strategies that are loaded tell our wrapper of backward passes; once is enough."""
    for name in MODULES:
        if name in sys.modules:
            _follow(sys.modules[name].DDPStrategy)


def _follow(strategy_class: Any) -> None:
    own = strategy_class.pre_backward

    @functools.wraps(own)
    def pre_backward(strategy: Any, closure_loss: Any) -> None:
        own(strategy, closure_loss)
        model = strategy.model
        if (
            isinstance(model, DistributedDataParallel)
            and model.require_backward_grad_sync
            and not strategy.lightning_module.automatic_optimization
        ):
            model.expect_backward(closure_loss)

    strategy_class.pre_backward = pre_backward
