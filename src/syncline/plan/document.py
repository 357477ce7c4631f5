"""Syncline's JSON files: one header, strict validation, atomic writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from syncline.errors import FileError, quoted, shortened
from syncline.plan.files import read_bytes, unique_members, write_atomically

FORMAT_PREFIX = "syncline/"
LONGEST_HEADER_BYTES = 1000  # longest format or version value in a header
LARGEST_FILE_BYTES = 64 << 20  # largest file that is read; decoding it takes less than 2 GB


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen, validated records that documents are made of."""


def described(text: str, metavar: str | None = None) -> msgspec.Meta:
    """Return an annotation with the help text of a field's option and the name of its value."""
    return msgspec.Meta(description=text, extra={"metavar": metavar})


class Document(Value, frozen=True, kw_only=True):
    """A record with a versioned JSON form, whose header names its ``KIND``."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]

    def to_json(self) -> str:
        """Return indented JSON text with a header."""
        body = msgspec.to_builtins(self)
        header = {"format": FORMAT_PREFIX + self.KIND, "version": self.VERSION}
        text = msgspec.json.encode({**header, **body})
        return msgspec.json.format(text, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "<string>") -> Self:
        """Parse and validate JSON text; errors call it ``source``.

        Raises:
            FileError: the text is not valid JSON, is of another kind or version, or a value is
                missing, unknown, of the wrong type or out of its range.
        """
        return cls._from_fields(_fields_of(text, source), source)

    @classmethod
    def _from_fields(cls, fields: dict[str, msgspec.Raw], source: str) -> Self:
        kind = _kind_of(fields, source)
        if kind != cls.KIND:
            raise FileError(
                f"{source}: expected a {cls.KIND} file, this is a {shortened(kind, 80)} file; "
                f"see what it holds with 'syncline show {source}'"
            )
        version = _header(fields, "version", source)
        if type(version) is not int or version != cls.VERSION:
            raise FileError(
                f"{source}: expected version {cls.VERSION} of the {cls.KIND} form, the file has "
                f"version {quoted(version)}; write it again with this release of syncline"
            )
        body = {k: v for k, v in fields.items() if k not in ("format", "version")}
        try:
            # Encoded again and decoded straight into the record: generic lists and dictionaries in
            # between would take thirty times the memory of the file.
            return msgspec.json.decode(msgspec.json.encode(body), type=cls)
        except msgspec.ValidationError as error:
            raise FileError(
                f"{source}: not a valid {cls.KIND} file: {shortened(str(error))}; "
                "correct it there, or write the file again with this release of syncline"
            ) from None
        except NOT_JSON as error:
            raise _not_json(error, source) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document, whole or not at all; raise :class:`FileError` if that fails."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and validate the document at ``path``; raise :class:`FileError` if it cannot be."""
        return cls._from_fields(_read_fields(path), str(path))


def read_document(path: str | os.PathLike[str], kinds: tuple[type[Document], ...]) -> Document:
    """Read whichever of ``kinds`` the file's header names; raise FileError if it is none."""
    fields = _read_fields(path)
    kind = _kind_of(fields, str(path))
    for cls in kinds:
        if kind == cls.KIND:
            return cls._from_fields(fields, str(path))
    known = ", ".join(sorted(cls.KIND for cls in kinds))
    raise FileError(f"{path}: unknown kind of file {quoted(kind)}; this release reads: {known}")


def _read_fields(path: str | os.PathLike[str]) -> dict[str, msgspec.Raw]:
    return _fields_of(read_bytes(path, most_bytes=LARGEST_FILE_BYTES), str(path))


NOT_JSON = (ValueError, RecursionError)
"""What decoders raise for bytes that are not JSON, or not of the type."""


def _fields_of(text: str | bytes, source: str) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, not yet decoded."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        json.loads(text, object_pairs_hook=_require_unique)  # msgspec keeps one of two values
        return fields
    except FileError as error:
        raise FileError(f"{source}: {error}") from None
    except msgspec.ValidationError as error:
        raise FileError(
            f"{source}: expected a JSON object ({error}); this is not a file that syncline wrote"
        ) from None
    except NOT_JSON as error:
        raise _not_json(error, source) from None


def _require_unique(members: list[tuple[str, Any]]) -> None:
    unique_members(members)  # only the check is needed: objects in objects would take memory


def _not_json(error: Exception, source: str) -> FileError:
    return FileError(
        f"{source}: not valid JSON ({error}): it is truncated, was edited by hand or is of another "
        "kind; write it again, unpack it, or see whether 'syncline trace info' knows it"
    )


def _header(fields: dict[str, msgspec.Raw], name: str, source: str) -> Any:
    text = bytes(fields.get(name, b"null"))
    if len(text) > LONGEST_HEADER_BYTES:
        return "..."
    try:
        return msgspec.json.decode(text)
    except NOT_JSON as error:
        raise _not_json(error, source) from None


def _kind_of(fields: dict[str, msgspec.Raw], source: str) -> str:
    header = _header(fields, "format", source)
    if not isinstance(header, str) or not header.startswith(FORMAT_PREFIX):
        raise FileError(
            f'{source}: not a syncline file: expected "format": "{FORMAT_PREFIX}...", '
            f"found {quoted(header)}"
        )
    return header.removeprefix(FORMAT_PREFIX)
