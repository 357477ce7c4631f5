"""The training loop of one worker."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from syncline.lab.training.checkpoint import Checkpoint, load_checkpoint, settings_of
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.data.sampling import Batch, seed_from
from syncline.lab.training.group import Worker, process_group
from syncline.lab.training.progress import Snapshot, TrainingProgress
from syncline.lab.training.replica import Replica, sgd
from syncline.lab.training.residuals import drop_states, load_state, save_state, state_names
from syncline.lab.training.result import BASELINE, SYNCLINE, record
from syncline.lab.training.task import Task, task_of
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.recipe import hook_for
from syncline.plan.run import Run
from syncline.train.ddp import DistributedDataParallel
from syncline.train.engine.recording import exchange_in


def train(
    config: TrainingConfig, progress: TrainingProgress | None = None, store: str | None = None
) -> Run:
    """Train as one worker of a job that torchrun, or ``syncline train``, has started.

    Rank 0 writes the checkpoints and the report, and shows how training goes if it has a
    ``progress``. ``store`` is as for :func:`~syncline.lab.training.group.process_group`.

    Raises:
        UserError: the data, a plan or a checkpoint does not fit, or training diverged.
        PeerError: another worker was lost.
    """
    with process_group(config, store) as worker:
        shown = progress if progress is not None and worker.rank == 0 else TrainingProgress()
        try:
            return _prepare(config, worker, shown).run()
        finally:
            shown.close()


def _prepare(config: TrainingConfig, worker: Worker, progress: TrainingProgress) -> Training:
    """Load the data, build the replicas, and restore the checkpoint if training is resumed."""
    task = task_of(config)
    if config.baseline and worker.device.type == "cuda":
        _compute_deterministically()
    torch.manual_seed(config.seed)
    module = task.build().to(worker.device)
    checkpoint = None
    if config.checkpoint is not None and config.resume:
        path, checkpoint = load_checkpoint(Path(config.checkpoint))
        checkpoint.check(path, config, task.classes, module)
        module.load_state_dict(checkpoint.weights)
    baseline = None
    if config.baseline:
        baseline = task.build().to(worker.device)
        baseline.load_state_dict(module.state_dict())
    # From here on the workers draw different numbers, or all would drop out the same units.
    torch.manual_seed(seed_from(config.seed, worker.rank))

    optimizer = sgd(module, config)
    compression = config.recipe(task.steps_per_epoch)
    ddp = DistributedDataParallel(
        module,
        planner=config.planner,
        plan=None if config.plan is None else Plan.load(config.plan),
        profile=None if config.profile is None else Profile.load(config.profile),
        network=None if config.network is None else Network.load(config.network),
        check=config.check,
        compression=compression,
        cache=config.cache or False,
        device_ids=worker.device_ids,
    )
    replica = partial(Replica, task=task, config=config, worker=worker)
    replicas = [replica(name=SYNCLINE, ddp=ddp, optimizer=optimizer)]
    if baseline is not None:
        under_torch = TorchDistributedDataParallel(baseline, device_ids=worker.device_ids)
        if isinstance(compression, str):
            assert dist.group.WORLD is not None
            hook = exchange_in(hook_for(compression), dist.group.WORLD)
            under_torch.register_comm_hook(None, hook)
        replicas.append(replica(name=BASELINE, ddp=under_torch, optimizer=sgd(baseline, config)))
    training = Training(
        config=config, worker=worker, task=task, ddp=ddp, replicas=replicas, progress=progress
    )
    if checkpoint is not None:
        training.restore(checkpoint)
    if config.checkpoint is not None and worker.rank == 0:
        kept = None if checkpoint is None else checkpoint.compression_files
        drop_states(Path(config.checkpoint), kept)
    return training


def _compute_deterministically() -> None:
    """Have replicas on a GPU compute the same bits from the same numbers.

    Many of CUDA's algorithms add in an order that varies, and training multiplies the difference.
    torch warns of an operation that has no deterministic one.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nobody reads memory before it is written here, so it need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass(slots=True, kw_only=True, eq=False)
class Training:
    """A running training."""

    config: TrainingConfig
    worker: Worker
    task: Task
    ddp: DistributedDataParallel
    replicas: list[Replica]  # that of ``ddp`` first; then, for comparison, the DDP baseline
    progress: TrainingProgress
    epoch: int = 0
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    _phase: tuple[str, str] = ("", "")  # the phase of the last step, and its text
    _swaps: Iterator[bool] = field(default_factory=lambda: itertools.cycle((False, True)))
    """Whether the baseline goes first in the next block."""

    def run(self) -> Run:
        """Train to the end; return the record."""
        while self.step < self._total_steps:
            self._run_epoch()
        self.figures |= self.replicas[0].evaluate(final=True)
        self.figures |= {"epochs": float(self.epoch), "steps": float(self.step)}
        return record(self.replicas, self.figures)

    @property
    def _total_steps(self) -> int:
        steps = self.config.hyper.epochs * self.task.steps_per_epoch
        return steps if self.config.steps is None else min(steps, self.config.steps)

    def _run_epoch(self) -> None:
        for replica in self.replicas:
            replica.start_epoch()
        start = time.perf_counter()
        losses: list[float] = []
        for block, swapped in zip(self._blocks(), self._swaps, strict=False):
            block_start = time.perf_counter()
            # Replicas go first alternately, so that neither always finds the batches in the caches,
            # or always follows an evaluation.
            order = self.replicas[::-1] if swapped else self.replicas
            by_name = {r.name: r.run_block(block, beside_another=len(order) > 1) for r in order}
            losses += by_name[SYNCLINE]
            self.step += len(block)
            rate = len(block) * self.config.samples_per_step / (time.perf_counter() - block_start)
            self.progress.step(self.snapshot(losses[-1], rate))
        rate = len(losses) * self.config.samples_per_step / (time.perf_counter() - start)
        mean = self.worker.sum(sum(losses) / len(losses))[0] / self.worker.workers
        now = self.snapshot(mean, rate)
        # An epoch that --steps cut short is not done; a training resumed later repeats it.
        if len(losses) == self.task.steps_per_epoch:
            self.epoch += 1
            self._save()
        figures = self.replicas[0].evaluate()
        self.progress.epoch(now, figures)
        self.figures = {**figures, "training loss": mean}

    def _blocks(self) -> Iterator[list[tuple[Batch, ...]]]:
        size = self.config.block_steps if len(self.replicas) > 1 else 1
        steps = self.task.steps(self.epoch, self.worker)
        left = itertools.islice(steps, self._total_steps - self.step)
        while block := list(itertools.islice(left, size)):
            yield block

    def snapshot(self, loss: float, samples_per_s: float) -> Snapshot:
        """Return where training is."""
        phase = self.ddp.phase
        if phase != self._phase[0]:
            self._phase = phase, self.ddp.run_record().phase_text(phase)
        return Snapshot(
            epoch=self.epoch + 1,
            epochs=self.config.hyper.epochs,
            step=self.step,
            steps=self._total_steps,
            loss=loss,
            samples_per_s=samples_per_s,
            exposed_s=self.ddp.exposed_communication_s,
            phase=self._phase[1],
        )

    def _save(self) -> None:
        if self.config.checkpoint is None:
            return
        replica = self.replicas[0]
        replica.synchronize()
        states = [self.worker.gather(state) for state in replica.random_state]
        optimizer = replica.optimizer_state()
        folder, worker = Path(self.config.checkpoint), self.worker
        files: list[str] = []
        if self.config.compression is not None:
            files = state_names(self.step, worker.workers)
            save_state(folder / files[worker.rank], self.ddp.compression_state_dict())
            worker.barrier()  # all files are there before the checkpoint names them
        if worker.rank > 0:
            return
        Checkpoint(
            settings=settings_of(self.config, self.task.classes),
            epoch=self.epoch,
            step=self.step,
            weights={name: w.cpu() for name, w in replica.module.state_dict().items()},
            optimizer=optimizer,
            random_states=[list(of_rank) for of_rank in zip(*states, strict=True)],
            compression_files=files,
        ).save(folder)
        drop_states(folder, files)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where ``checkpoint`` was written; the weights are loaded already."""
        self.epoch, self.step = checkpoint.epoch, checkpoint.step
        worker = self.worker
        if len(checkpoint.random_states) != worker.workers:
            # With another number of workers, an epoch has another number of steps.
            self.step = self.epoch * self.task.steps_per_epoch
        if checkpoint.compression_files:
            assert self.config.checkpoint is not None
            self.ddp.load_compression_state_dict(
                load_state(
                    Path(self.config.checkpoint),
                    checkpoint.compression_files,
                    rank=worker.rank,
                    workers=worker.workers,
                    steps_per_epoch=self.task.steps_per_epoch,
                )
            )
        for replica in self.replicas:
            checkpoint.load_optimizer(replica.optimizer)
            # The schedule depends only on the steps done.
            replica.schedule.last_epoch = self.step
            replica.schedule._step_count = self.step + 1
            if len(checkpoint.random_states) != worker.workers:
                continue  # every worker keeps a new random state of its own
            stored = checkpoint.random_states[worker.rank]
            # A checkpoint of a training on CPUs has no state for the generator of a GPU.
            replica.random_state[: len(stored)] = stored[: len(replica.random_state)]
