"""What the command line accepts as a profile: our own file, or a trace of another tool."""

from __future__ import annotations

from syncline.cli.reading import ReadingProgress
from syncline.model.profile import Profile
from syncline.traces.formats import Options, detect, read_trace

__all__ = ["profile_argument"]


def profile_argument(path: str) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile that a file holds, and what reading it had to leave out or assume.

    Raises:
        FileError: the file is missing, broken, or of no known format.
        UserError: no profile can be made of the trace.
    """
    form = detect(path)
    if form.name == "json":
        return Profile.load(path), ()
    with ReadingProgress() as progress:
        _, trace = read_trace([path], form, Options(progress=progress))
    return trace.known_profile(), trace.notes
