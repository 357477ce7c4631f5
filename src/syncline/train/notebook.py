"""``Notebook``: the findings of a policy so far, and its lines to log."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from syncline.train.stages import Findings


class LogLine(NamedTuple):
    """A line to log."""

    text: str
    level: int
    is_for_users: bool = False
    """Whether users who have not configured logging are to see it, too."""


class Notebook:
    """The latest findings, and lines to log, which are removed by the caller that logs them."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.log_lines: list[LogLine] = []

    def find(self, **found: object) -> None:
        """Note findings, by name."""
        self.findings = msgspec.structs.replace(self.findings, **found)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Report something."""
        self.log_lines.append(LogLine(text, level))

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Report something, also to users who have not configured logging."""
        self.log_lines.append(LogLine(text, level, is_for_users=True))
