"""Reading and writing of Syncline's JSON files: one header, strict validation, atomic writes.

A file is one JSON object: the fields of the noun after ``"format": "syncline/<kind>"`` and
``"version": <int>``. Unknown fields, missing fields, wrong types, NaN and infinity are refused with
the path of the offending value. Never pickle.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from syncline.errors import FileError

__all__ = [
    "Document",
    "Value",
    "read_document",
    "read_json_object",
    "write_atomically",
    "write_text_atomically",
]

FORMAT_PREFIX = "syncline/"


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen, validated records that documents are made of."""


class Document(Value, frozen=True, kw_only=True):
    """A noun that has a versioned JSON file form.

    Subclasses set ``KIND`` (the name in the header) and ``VERSION`` (raised when the form changes).
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int]

    def to_json(self) -> str:
        """Return the document as indented JSON text with its header."""
        body = msgspec.to_builtins(self)
        header = {"format": FORMAT_PREFIX + self.KIND, "version": self.VERSION}
        text = msgspec.json.encode({**header, **body})
        return msgspec.json.format(text, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "<string>") -> Self:
        """Parse and validate JSON text.

        Args:
            text: the JSON text.
            source: where the text came from, for error messages.

        Raises:
            FileError: the text is not valid JSON, is of another kind or version, or a value is
                missing, unknown, of the wrong type or out of its range.
        """
        return cls._from_object(_parse_object(text, source), source)

    @classmethod
    def _from_object(cls, fields: dict[str, Any], source: str) -> Self:
        kind = _kind_of(fields, source)
        if kind != cls.KIND:
            raise FileError(
                f"{source}: expected a {cls.KIND} file, this is a {kind} file; "
                f"see what it holds with 'syncline show {source}'"
            )
        version = fields.get("version")
        if type(version) is not int or version != cls.VERSION:
            raise FileError(
                f"{source}: expected version {cls.VERSION} of the {cls.KIND} form, the file has "
                f"version {version!r}; write it again with this release of syncline"
            )
        body = {k: v for k, v in fields.items() if k not in ("format", "version")}
        try:
            return msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise FileError(
                f"{source}: not a valid {cls.KIND} file: {error}; "
                "correct it there, or write the file again with this release of syncline"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document to ``path``; an existing file is replaced whole or not at all.

        Raises:
            FileError: the folder does not exist or cannot be written.
        """
        write_text_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and validate the document at ``path``.

        Raises:
            FileError: as for :meth:`from_json`, and when the file cannot be read.
        """
        return cls._from_object(read_json_object(path), str(path))


def read_document(path: str | os.PathLike[str], kinds: tuple[type[Document], ...]) -> Document:
    """Read whichever of ``kinds`` the file's header names.

    Raises:
        FileError: the file cannot be read or is of none of the kinds.
    """
    fields = read_json_object(path)
    kind = _kind_of(fields, str(path))
    for cls in kinds:
        if kind == cls.KIND:
            return cls._from_object(fields, str(path))
    known = ", ".join(sorted(cls.KIND for cls in kinds))
    raise FileError(f"{path}: unknown kind of file {kind!r}; this release reads: {known}")


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in the file at ``path``.

    Raises:
        FileError: the file cannot be read or does not hold one JSON object.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except ValueError:
        raise FileError(f"{str(path)!r}: not a path; it holds a null character") from None
    return _parse_object(text, str(path))


def _parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FileError(
            f"{source}: not valid JSON ({error}); the file is truncated or was edited by hand: "
            "write it again"
        ) from None
    if not isinstance(fields, dict):
        raise FileError(
            f"{source}: expected a JSON object, found {type(fields).__name__}; "
            "this is not a file that syncline wrote"
        )
    return fields


def _kind_of(fields: dict[str, Any], source: str) -> str:
    header = fields.get("format")
    if not isinstance(header, str) or not header.startswith(FORMAT_PREFIX):
        raise FileError(
            f'{source}: not a syncline file: expected "format": "{FORMAT_PREFIX}...", '
            f"found {header!r}"
        )
    return header.removeprefix(FORMAT_PREFIX)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, as :func:`write_atomically` does.

    Raises:
        FileError: the folder does not exist or cannot be written.
    """
    write_atomically(path, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file in the same folder.

    Raises:
        FileError: the folder does not exist or cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FileError(f"{path}: cannot be written: {error.strerror}") from None
        raise
