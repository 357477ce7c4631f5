"""Reading trace files safely: streamed, unpacked, in bounded memory, with errors that name them.

A trace may have a gigabyte, may be packed or not, and may have been cut off by a full disk. Every
reader of this package opens its file with :func:`open_trace` and takes its content with
:func:`text_lines` or :func:`json_elements`, none of which holds the whole file.

JSON is scanned with ``json.JSONDecoder.raw_decode``, element by element. It was measured as fast as
ijson with its C backend (about 150 MB/s), bounds the memory of a single element, knows the place of
an error, and reads what profilers really write: NaN, and control characters in names.
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
from typing import Any, BinaryIO, NamedTuple

from syncline.errors import FileError, quoted
from syncline.model.document import open_file

__all__ = ["JsonElement", "ReadProgress", "json_elements", "open_trace", "text_lines"]

ReadProgress = Callable[[int, int | None], None]
"""Called with the bytes of the file read so far and, if known, in all (both as on disk)."""

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 20
LARGEST_TRACE_BYTES = 4 << 30
"""Largest trace, unpacked: a small gzip file or a pipe may be endless."""
LONGEST_LINE_BYTES = 1 << 20
"""Longest line of a text format."""
LONGEST_ELEMENT = 1 << 25
"""Longest JSON element, in characters: bounds the memory that a broken file can take."""

WRITE_AGAIN = "record or copy it again"


@contextmanager
def open_trace(
    path: str | os.PathLike[str], *, progress: ReadProgress | None = None
) -> Iterator[BinaryIO]:
    """Open a trace for reading, unpacked if it is a gzip file (recognised by its content).

    Yields a buffered binary stream; a pipe works too. ``progress`` is called about once a mebibyte.

    Raises:
        FileError: the file is missing, empty, no file, cannot be read, or, while it is being read,
            turns out to be truncated, broken, or larger than 4 GiB.
    """
    source = str(path)
    with open_file(path) as handle:
        status = os.fstat(handle.fileno())
        total_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        read_bytes = 0

        def from_disk(count: int) -> bytes:
            nonlocal read_bytes
            try:
                data = handle.read(count)
            except OSError as error:
                raise FileError(
                    f"{source}: cannot be read: {error.strerror}; check the disk and the path"
                ) from None
            read_bytes += len(data)
            if progress is not None:
                progress(read_bytes, total_bytes)
            return data

        stream = _Bounded(from_disk, source).buffered()
        if stream.peek(2)[:2] == GZIP_MAGIC:
            packed = gzip.GzipFile(fileobj=stream, mode="rb")
            stream = _Bounded(lambda count: _unpacked(packed, count, source), source).buffered()
        if not stream.peek(1):
            raise FileError(f"{source}: the file is empty; {WRITE_AGAIN}")
        yield stream


def _unpacked(packed: gzip.GzipFile, count: int, source: str) -> bytes:
    try:
        return packed.read1(count)
    except EOFError:
        raise FileError(
            f"{source}: the gzip file ends too early, it is truncated; {WRITE_AGAIN}"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FileError(f"{source}: broken gzip file ({error}); {WRITE_AGAIN}") from None


class _Bounded(io.RawIOBase):
    """What a function reads, as a raw stream that refuses to hold too much."""

    def __init__(self, read: Callable[[int], bytes], source: str) -> None:
        self._read = read
        self._source = source
        self._read_bytes = 0

    def buffered(self) -> io.BufferedReader:
        return io.BufferedReader(self, buffer_size=CHUNK_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        self._read_bytes += len(data)
        if self._read_bytes > LARGEST_TRACE_BYTES:
            raise FileError(
                f"{self._source}: holds more than {LARGEST_TRACE_BYTES} bytes (unpacked), the most "
                "that is read of a trace; record fewer steps"
            )
        buffer[: len(data)] = data
        return len(data)


def text_lines(stream: BinaryIO, source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, from 1, without line ends.

    Raises:
        FileError: a line is not UTF-8 text or longer than a mebibyte.
    """
    number = 0
    while line := stream.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        if len(line) > LONGEST_LINE_BYTES:
            raise FileError(
                f"{source}: line {number} is longer than {LONGEST_LINE_BYTES} bytes; "
                "this is not a text trace"
            )
        try:
            yield number, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise FileError(
                f"{source}: line {number} is not text ({error.reason} at byte {error.start}); "
                "is this the right file?"
            ) from None


class JsonElement(NamedTuple):
    """A piece of a JSON file: an element of a long array, or another member of the whole."""

    key: str
    """The member of the top-level object; empty where the file is one array."""
    place: int | None
    """Position in the array; None for a member that is not taken apart."""
    value: Any


def json_elements(stream: BinaryIO, source: str, arrays: Collection[str]) -> Iterator[JsonElement]:
    """Yield a JSON file piece by piece, in the order of the file.

    Linear in the file; holds one chunk and one element. Bytes that are not UTF-8 become U+FFFD:
    they occur in names, which are only shown.

    The arrays of the top-level members ``arrays`` are yielded element by element, as is a file that
    is itself one array; every other member is yielded whole.

    Raises:
        FileError: the file is no JSON object or array, is broken or truncated, is nested too
            deeply, or an element is longer than 32 Mi characters.
    """
    scanner = _Scanner(stream, source)
    first = scanner.peek()
    if first == "[":
        yield from _array(scanner, "")
    elif first == "{":
        yield from _object(scanner, arrays)
    elif first == "":
        raise FileError(f"{source}: the file holds nothing but white space; {WRITE_AGAIN}")
    else:
        raise FileError(
            f"{source}: expected JSON, found {quoted(scanner.excerpt())} at the beginning; "
            "is this the right file?"
        )
    if scanner.peek() != "":
        raise scanner.error(f"expected the end of the file, found {quoted(scanner.excerpt())}")


def _object(scanner: _Scanner, arrays: Collection[str]) -> Iterator[JsonElement]:
    after = "at the top"
    scanner.take("{", after)
    first = True
    while scanner.more("}", after, first=first):
        first = False
        key = scanner.value("at the top")
        if not isinstance(key, str):
            raise scanner.error(f"expected the name of a member, found {quoted(key)}")
        where, after = f"in {quoted(key)}", f"after {quoted(key)}"
        scanner.take(":", where)
        if key in arrays and scanner.peek() == "[":
            yield from _array(scanner, key)
        else:
            yield JsonElement(key, None, scanner.value(where))


def _array(scanner: _Scanner, key: str) -> Iterator[JsonElement]:
    scanner.take("[", f"in {quoted(key)}")
    index = 0
    while scanner.more("]", f"after {key}[{index - 1}]", first=index == 0):
        yield JsonElement(key, index, scanner.value(f"in {key}[{index}]"))
        index += 1


class _Scanner:
    """A JSON text read chunk by chunk."""

    _SPACE = re.compile(r"[ \t\r\n]*")
    _AFTER_NUMBER = frozenset(" \t\r\n,]}")

    def __init__(self, stream: BinaryIO, source: str) -> None:
        self._stream = stream
        self._source = source
        # "sig": some editors put a byte order mark before the text.
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        # strict=False: names may hold raw control characters.
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._text = ""
        self._position = 0
        self._dropped = 0
        self._ended = False

    def peek(self) -> str:
        """Skip white space and return the next character, or "" at the end of the file."""
        while True:
            self._position = self._SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._refill():
                return ""

    def take(self, character: str, where: str) -> None:
        """Skip white space and this character."""
        found = self.peek()
        if found != character:
            if found == "":
                raise self.truncated(where)
            raise self.error(f"expected {character!r} {where}, found {quoted(self.excerpt())}")
        self._position += 1

    def more(self, closing: str, where: str, *, first: bool) -> bool:
        """Skip the comma before the next item, or the closing bracket where there is none."""
        if self.peek() == closing:
            self.take(closing, where)
            return False
        if not first:
            self.take(",", where)
        return True

    def value(self, where: str) -> Any:
        if self.peek() == "":
            raise self.truncated(where)
        while True:
            begin = self._position
            try:
                value, end = self._decode(self._text, begin)
            except json.JSONDecodeError as error:
                if self._refill():
                    continue
                self._position += error.pos - begin  # refilling may have moved the text
                if self._position >= len(self._text) or "Unterminated" in error.msg:
                    raise self.truncated(where) from None
                raise self.error(f"{error.msg} {where}, near {quoted(self.excerpt())}") from None
            except RecursionError:
                raise self.error(f"values {where} are nested too deeply") from None
            except ValueError as error:  # an integer of thousands of digits
                raise self.error(f"{error} {where}") from None
            # A number may go on in the next chunk.
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and self._text[end : end + 1] not in self._AFTER_NUMBER and self._refill():
                continue
            self._position = end
            return value

    def excerpt(self) -> str:
        return self._text[self._position : self._position + 20]

    def error(self, message: str) -> FileError:
        return FileError(
            f"{self._source}: not valid JSON at character {self._dropped + self._position}: "
            f"{message}; {WRITE_AGAIN}"
        )

    def truncated(self, where: str) -> FileError:
        return FileError(
            f"{self._source}: the file ends {where}, it is truncated (was the recording process "
            f"stopped while it wrote?); {WRITE_AGAIN}"
        )

    def _refill(self) -> bool:
        """Read more text, at least as much as is pending; return whether there was any.

        As much as is pending: an element that spans many chunks is decoded anew with each, which
        doubling keeps linear.
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
