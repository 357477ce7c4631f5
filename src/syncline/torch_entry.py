"""What torch runs at every ``import torch``, and what Syncline says where it cannot be loaded.

Torch calls the entry points of ``torch.backends`` in every program of the environment, and whatever
fails there ends the import of torch. So this module needs the standard library alone, and loads
nothing: the backend comes when a process group asks for it. The build also puts a copy of this file
beside the package, ``syncline_torch_entry``, and that is the entry point: it does not even need the
package, which may be broken, gone with a deleted clone, or hidden by somebody's ``syncline.py``.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, Literal

NAME = "syncline"
"""Of the backend, and of the package."""
FIRST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 16)
TORCH = ">={}.{},<{}.{}".format(*FIRST_TORCH, *FIRST_UNTRIED_TORCH)
"""The releases of torch that Syncline was tried with; the same as in ``pyproject.toml``."""
LAUNCHED = "SYNCLINE_RUN"
"""The variable that ``syncline run`` sets for the processes that it starts: what to do there."""


def autoload() -> None:
    """Make the backend known to torch, which calls this when it is imported; raise nothing.

    In a process that ``syncline run`` has started, also prepare the conversion of wrapped models.
    """
    try:
        register()
    except Exception:
        # Not shown by default, since most programs of the environment do not use the backend.
        import logging

        logging.getLogger(NAME).debug("torch refused the backend syncline", exc_info=True)
    # Torch has imported it; what `import syncline` alone loads stays little.
    os = sys.modules.get("os")
    if os is not None and LAUNCHED in os.environ:
        try:
            load("syncline.train.launched.conversion", "syncline run").prepare()
        except Exception as error:  # not in the way of the program, but the user has asked for it
            print(f"syncline run: {error}; models train as before", file=sys.stderr)


def register() -> None:
    """Make the backend known to torch; doing so again changes nothing.

    Where torch is only half imported, or was built without ``torch.distributed``, there is nothing
    to make it known to.
    """
    backend = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    if backend is not None and NAME not in backend.backend_list:
        backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, given: Any) -> Any:
    """Load the backend and make a process group; torch calls this when one is asked for.

    Args:
        options: torch's, such as the store and the rank.
        given: the ``pg_options`` of the caller.

    Raises:
        ImportError: the backend cannot be loaded, or torch is of a version that was not tried.
        UserError: ``given`` cannot be used.
    """
    version = str(sys.modules["torch"].__version__)
    if untried(version) is not None:
        raise ImportError(
            f"backend syncline was not tried with torch {version}; {advice()}; or use another "
            "backend, such as gloo"
        )
    return load("syncline.comm.backend.process_group", "backend syncline").created(options, given)


def load(module: str, wanted: str) -> Any:
    """Import a module that may need torch and the native core.

    Args:
        module: its name.
        wanted: what it is imported for, as in ``"syncline.probe"``.

    Raises:
        ImportError: it cannot be imported; the message says what is installed and what to do.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise ImportError(
                f"{wanted} needs torch, which is not installed; install it with: pip install "
                "'syncline[torch]'"
            ) from error
        raise ImportError(
            f"{wanted} cannot be loaded: {type(error).__name__}: {error}; {advice()}"
        ) from error


def advice() -> str:
    """Return which versions are installed, and what to do where they do not go together."""
    import platform
    from importlib import metadata

    try:
        own = metadata.version(NAME)
    except metadata.PackageNotFoundError:
        own = "(not installed by pip)"
    version = getattr(sys.modules.get("torch"), "__version__", None)
    found = f"found syncline {own}, torch {version or '(not imported)'}, Python "
    found += f"{platform.python_version()}; syncline {own} is for torch{TORCH}: "
    if version is not None and untried(str(version)) is not None:
        return f"{found}install one of these, or a syncline that was tried with torch {version}"
    return f"{found}install syncline again into this environment, for this Python"


def untried(version: str) -> Literal["older", "newer"] | None:
    """Say how a version of torch lies outside of those that were tried, or None.

    Versions are ordered as by pip. What follows a ``+``, as in 2.13.0+cpu, does not count. A
    pre-release such as 2.11.0rc1 is older than its release, so older than any that was tried; but
    2.16.0a0 is newer, since pip does not take it for ``<2.16`` either. Those in between, such as
    2.13.0a0 in vendors' containers, count as the release. What is no version is taken for newer.
    """
    import re

    found = re.match(r"(\d+)\.(\d+)((?:\.0)*[._-]?(?:a|b|c|rc|dev|alpha|beta|pre)\d*)?", version)
    if found is None:
        return "newer"
    release = int(found[1]), int(found[2])
    if release < FIRST_TORCH or (release == FIRST_TORCH and found[3] is not None):
        return "older"
    return "newer" if release >= FIRST_UNTRIED_TORCH else None
