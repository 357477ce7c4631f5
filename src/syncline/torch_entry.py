"""The entry point that torch calls at every ``import torch``, and the errors of failed imports.

Torch calls the entry points of ``torch.backends`` in every program of the environment. An exception
there makes ``import torch`` fail. So this module needs only the standard library, and loads the
backend only when a process group asks for it. The build also puts a copy of this file beside the
package, ``syncline_torch_entry``. That copy is the entry point, so it works even if the package is
broken, gone with a deleted clone, or shadowed by a user's ``syncline.py``.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, Literal

NAME = "syncline"
FIRST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 16)
TORCH = ">={}.{},<{}.{}".format(*FIRST_TORCH, *FIRST_UNTRIED_TORCH)
"""The releases of torch that Syncline was tested with, as in ``pyproject.toml``."""
LAUNCHED = "SYNCLINE_RUN"
"""Environment variable with the options of ``syncline run``, for the processes it starts."""


def autoload() -> None:
    """Register the backend. Torch calls this when it is imported, so it never raises.

    In a process that ``syncline run`` started, also prepare to convert wrapped models.
    """
    try:
        register()
    except Exception:
        # Logged for debugging only, since most programs of the environment do not use the backend.
        import logging

        logging.getLogger(NAME).debug("torch refused the backend syncline", exc_info=True)
    # Not imported here: torch has imported os, and `import syncline` alone must load little. If it
    # comes before torch, torch will call again.
    os = sys.modules.get("os")
    if os is not None and "torch" in sys.modules and LAUNCHED in os.environ:
        try:
            load("syncline.train.launched.conversion", "syncline run").prepare()
        except Exception as error:  # must not stop the program, but the user asked for this
            print(f"syncline run: {error}; models train as before", file=sys.stderr)


def register() -> None:
    """Register the backend with torch; calling this again changes nothing.

    Does nothing if torch is only half imported, or was built without ``torch.distributed``.
    """
    backend = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    if backend is not None and NAME not in backend.backend_list:
        backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, given: Any) -> Any:
    """Load the backend and make a process group; torch calls this when one is asked for.

    Torch's options include the store and the rank. ``given`` is the caller's ``pg_options``.

    Raises:
        ImportError: the backend cannot be loaded, or was not tested with this version of torch.
        UserError: ``given`` cannot be used.
    """
    version = str(sys.modules["torch"].__version__)
    if untried(version) is not None:
        raise ImportError(
            f"backend syncline was not tested with torch {version}; {advice()}; or use another "
            "backend, such as gloo"
        )
    return load("syncline.comm.backend.process_group", "backend syncline").created(options, given)


def load(module: str, wanted: str) -> Any:
    """Import a module that may need torch and the native core; errors name the ``wanted`` feature.

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
    """Return the installed versions, and what to do if they do not fit together."""
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
    """Return whether a version of torch is older or newer than those tested, or None if neither.

    Versions are ordered as pip orders them; the part after a ``+`` is ignored. So 2.11.0rc1 is
    older than any tested, and 2.16.0a0 is newer, since pip does not accept it for ``<2.16`` either.
    Pre-releases in between, such as 2.13.0a0 in vendors' containers, count as their release. A
    string that is no version counts as newer.
    """
    import re

    found = re.match(r"(\d+)\.(\d+)((?:\.0)*[._-]?(?:a|b|c|rc|dev|alpha|beta|pre)\d*)?", version)
    if found is None:
        return "newer"
    release = int(found[1]), int(found[2])
    if release < FIRST_TORCH or (release == FIRST_TORCH and found[3] is not None):
        return "older"
    return "newer" if release >= FIRST_UNTRIED_TORCH else None
