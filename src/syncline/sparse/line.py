"""``Line``: a thread that does one job after the other, until one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Line"]

Job = Callable[[], None]


class Line:
    """Runs jobs in the order in which they were put; after a failure, no more of them.

    The thread is started by the first job and does not keep the program from ending.
    """

    def __init__(self, name: str) -> None:
        """Make a line.

        Args:
            name: of its thread.
        """
        self._name = name
        self._jobs: SimpleQueue[tuple[Job, Job]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting = 0
        self._error: BaseException | None = None

    def put(self, job: Job, ended: Job) -> None:
        """Add a job.

        Args:
            job: what to do, unless an earlier one has failed.
            ended: called in any case, on the line's thread.
        """
        with self._changed:
            self._waiting += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, ended))

    def join(self) -> None:
        """Wait until all jobs have ended.

        Raises:
            BaseException: what the first job that failed has raised, on every call from then on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
        self.check()

    def check(self) -> None:
        """Raise what a job has raised, without waiting."""
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        while True:
            job, ended = self._jobs.get()
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            finally:
                ended()
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
