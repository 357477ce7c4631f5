"""Where a report is written: a page alone, or a directory with the page and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from syncline.errors import FileError
from syncline.model.document import Document, write_text_atomically

__all__ = ["is_page", "made_directory", "require_place", "save_page"]


def require_place(target: Path) -> None:
    """Check where a report is to be written, before it takes long to make.

    Raises:
        FileError: the folder of a page is missing, or a directory would replace a file.
    """
    if is_page(target):
        if not target.parent.is_dir():
            raise FileError(
                f"{target}: cannot be written: there is no folder {target.parent}; make it, or "
                "choose another"
            )
    elif target.exists() and not target.is_dir():
        raise FileError(
            f"{target}: cannot be written: it is a file; name a folder, or a page such as "
            f"{target}.html"
        )


def is_page(target: Path) -> bool:
    """Return whether a name is that of a page rather than of a directory."""
    return target.suffix.lower() in (".html", ".htm")


def made_directory(path: Path) -> Path:
    """Return a directory, made with those above it where it is missing.

    Raises:
        FileError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def save_page(target: Path, page: str, name: str, beside: Mapping[str, Document | str]) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    Args:
        target: the file or the directory.
        page: its text.
        name: of the page in a directory.
        beside: what else goes there, by the name of the file.

    Raises:
        FileError: the file or the directory cannot be written.
    """
    if is_page(target):
        write_text_atomically(target, page)
        return
    folder = made_directory(target)
    for other, content in beside.items():
        text = content.to_json() if isinstance(content, Document) else content
        write_text_atomically(folder / other, text)
    write_text_atomically(folder / name, page)
