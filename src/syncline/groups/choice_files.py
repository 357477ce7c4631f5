"""Where measured choices are kept, and which of them a group may use."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from functools import lru_cache
from pathlib import Path

from syncline.errors import FileError, UserError
from syncline.groups.choices import Choices
from syncline.groups.site import Site

__all__ = ["AGAIN", "choices_folder", "choices_path", "measured_choices", "release"]

AGAIN = "measure again with 'syncline tune'"

logger = logging.getLogger("syncline")


@lru_cache(maxsize=1)
def release() -> str:
    """Return the version of Syncline that runs."""
    return importlib.metadata.version("syncline")


def choices_folder() -> Path | None:
    """Return the folder in the user's cache, whether it exists or not; None: there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(cache).is_absolute():  # such are to be ignored, says the standard
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(cache) / "syncline" / "choices"


def choices_path(site: Site) -> Path:
    """Return where the choices of a site are kept.

    Raises:
        UserError: this user has no home folder.
    """
    folder = choices_folder()
    if folder is None:
        raise UserError(
            "this user has no home folder, so no cache either; set XDG_CACHE_HOME, or name a file"
        )
    return folder / f"{site.key}.json"


def measured_choices(site: Site) -> tuple[Choices, Path] | None:
    """Return what was measured for a site, and its file; None where there is nothing to use.

    A file of another release is not used, which is logged once.

    Raises:
        FileError: the file is damaged, or of another site.
    """
    if choices_folder() is None:
        return None
    path = choices_path(site)
    try:
        changed_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}; {_DO}") from None
    choices = _read(path, changed_ns)
    if choices is None:
        return None
    if choices.site.key != site.key:
        raise FileError(
            f"{path}: expected choices for {site}, found some for {choices.site} or other "
            f"hosts of that name; {_DO}"
        )
    return choices, path


_DO = f"delete it, or {AGAIN}"


@lru_cache(maxsize=64)
def _read(path: Path, changed_ns: int) -> Choices | None:
    """Return what a file holds that was changed then; None: it is of another release."""
    del changed_ns
    try:
        choices = Choices.load(path)
    except FileError as error:
        raise FileError(f"{error} ({_DO})") from None
    if choices.release != release():
        logger.warning(
            "%s was measured with release %s, this is %s: built-in choices are used; %s",
            path,
            choices.release,
            release(),
            AGAIN,
        )
        return None
    return choices
