"""A folder for everything temporary of one command and its workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["run_folder"]


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter; remove it at the end.

    Folders of commands that were killed are removed as well. Each command holds a lock on its
    folder, which the kernel releases whatever ends the process. Names are random, so that no other
    user can take them beforehand.
    """
    prefix = f"syncline-{os.getuid()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_unused(left)
    path, lock = _made(prefix)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _made(prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked: once more
            lock = _opened(path)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_if_unused(path: Path) -> None:
    try:
        lock = _opened(path)
    except OSError:
        return  # it has gone, or is another user's
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    except OSError:
        return  # it is in use, or lies where there are no locks
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    # What workers that are just being killed still write, the next start removes.
    shutil.rmtree(path, ignore_errors=True)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
