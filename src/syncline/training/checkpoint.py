"""Checkpoints: the state between two epochs, written whole or not at all, and checked when read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from syncline.errors import FileError, MismatchError, UserError, quoted
from syncline.training.archive import load_archive, save_archive
from syncline.training.config import TrainingConfig
from syncline.training.residuals import require_states

__all__ = ["FILE_NAME", "Checkpoint", "load_checkpoint", "settings_of"]

FILE_NAME = "checkpoint.pt"
FORMAT = "syncline/checkpoint"
VERSION = 1

SETTINGS = ("model", "data", "workers", "seed", "precision", "accumulate")
"""What must be as it was for a training to go on as if it had never stopped."""

FREE_HYPERPARAMETERS = ("epochs",)
"""A training may be made longer; the learning rate then follows the new number of epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A training after a number of whole epochs."""

    settings: dict[str, Any]
    """See :func:`settings_of`."""
    epoch: int
    """Epochs done."""
    step: int
    """Optimizer steps done."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    random_states: list[list[Tensor]]
    """Of each rank, the states of its generators."""
    compression_files: list[str] = field(default_factory=list)
    """Of each rank, what compression has left behind; see :mod:`syncline.training.residuals`."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint into ``folder``; an older one is replaced whole or not at all.

        Raises:
            FileError: the folder cannot be written to.
        """
        content = {"format": FORMAT, "version": VERSION}
        content |= {name: getattr(self, name) for name in self.__slots__}
        save_archive(folder / FILE_NAME, content)

    def check(self, path: Path, config: TrainingConfig, classes: int, module: nn.Module) -> None:
        """Make sure that a training can go on from here.

        Args:
            path: where the checkpoint was read, for messages.
            config: of the training that is to go on.
            classes: of its data.
            module: its model; only names and shapes are looked at.

        Raises:
            MismatchError: it is of another model, data set or setting.
            UserError: all epochs, or all steps asked for, are done.
        """
        for name, expected in settings_of(config, classes).items():
            found = self.settings.get(name)
            if name == "workers" and config.is_sparse:
                continue  # what is left of the gradients is shared out
            if found != expected:
                raise MismatchError(
                    f"{path}: this training has {name} {quoted(expected)}, the checkpoint is of "
                    "one with "
                    f"{name} {quoted(found)}; give the options of that one, or start anew without "
                    "--resume"
                )
        require_states(path.parent, self.compression_files)
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        stored = {name: tuple(value.shape) for name, value in self.weights.items()}
        for name in sorted(shapes.keys() | stored.keys()):
            if shapes.get(name) != stored.get(name):
                raise MismatchError(
                    f"{path}: {quoted(name)} has shape {shapes.get(name)} in this model, "
                    f"{stored.get(name)} in the checkpoint (None: it is not there); the checkpoint "
                    "was written by another release"
                )
        if self.epoch >= config.hyper.epochs:
            raise UserError(
                f"{path}: {self.epoch} epochs are done and --epochs is {config.hyper.epochs}; "
                "raise it to train on"
            )
        if config.steps is not None and self.step >= config.steps:
            raise UserError(
                f"{path}: {self.step} steps are done and --steps is {config.steps}; raise it to "
                "train on"
            )


def settings_of(config: TrainingConfig, classes: int) -> dict[str, Any]:
    """Return the settings that a checkpoint is bound to, as plain values by name."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    hyper = msgspec.to_builtins(config.hyper)
    settings |= {name: hyper[name] for name in hyper if name not in FREE_HYPERPARAMETERS}
    return {**settings, "compression": config.compression_told, "classes": classes}


def load_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """Read the checkpoint in ``folder``; return its path and what it holds.

    Raises:
        FileError: there is none, or it is damaged, or it is not Syncline's.
    """
    path = folder / FILE_NAME
    content = load_archive(path)
    return path, _checkpoint_from(content, path)


_TYPES: dict[str, type] = {
    "settings": dict,
    "epoch": int,
    "step": int,
    "weights": dict,
    "optimizer": dict,
    "schedule": dict,
    "random_states": list,
    "compression_files": list,
}


def _checkpoint_from(content: object, path: Path) -> Checkpoint:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise FileError(f"{path}: expected a file of format {FORMAT!r}, found {quoted(found)}")
    if content.get("version") != VERSION:
        raise FileError(
            f"{path}: expected version {VERSION} of the checkpoint form, found "
            f"{content.get('version')!r}; resume with the release that wrote it"
        )
    content.setdefault("compression_files", [])  # of releases without compression
    for name, expected in _TYPES.items():
        if not isinstance(content.get(name), expected):
            found = type(content.get(name)).__name__
            raise FileError(f"{path}: expected {name} of type {expected.__name__}, found {found}")
    return Checkpoint(**{name: content[name] for name in _TYPES})
