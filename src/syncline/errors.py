"""Every error that Syncline raises on purpose.

The tree, with what each means for the caller::

    SynclineError
    |-- UserError            the input is wrong; change it and try again      exit code 2
    |   |-- FileError        a file is missing, broken or of another version  exit code 2
    |   `-- MismatchError    a plan or profile is for another model or size   exit code 2
    |-- PeerError            a worker or the network failed; restart the job  exit code 1
    `-- InternalError        our own bug; please report it                    exit code 1

Each message says what was expected, what came, where, and what to do next.
"""

from __future__ import annotations

TYPE_CHECKING = False  # "import syncline" loads this module, so it needs no other
if TYPE_CHECKING:
    from collections.abc import Iterable


class SynclineError(Exception):
    """Base of all errors that Syncline raises on purpose."""

    exit_code = 1


class UserError(SynclineError, ValueError):
    """The caller's input cannot be used; the message says what to change."""

    exit_code = 2


class FileError(UserError):
    """A file is missing, truncated, of another version, or holds invalid values."""


class MismatchError(UserError):
    """A plan, profile or checkpoint was made for another model or worker count."""


class PeerError(SynclineError, RuntimeError):
    """A peer process or the network under it failed; the job can be restarted."""


class InternalError(SynclineError, AssertionError):
    """An invariant of Syncline itself does not hold: a bug to report."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    import difflib

    nearest = difflib.get_close_matches(name[:LONGEST_QUOTE], list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def unknown(what: str, name: object, known: Iterable[str], *, also: Iterable[str] = ()) -> str:
    """Return the message for an unknown name, with the nearest known one.

    ``what`` is the kind of name, such as ``"planner"``. Names in ``also``, such as abbreviations,
    are known too, but not listed.
    """
    names = tuple(known)
    hint = did_you_mean(str(name), (*also, *names))
    return f"unknown {what} {quoted(name)}{hint} (known: {', '.join(names)})"


def require_known(
    what: str, name: str, known: Iterable[str], *, also: Iterable[str] = (), where: str = ""
) -> None:
    """Raise :class:`UserError` for an unknown name; see :func:`unknown`.

    ``where`` begins the message, such as ``"recipe: "``.
    """
    names, others = tuple(known), tuple(also)
    if name not in names and name not in others:
        raise UserError(where + unknown(what, name, names, also=others))


LONGEST_QUOTE = 80  # the most characters of a value that a message quotes
LONGEST_TEXT = 400
"""The most characters of another library's text in a message. Such text may quote the input."""


def quoted(value: object) -> str:
    """Return the ``repr`` of an input value for a message, cut if it is long."""
    if isinstance(value, list | tuple | dict):  # may be nested too deeply to print
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, str | bytes) and len(value) > LONGEST_QUOTE:
        return f"{value[:LONGEST_QUOTE]!r}..."
    return shortened(repr(value), LONGEST_QUOTE)


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text for a message: in one line, and with its middle left out if it is long."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}...{text[-half:]}"
    return printable(text)


def printable(text: str, keep: str = "") -> str:
    """Return a text with unprintable characters escaped, except those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
