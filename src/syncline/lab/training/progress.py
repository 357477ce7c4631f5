"""Progress of a training: one line an epoch and, on a terminal, a live line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

REFRESH_PER_S = 4  # each refresh takes a few milliseconds from the cores that are being timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where training is."""

    epoch: int  # counted from 1
    epochs: int
    step: int
    steps: int
    loss: float  # mean training loss of the last block of steps, or of the epoch
    samples_per_s: float
    exposed_s: float | None  # communication that the last sampled iteration waited for
    phase: str


class TrainingProgress:
    """Shows the progress of a training by one line an epoch and, on a terminal, a live line.

    Without a stream, as on all ranks but the first, nothing is shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=Console(file=stream, quiet=stream is None),
            refresh_per_second=REFRESH_PER_S,
            disable=stream is None or not stream.isatty(),
        )
        self._task = self._progress.add_task("starting", total=None, epoch="")
        self._progress.start()

    def step(self, now: Snapshot) -> None:
        """Show that steps were taken."""
        self._progress.update(
            self._task,
            total=now.steps,
            completed=now.step,
            epoch=f"{now.epoch}/{now.epochs}",
            description=f"{now.phase}  {_state(now)}",  # a narrow terminal cuts off the end
        )

    def epoch(self, now: Snapshot, figures: Mapping[str, float]) -> None:
        """Show that an epoch has ended with these figures of merit."""
        merit = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        state = f"{_state(now)}  {now.phase}"
        line = f"epoch {now.epoch}/{now.epochs}  step {now.step}  {merit}  {state}"
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the live line and show the cursor again."""
        if not self._progress.disable:
            self._progress.update(self._task, visible=False)
            self._progress.stop()


def _state(now: Snapshot) -> str:
    exposed = "" if now.exposed_s is None else f"  exposed {now.exposed_s * 1e3:.1f} ms"
    return f"loss {now.loss:.4f}  {now.samples_per_s:.0f} samples/s{exposed}"
