"""Reading files that users name: regular files and pipes only, and never more than a limit."""

from __future__ import annotations

import io
import os
import stat

from syncline.errors import FileError, quoted

__all__ = ["open_file", "read_bytes"]


def open_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file or a pipe for reading, unbuffered.

    Raises:
        FileError: it is missing, a folder or a device, or cannot be opened.
    """
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
    """Return the content of a regular file or a pipe.

    Raises:
        FileError: as for :func:`open_file`, and if there are more bytes or reading fails.
    """
    content = bytearray()
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size  # 0 of a pipe
        try:
            while size_bytes <= most_bytes and (part := file.read(1 << 20)):
                content += part
                size_bytes = max(size_bytes, len(content))
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}; check the disk") from None
    if size_bytes > most_bytes:
        raise FileError(
            f"{path}: holds more than {most_bytes} bytes, the most that is read of such a file; "
            "is this the right file?"
        )
    return bytes(content)
