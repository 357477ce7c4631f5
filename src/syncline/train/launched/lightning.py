"""Lightning's manual optimization, which prepares torch's reducer itself before each backward pass.

Our wrapper must be notified of it, as the adapter for Lightning does. So if a script has imported
Lightning, ``pre_backward`` of its strategy class is extended, in this process alone.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from syncline.train.ddp import DistributedDataParallel

MODULES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


@functools.cache
def follow_lightning() -> None:
    """Make the loaded strategies notify our wrapper of backward passes; idempotent."""
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
