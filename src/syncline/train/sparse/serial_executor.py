"""``SerialExecutor``: a thread that runs one job after the other, until one fails."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from queue import SimpleQueue

from syncline.errors import InternalError, PeerError

Job = Callable[[], None]


class SerialExecutor:
    """Runs jobs in the order in which they were put; after a failure, no more of them.

    The first job starts the thread, which is a daemon; :meth:`close` ends it. While it waits for a
    job, it keeps nothing of the last one alive. :meth:`join` waits ``timeout_s`` for each job.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._jobs: SimpleQueue[tuple[Job, Job] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._put = 0
        self._ended = 0
        self._error: BaseException | None = None

    def put(self, job: Job, ended: Job) -> None:
        """Add a job, which runs unless one has failed; ``ended`` is then called in any case."""
        with self._changed:
            self._put += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, ended))

    def join(self) -> None:
        """Wait until all jobs have ended.

        Raises:
            BaseException: the error of the first job that failed; on every call from then on.
            PeerError: no job has ended for ``timeout_s``; on every call from then on.
        """
        with self._changed:
            while (before := self._ended) < self._put:
                if not self._changed.wait_for(lambda: self._ended > before, self._timeout_s):
                    self._error = self._error or PeerError(
                        f"{self._name}: an exchange has not ended within {self._timeout_s:.0f} s; "
                        "a peer has stopped, see the other ranks' output, and resume all ranks "
                        "from the last checkpoint"
                    )
                    break
        self.check()

    def check(self) -> None:
        """Raise the error of the job that failed, if any, without waiting."""
        error = self._error
        if error is not None:
            # The frames of an error hold tensors, so a copy without them is kept for the next call.
            self._error = _without_frames(error)
            raise error

    def close(self) -> None:
        """Let the thread end after the jobs that were put; without waiting."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            self._carry_out(*work)
            del work  # before waiting for the next one, which may never come
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _carry_out(self, job: Job, ended: Job) -> None:
        for call in (job, ended) if self._error is None else (ended,):
            try:
                call()
            except BaseException as error:
                self._error = self._error or error


def _without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error that refers to no frame, neither itself nor through its causes."""
    try:
        return copy.copy(error)
    except TypeError:  # its class cannot be called with its arguments
        return InternalError(f"an exchange has failed before: {error!r}")
