"""``Notebook``: what a policy has found by now, and what it has to report."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from syncline.train.stages import Findings


class News(NamedTuple):
    """Something to report."""

    text: str
    level: int
    is_for_users: bool = False
    """Whether users are to see it who have not configured logging."""


class Notebook:
    """The findings, of which the last are valid, and the news, which whoever reports them takes."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.news: list[News] = []

    def find(self, **found: object) -> None:
        """Note findings, by name."""
        self.findings = msgspec.structs.replace(self.findings, **found)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Report something."""
        self.news.append(News(text, level))

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Report something also to users who have not configured logging."""
        self.news.append(News(text, level, is_for_users=True))
