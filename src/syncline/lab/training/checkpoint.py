"""Checkpoints: the state between two epochs, written whole or not at all, and checked when read."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim import SGD

from syncline.errors import MismatchError, UserError, quoted
from syncline.lab.training.archive import damaged, is_plain, load_archive, save_archive
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.residuals import require_states, state_names

FILE_NAME = "checkpoint.pt"
FORMAT = "syncline/checkpoint"

SETTINGS = ("model", "data", "workers", "seed", "precision", "accumulate")
"""Settings that must be unchanged for a training to continue as if it had never stopped."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Group(TypedDict):
    """The settings of an optimizer that change in training."""

    lr: Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class OptimizerState(TypedDict):
    """The part of an optimizer's ``state_dict`` that is read."""

    state: dict[int, dict[str, Tensor | None]]
    param_groups: Annotated[list[Group], Meta(min_length=1, max_length=1)]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A training after a number of whole epochs."""

    settings: dict[str, Any]  # see :func:`settings_of`
    epoch: Count
    step: Count
    weights: dict[str, Tensor]
    optimizer: OptimizerState
    random_states: list[Annotated[list[Tensor], Meta(min_length=1, max_length=2)]]
    """For each rank, the states of its generators: the CPU's and, on a GPU, that GPU's."""
    compression_files: list[str] = []  # by rank: the file of its residuals; see residuals.py

    def save(self, folder: Path) -> None:
        """Write the checkpoint into ``folder``; an older one is replaced whole or not at all."""
        save_archive(folder / FILE_NAME, FORMAT, msgspec.structs.asdict(self))

    def check(self, path: Path, config: TrainingConfig, classes: int, module: nn.Module) -> None:
        """Make sure that a training with this configuration and model can continue from here.

        Of ``module``, only names and shapes are checked; ``path`` is for messages.

        Raises:
            MismatchError: it is of another model, data set or setting.
            FileError: a part of it is damaged.
            UserError: all epochs, or all steps asked for, are done.
        """
        for name, expected in settings_of(config, classes).items():
            found = self.settings.get(name)
            if name == "workers" and (config.is_sparse or config.compression == "int8"):
                continue  # residuals are redistributed
            if isinstance(found, Tensor) or found != expected:
                raise MismatchError(
                    f"{path}: this training has {name} {quoted(expected)}, the checkpoint is of "
                    f"one with {name} {quoted(found)}; give the options of that one, or start anew "
                    "without --resume"
                )
        if not all(map(is_plain, self.weights.values())):
            raise damaged(path, "not all weights are dense tensors")
        forms, stored = _forms(module.state_dict()), _forms(self.weights)
        for name in sorted(forms.keys() | stored.keys()):
            if forms.get(name) != stored.get(name):
                raise MismatchError(
                    f"{path}: {quoted(name)} is {forms.get(name)} in this model, "
                    f"{stored.get(name)} in the checkpoint (None: it is not there); the checkpoint "
                    "was written by another release"
                )
        self._require_whole(path, list(module.parameters()))
        require_states(path.parent, self.compression_files)
        limits = (("epochs", self.epoch, config.hyper.epochs), ("steps", self.step, config.steps))
        for what, done, most in limits:
            if most is not None and done >= most:
                raise UserError(
                    f"{path}: {done} {what} are done and --{what} is {most}; raise it to train on"
                )

    def _require_whole(self, path: Path, parameters: list[nn.Parameter]) -> None:
        """Make sure that every part can be loaded, so that loading does not fail halfway."""
        for index, state in self.optimizer["state"].items():
            fits = 0 <= index < len(parameters) and all(
                t is None or (is_plain(t) and t.shape == parameters[index].shape)
                for t in state.values()
            )
            if not fits:
                raise damaged(path, "the state of the optimizer is of other parameters")
        ranks = len(self.random_states)
        if ranks != self.settings.get("workers") or not all(map(_are_usable, self.random_states)):
            raise damaged(path, "the states of the random generators are not those of all workers")
        if self.compression_files not in ([], state_names(self.step, ranks)):
            raise damaged(path, f"the files of compression are not those of step {self.step}")

    def load_optimizer(self, optimizer: SGD) -> None:
        """Give a new optimizer the momentum and the learning rate of the one that was saved."""
        (group,) = optimizer.param_groups
        group = {**group, "params": [*range(len(group["params"]))]}
        (saved,) = self.optimizer["param_groups"]
        # The optimizer keeps the tensors that it is given, and replicas must not share them.
        state = copy.deepcopy(self.optimizer["state"])
        optimizer.load_state_dict({"state": state, "param_groups": [{**group, **saved}]})


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the type and shape of each tensor, such as ``torch.float32 (64, 3)``."""
    return {name: f"{value.dtype} {tuple(value.shape)}" for name, value in tensors.items()}


def _are_usable(states: list[Tensor]) -> bool:
    """Return whether the random generators of a worker accept these states."""
    most = torch.get_rng_state().numel()
    if not all(is_plain(s) and s.dtype == torch.uint8 and s.numel() <= most for s in states):
        return False
    try:
        torch.Generator().set_state(states[0].contiguous())
    except RuntimeError:
        return False
    return True


def settings_of(config: TrainingConfig, classes: int) -> dict[str, Any]:
    """Return the settings that a resumed training must share, as plain values by name."""
    hyper = msgspec.to_builtins(config.hyper)
    # A training may be made longer; the learning rate then follows the new number of epochs.
    del hyper["epochs"]
    settings = {name: getattr(config, name) for name in SETTINGS} | hyper
    return {**settings, "compression": config.compression_text, "classes": classes}


def load_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """Read the checkpoint in ``folder``; return its path and what it holds, if it is whole."""
    path = folder / FILE_NAME
    return path, load_archive(path, FORMAT, Checkpoint)
