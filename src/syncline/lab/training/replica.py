"""One model in training: its DDP wrapper, optimizer, random state and the times of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from syncline.errors import UserError
from syncline.lab.training.config import Hyperparameters, TrainingConfig
from syncline.lab.training.data.sampling import Batch
from syncline.lab.training.group import Worker
from syncline.lab.training.task import Memory, Task
from syncline.train.ddp import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step took, and whether it counts as steady training."""

    seconds: float
    measuring: bool  # the step was one of those with which Syncline measures, or checks its plan
    first_of_block: bool  # the other replica trained just before; the caches hold its data


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """A model in training under one kind of wrapper.

    Interleaved replicas each keep their own random state, so that neither affects the other. Under
    Syncline's wrapper updates are deferred, unless the configuration says otherwise.
    """

    name: str
    ddp: TorchDistributedDataParallel
    optimizer: SGD
    task: Task
    config: TrainingConfig
    worker: Worker
    schedule: LambdaLR = field(init=False)
    random_state: list[Tensor] = field(init=False)
    times: list[StepTime] = field(init=False, default_factory=list)
    synchronizing_s: float = field(init=False, default=0.0)
    """Seconds spent on finishing the last update of each block, so that the other replica's block
    does not pay for it. Within a block, each step finishes the update of the step before."""
    _memory: Memory = field(init=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.ddp, DistributedDataParallel):
            if self.config.step_ahead:
                self.ddp.step_ahead(self.optimizer)
            elif self.config.overlap:
                self.ddp.overlap(self.optimizer, shard=self.config.shard)
        self.schedule = scheduler(self.optimizer, self.task.steps_per_epoch, self.config.hyper)
        self.random_state = random_state(self.worker.device)

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper."""
        module: nn.Module = self.ddp.module
        return module

    def start_epoch(self) -> None:
        """Drop the state carried from window to window: the text starts again."""
        self._memory = None

    def run_block(self, block: Sequence[tuple[Batch, ...]], *, beside_another: bool) -> list[float]:
        """Take a step with each group of batches; return this worker's losses.

        ``beside_another`` says whether it is interleaved with another replica. A loss that is no
        finite number is a UserError.
        """
        losses: list[float] = []
        if beside_another:
            self.ddp.train()
        with self._own_random_state():
            for index, batches in enumerate(block):
                measuring = self._measuring()
                start = time.perf_counter()
                loss = self._step(batches)
                self.worker.synchronize()
                step = StepTime(
                    seconds=time.perf_counter() - start,
                    measuring=measuring or self._measuring(),
                    first_of_block=beside_another and index == 0,
                )
                self.times.append(step)
                losses.append(self._checked(float(loss)))
        if beside_another:
            start = time.perf_counter()
            self.synchronize()
            self.synchronizing_s += time.perf_counter() - start
            self.ddp.eval()  # so that Syncline does not count the other replica's block
        return losses

    def optimizer_state(self) -> Any:
        """Return the optimizer's state (of a sharded one, on rank 0 alone); all workers call it."""
        if self.config.shard and isinstance(self.ddp, DistributedDataParallel):
            return self.ddp.full_state_dict(self.optimizer)
        return self.optimizer.state_dict()

    def synchronize(self) -> None:
        """Finish the update that the last step left to the next forward pass."""
        if isinstance(self.ddp, DistributedDataParallel):
            self.ddp.synchronize()
        self.worker.synchronize()

    def _step(self, batches: tuple[Batch, ...]) -> Tensor:
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.worker.device)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else self.ddp.no_sync():
                part = self._loss(batch) / len(batches)
                part.backward()
            loss += part.detach()
        if self.config.hyper.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.config.hyper.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        return loss

    def _loss(self, batch: Batch) -> Tensor:
        batch = Batch(*(tensor.to(self.worker.device) for tensor in batch))
        with self.worker.autocast(self.config.precision):
            loss, self._memory = self.task.loss(self.ddp, batch, self._memory)
        return loss

    def evaluate(self, *, final: bool = False) -> dict[str, float]:
        """Return the task's figures of merit; the ``final`` ones are computed after training."""
        self.synchronize()
        # Every worker has its own statistics of batch norm, and DDP broadcasts those of rank 0 in
        # the next forward pass. These are the model's, so all workers evaluate with them.
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)
        self.ddp.eval()
        try:
            precision = self.worker.autocast(self.config.precision)
            with torch.no_grad(), self._own_random_state(), precision:
                return self.task.evaluate(self.module, self.worker, final=final)
        finally:
            self.ddp.train()

    def _measuring(self) -> bool:
        return bool(getattr(self.ddp, "measuring", False))

    def _checked(self, loss: float) -> float:
        if math.isfinite(loss):
            return loss
        raise UserError(
            f"training diverged: the loss of {self.name} on rank {self.worker.rank} is {loss} "
            f"after {len(self.times)} steps; lower --lr (now {self.config.hyper.learning_rate}), "
            "or add --warmup-epochs or --clip-norm"
        )

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        with torch.random.fork_rng(self.worker.device_ids or []):
            set_random_state(self.random_state, self.worker.device)
            yield
            self.random_state = random_state(self.worker.device)


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators: the CPU's and, on a GPU, that GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    """Set the states that :func:`random_state` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def sgd(module: nn.Module, config: TrainingConfig) -> SGD:
    """Return the optimizer of a module."""
    return SGD(
        module.parameters(),
        lr=config.hyper.learning_rate,
        momentum=config.hyper.momentum,
        weight_decay=config.hyper.weight_decay,
    )


DROPS = (0.5, 0.75)  # parts of a training; He et al., section 4.2: 32k and 48k of 64k iterations


def learning_rate_factor(step: int, steps_per_epoch: int, hyper: Hyperparameters) -> float:
    """Return the factor of the learning rate at a step.

    It rises linearly over the warm-up. From there on ``constant`` keeps it, ``step`` divides it by
    ten after half and after three quarters of the training, and ``cosine`` lets it fall to 0 along
    half a period.
    """
    warmup_steps = hyper.warmup_epochs * steps_per_epoch
    if step + 1 < warmup_steps:
        return (step + 1) / warmup_steps
    total_steps = hyper.epochs * steps_per_epoch
    if hyper.schedule == "step":
        return 0.1 ** sum(step >= drop * total_steps for drop in DROPS)
    if hyper.schedule == "cosine":
        part = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return 0.5 * (1 + math.cos(math.pi * min(max(part, 0.0), 1.0)))
    return 1.0


def scheduler(optimizer: Optimizer, steps_per_epoch: int, hyper: Hyperparameters) -> LambdaLR:
    """Return the scheduler that applies :func:`learning_rate_factor`, stepped every step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps_per_epoch, hyper))
