"""Files of tensors: written whole or not at all, and checked when read; never pickled objects."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from syncline.errors import FileError, quoted

__all__ = ["PARTIAL", "load_archive", "save_archive"]

PARTIAL = ".partial"
"""How the name of a file ends that is being written."""


def save_archive(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values; an older file is replaced whole or not at all.

    Raises:
        FileError: the folder cannot be written to.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        raise FileError(f"{path}: the checkpoint cannot be written: {error}") from error


def load_archive(path: Path) -> Any:
    """Return what :func:`save_archive` has written.

    Raises:
        FileError: the file is missing or damaged, or holds anything else.
    """
    if not path.is_file():
        raise FileError(f"{path}: expected a checkpoint, found none; start without --resume")
    try:
        # torch does not look at the checksums of its archive.
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise FileError(f"{path}: not a checkpoint, or a truncated one: {error}") from None
    if broken is not None:
        raise FileError(f"{path}: damaged: the checksum of {quoted(broken)} is wrong")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # A foreign archive fails in whatever way the unpickler, or torch, stumbles over it.
    except Exception as error:
        raise FileError(
            f"{path}: not a checkpoint of syncline: {str(error).splitlines()[0]}"
        ) from error
