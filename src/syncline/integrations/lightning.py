"""Lightning: ``Trainer(strategy="syncline")`` exchanges gradients by plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from syncline.train.ddp import DistributedDataParallel
from syncline.train.launched.conversion import expect_manual_backward

OPTIONS = frozenset({"planner", "plan", "profile", "network", "check", "compression", "cache"})


class SynclineStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy``, planned and overlapped.

    Rank 0 logs ``syncline/...`` (see ``DistributedDataParallel.metrics``) as often as the Trainer
    logs, and writes the report into ``syncline`` in the logger's folder when fitting ends.

    Args:
        arguments: those of ``DDPStrategy``, and ``planner``, ``plan`` and so on of
            ``syncline.DistributedDataParallel``; with ``shard=True`` each rank keeps the
            optimizers' state for its share of the parameters, and checkpoints hold all of it.
    """

    strategy_name = "syncline"

    def __init__(self, **arguments: Any) -> None:
        self._options = {name: arguments.pop(name) for name in OPTIONS & arguments.keys()}
        self._shard = bool(arguments.pop("shard", False))
        self._report_in: Path | None = None
        super().__init__(**arguments)

    def setup(self, trainer: Trainer) -> None:
        """Prepare a run, and overlap the optimizers if it fits a model."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert isinstance(self.model, DistributedDataParallel)
            for optimizer in self.optimizers:
                self.model.overlap(optimizer, shard=self._shard)
            folder = trainer.log_dir or trainer.default_root_dir
            self._report_in = Path(folder) / "syncline"

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint; that of a sharded one only on rank 0."""
        if self._shard and isinstance(self.model, DistributedDataParallel):
            return self.model.full_state_dict(optimizer)
        return super().optimizer_state(optimizer)

    def configure_ddp(self) -> None:
        """Wrap the model in torch's class, as usual, and plan its exchange."""
        super().configure_ddp()
        assert isinstance(self.model, TorchDDP)
        DistributedDataParallel.convert(self.model, **self._options)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare a backward pass; with manual optimization, the forward pass could not do so."""
        super().pre_backward(closure_loss)
        expect_manual_backward(self, closure_loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log the metrics of the last steps."""
        super().on_train_batch_start(batch, batch_idx)
        model = self.model
        if not (self.is_global_zero and isinstance(model, DistributedDataParallel)):
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        every: int = getattr(trainer, "log_every_n_steps", 0)
        if every and trainer.global_step % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(model.metrics(), step=trainer.global_step)

    def teardown(self) -> None:
        """Write the report, then end the run."""
        if self._shard and self.lightning_module is not None:
            # Lightning moves the module with its gradients, which no rank has in full.
            self.lightning_module.zero_grad()
        if (
            self.is_global_zero
            and self._report_in is not None
            and isinstance(self.model, DistributedDataParallel)
        ):
            self.model.save_report(self._report_in)
        super().teardown()


StrategyRegistry.register(
    SynclineStrategy.strategy_name,
    SynclineStrategy,
    description="DDP with measured, planned and overlapped gradient exchange",
    override=True,
)
