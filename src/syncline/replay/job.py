"""What the worker processes of a replay are told to do, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import FileError
from syncline.model.document import Value, write_atomically
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.timeline import Timeline

__all__ = [
    "Contender",
    "ContestJob",
    "Job",
    "Lap",
    "LapDone",
    "ProbeJob",
    "load_job",
    "load_laps",
    "save_job",
    "save_laps",
]


class Lap(Value, frozen=True, kw_only=True):
    """One contestant's iterations in one round."""

    iteration_s: float
    """Seconds an iteration in the steady state: from the end of the warm-up to the end of the last
    iteration, over their number. What the warm-up left under way counts, what the last iteration
    leaves does not. Of the slowest rank."""
    settled_s: float
    """The same, until everything is done: what is left at the end is counted in full."""
    steps_s: tuple[float, ...]
    """Each iteration of this rank."""
    idle_s: float
    """How long the device stood still an iteration, waiting for the exchange; median rank."""
    timeline: Timeline
    """The last iteration of this rank."""


class Contender(Value, frozen=True, kw_only=True):
    """One way to exchange gradients, by its name."""

    name: str
    plan: Plan | None
    """None: torch's own DistributedDataParallel."""


class ProbeJob(Value, frozen=True, kw_only=True, tag="probe"):
    """Measure the network."""

    result: str
    """Where rank 0 writes the network."""
    timeout_s: float
    """After so long without an answer from its peers a worker gives up."""
    largest_bytes: int
    """Size of the largest message to measure."""


class ContestJob(Value, frozen=True, kw_only=True, tag="contest"):
    """Replay a profile under several plans in turns."""

    result: str
    """Where rank 0 writes the laps."""
    timeout_s: float
    profile: Profile
    contenders: tuple[Contender, ...]
    rounds: int
    iterations: int
    warmup: int


Job = ProbeJob | ContestJob


class LapDone(Value, frozen=True, kw_only=True):
    """A line that rank 0 prints after each lap."""

    name: str
    done: int
    total: int


def save_job(path: Path, job: Job) -> None:
    """Write a job.

    Raises:
        FileError: the folder cannot be written.
    """
    write_atomically(path, msgspec.json.encode(job))


def load_job(path: Path) -> Job:
    """Read a job.

    Raises:
        FileError: the file cannot be read, or holds no job.
    """
    job: Job = _load(path, Job)
    return job


def save_laps(path: Path, laps: dict[str, tuple[Lap, ...]]) -> None:
    """Write the laps of each contender.

    Raises:
        FileError: the folder cannot be written.
    """
    write_atomically(path, msgspec.json.encode(laps))


def load_laps(path: Path) -> dict[str, tuple[Lap, ...]]:
    """Read the laps of each contender.

    Raises:
        FileError: the file cannot be read, or holds no laps.
    """
    laps: dict[str, tuple[Lap, ...]] = _load(path, dict[str, tuple[Lap, ...]])
    return laps


def _load(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileError(f"{path}: not what the workers of a replay exchange: {error}") from None
