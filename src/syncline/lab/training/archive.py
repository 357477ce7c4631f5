"""Files of tensors: written whole or not at all, and checked when read; never pickled objects."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import torch
from torch import Tensor

from syncline.errors import FileError, quoted, shortened
from syncline.plan.files import replace_file, writing

T = TypeVar("T")

VERSION = 1

PARTIAL = ".partial"  # suffix of a file that is being written


def save_archive(path: Path, form: str, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values; an older file is replaced whole or not at all."""
    archive = {"format": form, "version": VERSION, **content}

    def write(file: BinaryIO) -> None:
        try:
            torch.save(archive, file)
        except RuntimeError as error:  # torch wraps the error of the disk
            raise _from_disk(error) or error from None
        file.flush()
        os.fsync(file.fileno())

    with writing(path, lambda: _size_bytes(archive)):
        replace_file(path, f"{path.name}{PARTIAL}", write)


def _from_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _size_bytes(archive: Mapping[str, Any]) -> int:
    counter = _Counter()
    torch.save(archive, counter)
    return counter.size_bytes


class _Counter(io.BytesIO):
    """Counts what is written to it, and keeps nothing."""

    size_bytes = 0

    def write(self, data: Any) -> int:
        self.size_bytes += len(data)
        return len(data)


def load_archive(path: Path, form: str, kind: type[T]) -> T:
    """Read a file that :func:`save_archive` wrote with this format, as a structure of ``kind``."""
    if not path.is_file():
        raise FileError(f"{path}: expected a checkpoint, found none; start without --resume")
    # A foreign archive may raise any error of zipfile, the unpickler or torch.
    try:
        damage = _damage_of(path)
    except Exception as error:
        raise FileError(
            f"{path}: not a checkpoint, or a truncated one: {_first_line(error)}"
        ) from error
    if damage is not None:
        raise FileError(f"{path}: damaged: {damage}")
    try:
        # Damage that torch warns about is either refused below or harmless.
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FileError(f"{path}: not a checkpoint of syncline: {_first_line(error)}") from error
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if not (isinstance(found, str) and found == form):  # a tensor is compared by element
        raise FileError(f"{path}: expected a file of format {form!r}, found {quoted(found)}")
    version = content.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise FileError(
            f"{path}: expected version {VERSION} of the checkpoint form, found {quoted(version)}; "
            "resume with the release that wrote it"
        )
    return converted(path, content, kind)


def converted(path: Path, content: dict[str, Any], kind: type[T]) -> T:
    """Return the content of a file as a structure of ``kind``, or raise a FileError."""
    try:
        # A tensor in place of a mapping makes torch warn before it fails.
        with warnings.catch_warnings(action="ignore"):
            return msgspec.convert(content, kind)
    # msgspec takes a tensor for a mapping, whose errors depend on msgspec's version. A pickled text
    # may hold what UTF-8 cannot encode.
    except (
        msgspec.ValidationError,
        AttributeError,
        IndexError,
        RecursionError,
        UnicodeEncodeError,
    ) as error:
        raise damaged(path, shortened(str(error))) from None


def _damage_of(path: Path) -> str | None:
    """Return what is wrong with an archive, or None; torch does not verify checksums."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # torch.save compresses nothing; a compressed part may unpack to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            return "its members are compressed, which those of a checkpoint are not"
        if sum(member.file_size for member in members) > path.stat().st_size:
            return "its members are larger than the file"
        broken = archive.testzip()
    return None if broken is None else f"the checksum of {quoted(broken)} is wrong"


def _first_line(error: Exception) -> str:
    return shortened((str(error).splitlines() or [type(error).__name__])[0])


def damaged(path: Path, problem: str) -> FileError:
    """Return the error for a file whose content cannot be used."""
    return FileError(
        f"{path}: damaged: {problem}; resume from another checkpoint, or start anew without "
        "--resume"
    )


def is_plain(value: Tensor) -> bool:
    """Return whether a loaded tensor is a dense one on the CPU."""
    return value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
