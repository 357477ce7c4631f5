"""Progress bars on standard error."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

SHOWN_AFTER_S = 2.0


class _Bar(Progress):
    """A bar on a terminal's standard error; nothing elsewhere."""

    def __init__(self, amount: ProgressColumn, refresh_per_second: float = 10) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            amount,
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            refresh_per_second=refresh_per_second,
            disable=not sys.stderr.isatty(),
        )


class ProgressBar(_Bar):
    """A bar for the stages of a measurement."""

    def __init__(self) -> None:
        # Drawing takes time from the cores that are being timed.
        super().__init__(MofNCompleteColumn(), refresh_per_second=2)
        self._task = self.add_task("starting", total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage."""
        shown = total if total > 1 else None
        self.update(self._task, description=stage, completed=done, total=shown)


class LateBar(_Bar):
    """A bar for one task, shown once it takes longer than two seconds."""

    def __init__(self, task: str, amount: ProgressColumn) -> None:
        super().__init__(amount)
        self._began = time.monotonic()
        self._task = self.add_task(task)

    def __enter__(self) -> Self:
        return self  # not started: a short task leaves no trace on the terminal

    def stop(self) -> None:
        """Stop the bar, if it was shown."""
        if self.live.is_started:
            super().stop()

    def __call__(self, done: int, total: int | None) -> None:
        """Show how much is done."""
        if time.monotonic() - self._began > SHOWN_AFTER_S:
            self.start()
        self.update(self._task, completed=done, total=total)


def reading_bar() -> LateBar:
    """Return a bar for the bytes of a file that is being read."""
    return LateBar("reading", DownloadColumn())
