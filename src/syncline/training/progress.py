"""What is shown while training: a live line on a terminal, else one line an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["EpochLines", "LiveProgress", "Snapshot", "TrainingProgress", "progress_on"]

REFRESH_PER_S = 4
"""Each takes a few milliseconds from the cores that are being timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where training is."""

    epoch: int
    """Counted from 1."""
    epochs: int
    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps in all."""
    loss: float
    """Mean training loss of the last block of steps, or of the epoch."""
    samples_per_s: float
    exposed_s: float | None
    """Communication that the last sampled iteration waited for."""
    phase: str
    """What Syncline's DDP is doing."""


class TrainingProgress:
    """Shows how training goes; this one, for all ranks but the first, shows nothing."""

    def step(self, now: Snapshot) -> None:
        """Show that steps were taken."""

    def epoch(self, now: Snapshot, figures: Mapping[str, float]) -> None:
        """Show that an epoch has ended with these figures of merit."""

    def close(self) -> None:
        """Restore the terminal."""


class EpochLines(TrainingProgress):
    """Writes one line an epoch: for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def epoch(self, now: Snapshot, figures: Mapping[str, float]) -> None:
        """Write the line."""
        print(_epoch_line(now, figures), file=self._stream, flush=True)


class LiveProgress(TrainingProgress):
    """Keeps one live line below the lines of the epochs that are done."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=Console(file=stream),
            refresh_per_second=REFRESH_PER_S,
        )
        self._task = self._progress.add_task("starting", total=None, epoch="")
        self._progress.start()

    def step(self, now: Snapshot) -> None:
        """Redraw the line."""
        self._progress.update(
            self._task,
            total=now.steps,
            completed=now.step,
            epoch=f"{now.epoch}/{now.epochs}",
            description=_state(now),
        )

    def epoch(self, now: Snapshot, figures: Mapping[str, float]) -> None:
        """Print the epoch's line above the live one."""
        self._progress.console.print(
            _epoch_line(now, figures), highlight=False, markup=False, soft_wrap=True
        )

    def close(self) -> None:
        """Remove the live line and show the cursor again."""
        self._progress.update(self._task, visible=False)
        self._progress.stop()


def progress_on(stream: TextIO) -> TrainingProgress:
    """Return live progress where ``stream`` is a terminal, else epoch lines."""
    return LiveProgress(stream) if stream.isatty() else EpochLines(stream)


def _epoch_line(now: Snapshot, figures: Mapping[str, float]) -> str:
    merit = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"epoch {now.epoch}/{now.epochs}  step {now.step}  {merit}  {_state(now)}"


def _state(now: Snapshot) -> str:
    exposed = "" if now.exposed_s is None else f"  exposed {now.exposed_s * 1e3:.1f} ms"
    return f"loss {now.loss:.4f}  {now.samples_per_s:.0f} samples/s{exposed}  {now.phase}"
