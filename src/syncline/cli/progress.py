"""Progress bars on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressBar", "ReadingProgress"]


class ProgressBar:
    """A bar on a terminal's standard error; nothing elsewhere."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            refresh_per_second=2,  # drawing takes time from the cores that are being timed
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is."""
        shown = total if total > 1 else None
        self._progress.update(self._task, description=stage, completed=done, total=shown)


SHOWN_AFTER_S = 2.0


class ReadingProgress:
    """A bar on standard error, once reading takes longer than two seconds; none on no terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._wanted = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, read_bytes: int, total_bytes: int | None) -> None:
        """Show how many bytes were read."""
        if not self._wanted or time.monotonic() - self._began < SHOWN_AFTER_S:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("reading"),
                BarColumn(bar_width=30),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self._bar.add_task("reading", total=total_bytes)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=read_bytes, total=total_bytes)
