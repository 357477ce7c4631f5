"""What is trained: the data cut into steps, the loss of a batch, and the evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.data import load_images, load_text, sampling
from syncline.lab.training.data.images import ImageData
from syncline.lab.training.data.sampling import Batch
from syncline.lab.training.data.text import TextData
from syncline.lab.training.group import Worker
from syncline.lab.training.models import ImageModel, TextModel, model_named

EVALUATION_BATCH = 128  # images a forward pass in evaluation, where no gradients take memory

Memory = Any  # state that a recurrent model carries between windows, in its own form; or None


def _shape(config: TrainingConfig) -> sampling.StepShape:
    return sampling.StepShape(config.workers, config.hyper.batch_size, config.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTask:
    """Classification of images."""

    config: TrainingConfig
    model: ImageModel
    data: ImageData

    @property
    def classes(self) -> int:
        """The classes of the images."""
        return self.data.classes

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        return sampling.steps_in_epoch(len(self.data.train), _shape(self.config))

    def build(self) -> nn.Module:
        """Return a freshly initialised model."""
        return self.model.build(self.data.image_size, self.data.classes)

    def steps(self, epoch: int, worker: Worker) -> Iterator[tuple[Batch, ...]]:
        """Yield the shuffled and augmented images of one worker, by optimizer step."""
        seed, rank, images = self.config.seed, worker.rank, self.data.train
        shape = _shape(self.config)
        shard = sampling.training_shard(len(images), shape, rank=rank, seed=seed, epoch=epoch)
        batches = (
            tuple(
                images.batch(part, augment_seed=sampling.seed_from(seed, epoch, step, index, rank))
                for index, part in enumerate(parts)
            )
            for step, parts in enumerate(shard)
        )
        return sampling.prefetched(batches) if self.data.decodes else batches

    def loss(self, model: nn.Module, batch: Batch, _memory: Memory) -> tuple[Tensor, Memory]:
        """Return the mean cross entropy; images carry nothing over."""
        return functional.cross_entropy(model(batch.inputs), batch.targets), None

    def evaluate(
        self, model: nn.Module, worker: Worker, *, final: bool = False
    ) -> dict[str, float]:
        """Return the test accuracy (0 to 1) and the test loss; no figure is only a final one."""
        if final:
            return {}
        shard = sampling.evaluation_shard(
            len(self.data.test), workers=worker.workers, rank=worker.rank
        )
        correct = loss = 0.0
        # A worker has no share in an evaluation of fewer images than there are workers.
        parts = torch.split(shard, EVALUATION_BATCH) if len(shard) else ()
        batches = (self.data.test.batch(part, augment_seed=None) for part in parts)
        for batch in sampling.prefetched(batches) if self.data.decodes else batches:
            targets = batch.targets.to(worker.device)
            logits = model(batch.inputs.to(worker.device)).float()
            loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
            correct += int((logits.argmax(1) == targets).sum())
        loss, correct, count = worker.sum(loss, correct, len(shard))
        return {"test accuracy": correct / count, "test loss": loss / count}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """Prediction of the next token of a text."""

    config: TrainingConfig
    model: TextModel
    data: TextData

    @property
    def classes(self) -> int:
        """The size of the vocabulary."""
        return self.data.vocabulary

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        shape = _shape(self.config)
        return sampling.windows_in_epoch(len(self.data.train), shape, window=self.model.window)

    def build(self) -> nn.Module:
        """Return a freshly initialised model."""
        return self.model.build(self.data.vocabulary)

    def steps(self, epoch: int, worker: Worker) -> Iterator[tuple[Batch, ...]]:
        """Yield the windows of one worker, by optimizer step, in the order of the text."""
        return sampling.training_windows(
            self.data.train,
            _shape(self.config),
            rank=worker.rank,
            window=self.model.window,
            seed=self.config.seed,
            epoch=epoch,
        )

    def loss(self, model: nn.Module, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the mean cross entropy a token and a recurrent model's state, detached."""
        logits, memory = self._logits(model, batch.inputs, memory)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()), memory

    def evaluate(
        self, model: nn.Module, worker: Worker, *, final: bool = False
    ) -> dict[str, float]:
        """Return the perplexity on the validation text, or on the test text if there is one."""
        stream = self.data.test if final else self.data.validation
        if stream is None:
            return {}
        loss = tokens = 0.0
        memory: Memory = None
        for batch in sampling.evaluation_windows(
            stream, workers=worker.workers, rank=worker.rank, window=self.model.window
        ):
            logits, memory = self._logits(model, batch.inputs.to(worker.device), memory)
            targets = batch.targets.to(worker.device).flatten()
            flat = logits.float().flatten(0, 1)
            loss += float(functional.cross_entropy(flat, targets, reduction="sum"))
            tokens += len(targets)
        loss, tokens = worker.sum(loss, tokens)
        # Unlike math.exp, torch's returns infinity where a float overflows.
        perplexity = torch.tensor(loss / tokens, dtype=torch.float64).exp()
        return {f"{'test' if final else 'validation'} perplexity": float(perplexity)}

    def _logits(self, model: nn.Module, inputs: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        if not self.model.carries_state:
            return model(inputs), None
        logits, state = model(inputs, memory)
        return logits, tuple(part.detach() for part in state)


Task = ImageTask | TextTask
"""Both have the same methods. All workers take part in an evaluation and get the same figures; a
final one is over data that is used only once, after training."""


def task_of(config: TrainingConfig) -> Task:
    """Load the data of a configuration, or raise a UserError if model and data do not fit."""
    model = model_named(config.model)
    if isinstance(model, ImageModel):
        images = load_images(config.data, config.data_dir, model)
        return ImageTask(config=config, model=model, data=images)
    return TextTask(config=config, model=model, data=load_text(config.data, config.data_dir, model))
