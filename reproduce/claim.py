"""A claim of a paper, and what we find of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks import raw
from reproduce.common import RESULTS, Result, load

__all__ = ["Claim", "Finding", "Verdict", "differs", "not_here", "percent"]

Verdict = Literal["reproduced", "differs", "not comparable", "not reproducible here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What we find of a claim."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper."""

    place: str
    says: str
    script: str | None
    """The script whose results are looked at; None where there is nothing to run."""
    find: Callable[[Result], Finding]
    """Given that script's results; an absent key means that its trace was absent."""

    def finding(self) -> Finding:
        """Return what we find, from the results that lie there."""
        if self.script is None:
            return self.find({})
        if not raw.exists(RESULTS / f"{self.script}.json"):
            return Finding(verdict="not reproducible here", text="its script has not been run")
        try:
            return self.find(load(self.script))
        except LookupError as error:
            return Finding(
                verdict="not reproducible here",
                text=f"the trace that it needs was absent when the script ran ({error.args[0]!r})",
            )


def not_here(text: str) -> Callable[[Result], Finding]:
    """Return a finding that nothing here can settle."""
    return lambda _: Finding(verdict="not reproducible here", text=text)


def differs(text: str) -> Callable[[Result], Finding]:
    """Return a finding that needs no run: a misprint or a step of an argument."""
    return lambda _: Finding(verdict="differs", text=text)


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * fraction:.{digits}f} %"
