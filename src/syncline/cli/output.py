"""Failures to write standard output raise an error of ours, whichever library was writing."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, cast

from syncline.errors import SynclineError, UserError

CLOSED_PIPE = 128 + 13  # what a shell reports for a command that SIGPIPE ended


class OutputError(SynclineError):
    """Standard output could not be written: its disk is full, or its reader has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"standard output cannot be written: {error.strerror}; the rest was not printed"
        )
        self.exit_code = CLOSED_PIPE if error.errno == errno.EPIPE else 1


class _Output(io.FileIO):
    """Raises :class:`OutputError`; click and rich would exit silently on a broken pipe."""

    def write(self, data: object, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise OutputError(error) from None


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Raise :class:`OutputError` if standard output cannot be written, at the latest at the end."""
    before = sys.stdout
    if before is None:  # the next file that is opened would get its descriptor
        raise UserError("standard output is closed; send it to a file, or to /dev/null")
    if not (before is sys.__stdout__ and isinstance(before, io.TextIOWrapper)):
        yield  # within a test, or a program that calls this one
        return
    _open_standard_descriptors()
    raw = _Output(before.fileno(), "w", closefd=False)
    unbuffered = isinstance(before.buffer, io.FileIO)  # PYTHONUNBUFFERED
    output = io.TextIOWrapper(
        cast("BinaryIO", raw) if unbuffered else io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=unbuffered,
    )
    sys.stdout = output
    try:
        yield
    finally:
        sys.stdout = before
        try:
            output.flush()
        except OutputError:
            # Python flushes once more at exit: let that succeed.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, before.fileno())
            os.close(nothing)
            raise


def _open_standard_descriptors() -> None:
    """Open standard input and error if closed: a file of ours would get their descriptors."""
    for descriptor in (0, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free one, mostly this
            os.dup2(opened, descriptor)
            os.set_inheritable(descriptor, True)
