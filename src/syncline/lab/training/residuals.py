"""The residuals of compression on every worker, in files beside the checkpoint.

Each worker writes its own file, named by the step. Then rank 0 writes the checkpoint, which names
these files, and removes those of the checkpoint before. So the last checkpoint always has all its
files, whenever a rank is killed. Files that a kill left behind are removed when training restarts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from syncline.errors import FileError, quoted
from syncline.lab.training import archive
from syncline.plan.document import Value
from syncline.plan.recipe import Recipe
from syncline.train.sparse.residuals import resharded

OWN_NAME = re.compile(r"checkpoint\.pt\.partial|compression-[0-9]+-[0-9]+\.pt(\.partial)?")
"""Files that only this module and :mod:`syncline.lab.training.checkpoint` write."""
FORMAT = "syncline/compression"


def state_names(step: int, workers: int) -> list[str]:
    """Return the names of the files of all workers after a step."""
    return [f"compression-{step}-{rank}.pt" for rank in range(workers)]


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of one worker."""
    archive.save_archive(path, FORMAT, {"state": dict(state)})


def load_state(
    folder: Path, names: Sequence[str], *, rank: int, workers: int, steps_per_epoch: int
) -> Mapping[str, Any]:
    """Return the state with which a worker continues.

    With another number of workers, the residuals are redistributed among them. An epoch then has
    another number of steps, and the warm-up, which counts epochs, continues from its epoch.
    """
    if len(names) == workers:
        return _read(folder / names[rank])
    state = resharded([_read(folder / name) for name in names], workers)[rank]
    recipe = state["recipe"]
    if recipe == "int8" or not recipe["warmup_steps"]:
        return state
    step = state["step"] * steps_per_epoch // recipe["warmup_steps"]
    return {**state, "recipe": {**recipe, "warmup_steps": steps_per_epoch}, "step": step}


def require_states(folder: Path, names: Sequence[str]) -> None:
    """Raise a FileError if one of the files is not there."""
    for name in names:
        if not (folder / name).is_file():
            raise FileError(
                f"{folder / name}: expected a file with the residuals of compression, found none; "
                "copy all files of the checkpoint's folder, or start anew without --resume"
            )


def drop_states(folder: Path, kept: Sequence[str] | None) -> None:
    """Remove the files of other checkpoints, and partly written files.

    ``kept`` names the files of the present checkpoint; None keeps all that are whole. Files of
    other names stay. Call it while no rank writes: before the first step, or after a checkpoint.
    """
    for path in folder.iterdir():
        whole = not path.name.endswith(archive.PARTIAL)
        if OWN_NAME.fullmatch(path.name) and not (whole and (kept is None or path.name in kept)):
            path.unlink(missing_ok=True)


class _Rounded(Value, frozen=True, kw_only=True):
    """The state of an exchange in 16 bits; see ``syncline.train.engine.compression``."""

    compression: str
    steps: Annotated[int, Meta(ge=0)]
    decided: bool
    plan: str | None


class _Sparse(Value, frozen=True, kw_only=True):
    """The state of a sparse exchange (``syncline.train.sparse.session``), or of one in int8."""

    version: int
    recipe: Recipe | Literal["int8"]
    ranks: Annotated[int, Meta(ge=1)]
    rank: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=0)]
    scale: Annotated[float, Meta(gt=0)]
    residuals: dict[str, Tensor]
    velocities: dict[str, Tensor]
    rates: dict[str, Annotated[float, Meta(gt=0)]]
    decided: bool
    plan: str | None


class _File(msgspec.Struct, frozen=True):
    state: dict[str, Any]


def _read(path: Path) -> dict[str, Any]:
    state = archive.load_archive(path, FORMAT, _File).state
    if "recipe" not in state:
        archive.converted(path, state, _Rounded)
        return state
    read = archive.converted(path, state, _Sparse)
    for name, tensor in (*read.residuals.items(), *read.velocities.items()):
        if not archive.is_plain(tensor) or tensor.dtype != torch.float32 or tensor.dim() != 1:
            raise archive.damaged(path, f"the residual of {quoted(name)} is no vector of float32")
    return state
