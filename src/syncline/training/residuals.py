"""What compression leaves behind on every worker, in files beside the checkpoint.

Each worker writes its own file, named by the step; then rank 0 writes the checkpoint, which names
them, and removes those of the checkpoint before. So whatever is killed when, the checkpoint that is
there has all its files. What a kill has left of a file is removed when training begins again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.errors import FileError
from syncline.sparse.session import resharded
from syncline.training.archive import PARTIAL, load_archive, save_archive

__all__ = [
    "drop_states",
    "drop_unfinished",
    "load_state",
    "require_states",
    "save_state",
    "state_names",
]

PREFIX = "compression-"
FORMAT = "syncline/compression"


def state_names(step: int, workers: int) -> list[str]:
    """Return the names of the files of all workers after a step."""
    return [f"{PREFIX}{step}-{rank}.pt" for rank in range(workers)]


def save_state(folder: Path, step: int, state: Mapping[str, Any], *, rank: int) -> None:
    """Write the state of one worker.

    Raises:
        FileError: the folder cannot be written to.
    """
    name = state_names(step, rank + 1)[rank]
    save_archive(folder / name, {"format": FORMAT, "state": dict(state)})


def load_state(
    folder: Path, names: Sequence[str], *, rank: int, workers: int, steps_per_epoch: int
) -> Mapping[str, Any]:
    """Return the state with which a worker goes on.

    With another number of workers, what is left of the gradients is shared out among them, and the
    warm-up, which is by epochs, goes on where it was: an epoch then has other steps.

    Raises:
        FileError: a file is missing, damaged or not Syncline's.
        MismatchError: the files are not all of one checkpoint.
    """
    if len(names) == workers:
        return _read(folder / names[rank])
    state = resharded([_read(folder / name) for name in names], workers)[rank]
    recipe = state["recipe"]
    if not recipe["warmup_steps"]:
        return state
    step = state["step"] * steps_per_epoch // recipe["warmup_steps"]
    return {**state, "recipe": {**recipe, "warmup_steps": steps_per_epoch}, "step": step}


def require_states(folder: Path, names: Sequence[str]) -> None:
    """Make sure that the files are there.

    Raises:
        FileError: one is not.
    """
    for name in names:
        if not (folder / name).is_file():
            raise FileError(
                f"{folder / name}: expected what compression has left of the gradients, found no "
                "file; copy all files of the checkpoint's folder, or start anew without --resume"
            )


def drop_states(folder: Path, kept: Sequence[str]) -> None:
    """Remove the files of other checkpoints."""
    for path in folder.glob(f"{PREFIX}*.pt"):
        if path.name not in kept:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def drop_unfinished(folder: Path) -> None:
    """Remove what is left of files that were being written when workers were killed.

    Call it where nobody writes: before the first checkpoint of a training.
    """
    for path in folder.glob(f"{PREFIX}*{PARTIAL}"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    content = load_archive(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FileError(f"{path}: expected a file of format {FORMAT!r}")
    state = content.get("state")
    if not isinstance(state, dict):
        raise FileError(f"{path}: expected a state, found {type(state).__name__}")
    return state
