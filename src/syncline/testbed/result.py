"""How a job ended, and whose fault it was."""

from __future__ import annotations

from syncline.model.document import Value
from syncline.processes import exit_code_of

__all__ = ["JobResult", "WorkerEnd", "name_of"]

TIMED_OUT = 124
"""Exit code of a job that was stopped for its time, as of timeout(1)."""


class WorkerEnd(Value, frozen=True, kw_only=True):
    """How one worker ended."""

    rank: int
    host: int
    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    after_s: float
    """Since the start of the job."""
    stopped: bool
    """Whether it had been told to end by then."""


def name_of(end: WorkerEnd) -> str:
    """Return what a worker is called: ``rank 3 on host1``."""
    return f"rank {end.rank} on host{end.host}"


class JobResult(Value, frozen=True, kw_only=True):
    """How a job ended."""

    ends: tuple[WorkerEnd, ...]
    """By rank."""
    stdout: tuple[str, ...] = ()
    """By rank, where it was kept."""
    stderr: tuple[str, ...] = ()
    wall_s: float
    signal: int | None = None
    """That the job was stopped by."""
    timed_out: bool = False

    @property
    def cause(self) -> WorkerEnd | None:
        """The worker that failed first, by itself."""
        failed = [end for end in self.ends if end.code != 0 and not end.stopped]
        return min(failed, key=lambda end: end.after_s, default=None)

    @property
    def exit_code(self) -> int:
        """What a shell should see: 0 only if every worker has ended with 0."""
        if self.signal is not None:
            return exit_code_of(-self.signal)
        if self.cause is not None:
            return exit_code_of(self.cause.code)
        return TIMED_OUT if self.timed_out else 0
