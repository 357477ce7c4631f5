"""Files: read in bounded memory, and written whole or not at all, at the place the user meant.

In a folder that others can write to, such as ``/tmp``, somebody else may have put a link or a pipe
where a file is to be written. So links are followed here one by one, and only if this user or root
has made them.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import os
import secrets
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from syncline.errors import FileError, quoted


def open_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file or a pipe for reading, unbuffered; raise FileError if it is neither."""
    try:
        file = io.FileIO(path, "r")
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise FileError(f"{path}: this is a folder; name a file in it") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except ValueError:
        raise FileError(f"{quoted(str(path))}: not a path; it holds a null character") from None
    mode = os.fstat(file.fileno()).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        file.close()
        raise FileError(f"{path}: this is a device; name a regular file or a pipe")
    return file


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int) -> bytes:
    """Return the content of a file or pipe; raise FileError for more than ``most_bytes``, too."""
    with io.BufferedReader(open_file(path)) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}; check the disk") from None
    if len(content) > most_bytes:
        raise FileError(
            f"{path}: holds more than {most_bytes} bytes, the most that is read of such a file; "
            "is this the right file?"
        )
    return content


def unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as ``object_pairs_hook``; raise FileError if a name occurs twice."""
    found = dict(members)
    if len(found) < len(members):
        twice, _ = Counter(name for name, _ in members).most_common(1)[0]
        raise FileError(f"{quoted(twice)} occurs twice in one object; leave one of them out")
    return found


def write_atomically(path: Path, content: bytes | str, *, regular: bool = False) -> None:
    """Write ``content``, text as UTF-8, to ``path`` through a temporary file in the same folder.

    A file that is replaced keeps its mode. A pipe or a device such as ``/dev/stdout`` is written to
    directly, which waits for a reader; with ``regular`` it is refused. Raise FileError if it cannot
    be written, or somebody else's link or pipe is in the way.
    """
    content = content.encode() if isinstance(content, str) else content
    with writing(path, lambda: len(content)), _place_of(path) as (folder, name, status):
        if status is None or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            partial = f".{name}.{secrets.token_hex(8)}"
            _replace(folder, name, partial, status, lambda file: file.write(content))
        elif regular:
            raise FileError(f"{path}: expected a regular file, found a pipe or a device")
        else:
            flags = os.O_WRONLY | os.O_NOCTTY
            with open(os.open(name, flags, dir_fd=folder), "wb") as file:  # noqa: PTH123
                file.write(content)


def replace_file(path: Path, partial: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a regular file as ``partial`` in the folder of ``path``, then rename it to ``path``.

    A ``partial`` that a killed process has left behind is removed first. Raise FileError if
    somebody else's link is in the way, and OSError if it cannot be written.
    """
    with _place_of(path) as (folder, name, status):
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)
        _replace(folder, name, partial, status, write)


@lru_cache(maxsize=1)
def release() -> str:
    """Return the version of Syncline that runs."""
    return importlib.metadata.version("syncline")


def user_cache(*inside: str) -> Path | None:
    """Return a path in the user's folder for caches, or that folder; None: there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():  # the XDG standard says to ignore others
        return Path(cache, *inside)
    try:
        return Path.home().joinpath(".cache", *inside)
    except RuntimeError:
        return None


def require_own_folder(folder: Path) -> None:
    """Raise FileError if another user's link decides which folder this is."""
    with _place_of(folder):
        pass


@contextmanager
def writing(path: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn an :class:`OSError` into a :class:`FileError`, on a full disk with the bytes needed."""
    try:
        yield
    except OSError as error:
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = (
                f": {needed_bytes()} bytes are needed in the folder {path.absolute().parent}; make "
                "room there, or write elsewhere"
            )
        raise FileError(f"{path}: cannot be written: {error.strerror or error}{room}") from None


MOST_LINKS = 40  # as many as the kernel follows


@contextmanager
def _place_of(path: Path) -> Iterator[tuple[int, str, os.stat_result | None]]:
    """Follow links; yield the open folder, the name in it, and its status (None: nothing there).

    The status is that of a link only if the link leads to a pipe or a device.
    """
    folder, links = os.open(path.anchor or ".", os.O_PATH), 0
    parts = deque(path.parts[1:] if path.anchor else path.parts or ".")
    try:
        while True:
            name = parts.popleft()
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                status = None
            link = status is not None and stat.S_ISLNK(status.st_mode)
            if status is not None and (link or _is_special(status)):
                _require_own(path, name, status, folder)
            if status is not None and link and (parts or not _leads_to_special(name, folder)):
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = Path(os.readlink(name, dir_fd=folder))
                parts.extendleft(reversed(target.parts))
                continue
            if not parts:
                yield folder, name, status
                return
            inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
    finally:
        os.close(folder)


def _is_special(status: os.stat_result) -> bool:
    return not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _leads_to_special(name: str, folder: int) -> bool:
    try:
        return _is_special(os.stat(name, dir_fd=folder))
    except FileNotFoundError:
        return False


def _require_own(path: Path, name: str, status: os.stat_result, folder: int) -> None:
    """Require a link, a pipe or a device that nobody but this user or root can have put there."""
    around = os.fstat(folder)
    trusted = (os.geteuid(), Path("/").stat().st_uid)  # root's ID, also in a user namespace
    others_write = around.st_uid not in trusted or around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and status.st_uid not in trusted:
        kind = "link" if stat.S_ISLNK(status.st_mode) else "pipe or device"
        raise FileError(
            f"{path}: {quoted(name)} is a {kind} of user {status.st_uid} in a folder that others "
            "can write to, so it may lead anywhere; remove it, or write to a folder of your own"
        )


def _replace(
    folder: int,
    name: str,
    partial: str,
    status: os.stat_result | None,
    write: Callable[[BinaryIO], object],
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(partial, flags, 0o666 if status is None else 0o600, dir_fd=folder)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123
            if status is not None:
                own = status.st_uid == os.geteuid()
                os.fchmod(handle, status.st_mode & (0o777 if own else 0o644))
            write(file)
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)
        raise
