"""``Notebook``: what a policy has found by now, and what it has to report."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from syncline.train.stages import Findings


class LogLine(NamedTuple):
    """Something to report."""

    text: str
    level: int
    is_for_users: bool = False
    """Whether users are to see it who have not configured logging."""


class Notebook:
    """The findings, of which the last are valid, and lines to log, taken by whoever logs them."""

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
        """Report something also to users who have not configured logging."""
        self.log_lines.append(LogLine(text, level, is_for_users=True))
