"""Checkpoints: the state between two epochs, written whole or not at all, and checked when read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import SGD

from syncline.errors import FileError, MismatchError, UserError, quoted
from syncline.training.archive import damaged, has_format, is_plain, load_archive, save_archive
from syncline.training.config import TrainingConfig
from syncline.training.residuals import require_states, state_names
from syncline.training.wrap import sgd

__all__ = ["FILE_NAME", "Checkpoint", "load_checkpoint", "settings_of"]

FILE_NAME = "checkpoint.pt"
FORMAT = "syncline/checkpoint"
VERSION = 1

SETTINGS = ("model", "data", "workers", "seed", "precision", "accumulate")
"""What must be as it was for a training to go on as if it had never stopped."""

MOST_STEPS = 1 << 62
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
        """Make sure that a training with this configuration and model can go on from here.

        Of ``module`` only names and shapes are looked at; ``path`` is for messages.

        Raises:
            MismatchError: it is of another model, data set or setting.
            FileError: a part of it is damaged.
            UserError: all epochs, or all steps asked for, are done.
        """
        for name, expected in settings_of(config, classes).items():
            found = self.settings.get(name)
            if name == "workers" and config.is_sparse:
                continue  # what is left of the gradients is shared out
            if isinstance(found, Tensor) or found != expected:
                raise MismatchError(
                    f"{path}: this training has {name} {quoted(expected)}, the checkpoint is of "
                    f"one with {name} {quoted(found)}; give the options of that one, or start anew "
                    "without --resume"
                )
        if not all(isinstance(k, str) and is_plain(v) for k, v in self.weights.items()):
            raise damaged(path, "not all weights are dense tensors")
        forms, stored = _forms(module.state_dict()), _forms(self.weights)
        for name in sorted(forms.keys() | stored.keys()):
            if forms.get(name) != stored.get(name):
                raise MismatchError(
                    f"{path}: {quoted(name)} is {forms.get(name)} in this model, "
                    f"{stored.get(name)} in the checkpoint (None: it is not there); the checkpoint "
                    "was written by another release"
                )
        self._require_whole(path, sgd(module, config))
        require_states(path.parent, self.compression_files)
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

    def _require_whole(self, path: Path, optimizer: SGD) -> None:
        """Make sure that every part can be loaded, so that none fails when others are loaded.

        Raises:
            FileError: a part is of another form than :meth:`save` writes.
        """
        parameters = optimizer.param_groups[0]["params"]
        groups: Any = self.optimizer.get("param_groups")
        states: Any = self.optimizer.get("state")
        last_step, workers = self.schedule.get("last_epoch"), self.settings.get("workers")
        problem = None
        if not (0 <= self.epoch < MOST_STEPS and 0 <= self.step < MOST_STEPS):
            problem = f"{quoted(self.epoch)} epochs and {quoted(self.step)} steps are done"
        elif type(last_step) is not int or last_step != self.step:
            problem = (
                f"{self.step} steps are done, but {quoted(last_step)} of the learning rate's "
                "schedule"
            )
        elif not (isinstance(groups, list) and _same_settings(groups, optimizer)):
            problem = "the settings of the optimizer are of another one"
        elif not isinstance(states, dict) or not all(
            type(index) is int and 0 <= index < len(parameters) and _is_state(s, parameters[index])
            for index, s in states.items()
        ):
            problem = "the state of the optimizer is of other parameters"
        elif len(self.random_states) != workers or not all(
            map(_are_random_states, self.random_states)
        ):
            problem = "the states of the random generators are not those of all workers"
        elif not (
            all(isinstance(name, str) for name in self.compression_files)
            and self.compression_files in ([], state_names(self.step, len(self.random_states)))
        ):
            problem = f"the files of compression are not those of step {self.step}"
        if problem is not None:
            raise damaged(path, problem)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the type and shape of each tensor, such as ``torch.float32 (64, 3)``."""
    return {name: f"{value.dtype} {tuple(value.shape)}" for name, value in tensors.items()}


def _same_settings(groups: list[Any], optimizer: SGD) -> bool:
    """Return whether saved settings are those of the optimizer, but for the scheduled rate."""
    (own,) = optimizer.state_dict()["param_groups"]
    if len(groups) != 1 or not isinstance(groups[0], dict):
        return False
    (saved,) = groups
    if saved.keys() - {"initial_lr"} != own.keys() - {"initial_lr"}:
        return False
    rates = [saved.get("lr"), saved.get("initial_lr", 0.0)]
    same = all(
        type(saved[name]) is type(value) and saved[name] == value
        for name, value in own.items()
        if name not in ("lr", "initial_lr", "params")
    )
    indices = saved.get("params")
    return (
        same
        and isinstance(indices, list)
        and all(type(index) is int for index in indices)
        and indices == own["params"]
        and all(type(rate) in (int, float) and math.isfinite(rate) and rate >= 0 for rate in rates)
    )


def _is_state(state: object, parameter: Tensor) -> bool:
    """Return whether this is the optimizer's state of a parameter."""
    return isinstance(state, dict) and all(
        isinstance(name, str)
        and (value is None or (is_plain(value) and value.shape == parameter.shape))
        for name, value in state.items()
    )


def _are_random_states(states: object) -> bool:
    """Return whether torch's generators of a worker take these: the CPU's and maybe a GPU's."""
    own = torch.get_rng_state()
    if not (isinstance(states, list) and 1 <= len(states) <= 2 and all(map(is_plain, states))):
        return False
    if any(s.dtype != torch.uint8 or s.numel() > own.numel() for s in states):
        return False
    try:
        torch.Generator().set_state(states[0].contiguous())
    except RuntimeError:
        return False
    return True


def settings_of(config: TrainingConfig, classes: int) -> dict[str, Any]:
    """Return the settings that a checkpoint is bound to, as plain values by name."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    hyper = msgspec.to_builtins(config.hyper)
    settings |= {name: hyper[name] for name in hyper if name not in FREE_HYPERPARAMETERS}
    return {**settings, "compression": config.compression_text, "classes": classes}


_TYPES: dict[str, type] = {
    name: get_origin(kind) or kind for name, kind in get_type_hints(Checkpoint).items()
}


def load_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """Read the checkpoint in ``folder``; return its path and what it holds.

    Raises:
        FileError: there is none, or it is damaged, or it is not Syncline's.
    """
    path = folder / FILE_NAME
    content = load_archive(path)
    if not has_format(content, FORMAT):
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise FileError(f"{path}: expected a file of format {FORMAT!r}, found {quoted(found)}")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise FileError(
            f"{path}: expected version {VERSION} of the checkpoint form, found "
            f"{quoted(content.get('version'))}; resume with the release that wrote it"
        )
    content.setdefault("compression_files", [])  # of releases without compression
    for name, expected in _TYPES.items():
        value = content.get(name)
        if not isinstance(value, expected) or isinstance(value, bool):
            found = type(value).__name__
            raise FileError(f"{path}: expected {name} of type {expected.__name__}, found {found}")
    return path, Checkpoint(**{name: content[name] for name in _TYPES})
