"""Reading trace files safely: streamed, unpacked, in bounded memory; errors name the file.

A trace may be a gigabyte long, packed with gzip, or cut off by a full disk. Every reader of this
package opens its file with :func:`open_trace` and reads it with :func:`text_lines` or
:func:`json_elements`, which do not hold the whole file. Errors in its content need not name the
file: :func:`open_trace` does.

JSON is decoded element by element with ``json.JSONDecoder.raw_decode``, which bounds the memory of
an element, knows the place of an error, and takes what profilers write: NaN, control characters and
broken UTF-8 in names, and a byte order mark. Elements without any of these are decoded many at once
by msgspec.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec

from syncline.errors import FileError, UserError, quoted
from syncline.plan.files import open_file, unique_members

ReadProgress = Callable[[int, int | None], None]
"""Called with the bytes read so far and, if known, those of the whole file; both as on disk."""

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 20
LARGEST_TRACE_BYTES = 4 << 30  # largest trace, unpacked: a small gzip file or a pipe may be endless
MOST_ELEMENTS = 10_000_000
"""Most lines of a text trace, or elements of an array: more take minutes to read."""
LONGEST_LINE_BYTES = 1 << 20  # longest line of a text format
LONGEST_ELEMENT = 1 << 25
"""Longest JSON element, in characters: bounds the memory that a broken file can take."""

WRITE_AGAIN = "record or copy it again"


@contextmanager
def in_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a :class:`UserError` about a file's content into a :class:`FileError` that names it."""
    try:
        yield
    except FileError:
        raise
    except UserError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None


@contextmanager
def open_trace(
    path: str | os.PathLike[str], *, progress: ReadProgress | None = None
) -> Iterator[BinaryIO]:
    """Open a trace for reading, unpacked if it is a gzip file (recognised by its content).

    Yields a buffered binary stream; a pipe works too. ``progress`` is called about once a mebibyte.
    A :class:`UserError` of the caller, while it has the file open, becomes a :class:`FileError`.
    """
    with in_file(path), open_file(path) as handle:
        status = os.fstat(handle.fileno())
        total_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        read_bytes = 0

        def from_disk(count: int) -> bytes:
            nonlocal read_bytes
            data = handle.read(count)
            read_bytes += len(data)
            if progress is not None:
                progress(read_bytes, total_bytes)
            return data

        stream = _buffered(from_disk)
        if stream.peek(2)[:2] == GZIP_MAGIC:
            stream = _buffered(gzip.GzipFile(fileobj=stream, mode="rb").read1)
        if not stream.peek(1):
            raise UserError(f"the file is empty; {WRITE_AGAIN}")
        yield stream


def _buffered(read: Callable[[int], bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Bounded(read), buffer_size=CHUNK_BYTES)


class _Bounded(io.RawIOBase):
    """A raw stream of the bytes that a function reads, up to the largest trace."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
        except EOFError:
            raise UserError(
                f"the gzip file ends too early, it is truncated; {WRITE_AGAIN}"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"broken gzip file ({error}); {WRITE_AGAIN}") from None
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}; check the disk and the path"
            ) from None
        self._read_bytes += len(data)
        if self._read_bytes > LARGEST_TRACE_BYTES:
            raise UserError(
                f"holds more than {LARGEST_TRACE_BYTES} bytes (unpacked), the most that is read of "
                "a trace; record fewer steps"
            )
        buffer[: len(data)] = data
        return len(data)


def _require_few(count: int, what: str) -> None:
    if count > MOST_ELEMENTS:
        raise UserError(
            f"holds more than {MOST_ELEMENTS} {what}, the most that is read of a trace; record "
            "fewer steps"
        )


def text_lines(stream: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield the place and the text, without line end, of each line that is not blank.

    The place is ``"line N"``, with which errors begin; N counts from 1.
    """
    number = 0
    while line := stream.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        _require_few(number, "lines")
        where = f"line {number}"
        if len(line) > LONGEST_LINE_BYTES:
            raise UserError(
                f"{where} is longer than {LONGEST_LINE_BYTES} bytes; this is not a text trace"
            )
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not text ({error.reason} at byte {error.start}); "
                "is this the right file?"
            ) from None
        if text.strip():
            yield where, text


JsonElement = tuple[str, int | None, Any]
"""The key of a member (empty where the file is one array), the position in its array or None for a
whole member, and the value."""


def json_elements(stream: BinaryIO, arrays: Collection[str]) -> Iterator[JsonElement]:
    """Yield a JSON file piece by piece, in the order of the file.

    Linear in the file; holds one chunk and one element. Bytes that are not UTF-8 become U+FFFD:
    they occur in names, which are only shown.

    The arrays of the top-level members ``arrays`` are yielded element by element, as is a file that
    is itself one array; every other member is yielded whole.
    """
    scanner = _Scanner(stream)
    match scanner.peek():
        case "[":
            yield from scanner.elements("")
        case "{":
            yield from scanner.members(arrays)
        case "":
            raise UserError(f"the file holds nothing but white space; {WRITE_AGAIN}")
        case _:
            raise UserError(
                f"expected JSON, found {scanner.excerpt()} at the beginning; is this the right "
                "file?"
            )
    if scanner.peek():
        raise scanner.error(f"expected the end of the file, found {scanner.excerpt()}")


def _decoded(elements: str) -> list[Any]:
    """Decode elements quickly; return none if they must be decoded one by one.

    If a name occurs twice in an object, the result has fewer colons when encoded again. Only an
    escaped colon could add one.
    """
    try:
        found: list[Any] = msgspec.json.decode(f"[{elements}]")
    except (msgspec.DecodeError, RecursionError):
        return []
    again = msgspec.json.encode(found)
    same = elements.count(":") == again.count(b":") and "\\u003" not in elements
    return found if same else []


class _Scanner:
    """A JSON text read chunk by chunk."""

    _SPACE = re.compile(r"[ \t\r\n]*")
    _BETWEEN = re.compile(r"}[ \t\r\n]*,[ \t\r\n]*{")
    _AFTER_NUMBER = frozenset(" \t\r\n,]}")

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        # "sig": some editors put a byte order mark before the text.
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        # strict=False: names may hold raw control characters.
        self._decode = json.JSONDecoder(strict=False, object_pairs_hook=unique_members).raw_decode
        self._text = ""
        self._position = 0
        self._dropped = 0
        self._ended = False
        self._last = ""  # the item before the next comma, in messages
        self._between = ""  # the text between the last element and the next, if both are objects

    def members(self, arrays: Collection[str]) -> Iterator[JsonElement]:
        names: set[str] = set()
        for _ in self._items("{}"):
            key = self._value("the top-level object")
            if not isinstance(key, str):
                raise self.error(f"expected the name of a member, found {quoted(key)}")
            if key in names:
                raise self.error(f"{quoted(key)} occurs twice in the top-level object")
            names.add(key)
            _require_few(len(names), "members")
            self._take(":", f"in {quoted(key)}")
            if key in arrays and self.peek() == "[":
                yield from self.elements(key)
            else:
                yield key, None, self._value(quoted(key))
            self._last = quoted(key)

    def elements(self, key: str) -> Iterator[JsonElement]:
        index = 0
        for _ in self._items("[]"):
            for value in self._whole() or [self._value(f"{key}[{index}]")]:
                yield key, index, value
                index += 1
            _require_few(index, f"elements of {quoted(key)}")
            self._last = f"{key}[{index - 1}]"

    def _items(self, brackets: str) -> Iterator[None]:
        """Skip brackets and commas; yield where the next item, or several, must be read."""
        self._take(brackets[0], "")
        comma = False
        while self.peek() != brackets[1]:
            if comma:
                self._take(",", f"after {self._last}")
            yield
            comma = True
        self._position += 1

    def _whole(self) -> list[Any]:
        """Return all elements that are whole in the pending text; none if that is not certain.

        They end at the last place with the same text as between the previous two elements. The text
        up to there is a valid array only if that place is between elements, too.
        """
        end = self._text.rfind(self._between) + 1 if self._between else 0
        self._between = ""
        found = _decoded(self._text[self._position : end]) if end > self._position else []
        if found:
            self._position = end
        return found

    def peek(self) -> str:
        """Skip white space and return the next character, or "" at the end of the file."""
        while True:
            self._position = self._SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._refill():
                return ""

    def _take(self, character: str, where: str) -> None:
        """Skip white space and this character."""
        found = self.peek()
        if not found:
            raise self._truncated(where)
        if found != character:
            raise self.error(f"expected {character!r} {where}, found {self.excerpt()}")
        self._position += 1

    def _value(self, place: str) -> Any:
        if not self.peek():
            raise self._truncated(f"in {place}")
        while True:
            begin = self._position
            try:
                value, end = self._decode(self._text, begin)
                if "\\ud" in self._text[begin:end].lower():  # perhaps half a surrogate pair
                    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
                    value = json.loads(text, object_pairs_hook=unique_members)
            except json.JSONDecodeError as error:
                if self._refill():
                    continue
                self._position += error.pos - begin  # refilling may have moved the text
                if self._position >= len(self._text) or "Unterminated" in error.msg:
                    raise self._truncated(f"in {place}") from None
                raise self.error(f"{error.msg} in {place}, near {self.excerpt()}") from None
            except RecursionError:
                raise self.error(f"values in {place} are nested too deeply") from None
            except ValueError as error:  # an integer of thousands of digits
                raise self.error(f"{error} in {place}") from None
            # A number may go on in the next chunk.
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and self._text[end : end + 1] not in self._AFTER_NUMBER and self._refill():
                continue
            self._position = end
            between = self._BETWEEN.match(self._text, end - 1)
            self._between = between[0] if between else ""
            return value

    def excerpt(self) -> str:
        return quoted(self._text[self._position : self._position + 20])

    def error(self, message: str) -> UserError:
        return UserError(
            f"not valid JSON at character {self._dropped + self._position}: {message}; "
            f"{WRITE_AGAIN}"
        )

    def _truncated(self, where: str) -> UserError:
        return UserError(
            f"the file ends {where}, it is truncated (was the recording process stopped while it "
            f"wrote?); {WRITE_AGAIN}"
        )

    def _refill(self) -> bool:
        """Read at least as much text as is pending; return whether there was any.

        An element that spans many chunks is decoded anew with each. Doubling the pending text keeps
        that linear.
        """
        if self._ended:
            return False
        self._dropped += self._position
        pending = self._text[self._position :]
        self._position = 0
        if len(pending) > LONGEST_ELEMENT:
            self._text = pending
            raise self.error(f"an element is longer than {LONGEST_ELEMENT} characters")
        more = ""
        while not more and not self._ended:  # a few bytes may not make a character yet
            data = self._stream.read(max(CHUNK_BYTES, len(pending)))
            self._ended = not data
            more = self._utf8.decode(data, final=self._ended)
        self._text = pending + more
        return bool(more)
