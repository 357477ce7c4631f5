"""``until_exit``: threads that complete futures call torch only while the interpreter runs.

Python up to 3.13 stops a daemon thread that comes back from native code once the interpreter is
ending. Inside torch, that aborts the process ("terminate called without an active exception").
"""

from __future__ import annotations

import os
import threading
from multiprocessing.util import Finalize

__all__ = ["until_exit"]

LONGEST_S = 2.0
"""How long the end of the process waits for threads that are in torch, or in a callback."""
LATE = -1
"""Priority of the process's finalizer: after those that finish exchanges."""


class _UntilExit:
    """A context for several threads at once, which none can enter once the process is ending.

    A thread that tries blocks until the process has ended. Entering it twice is allowed.
    """

    def __init__(self) -> None:
        self._process = -1
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}
        self._ending = False

    def __enter__(self) -> None:
        if os.getpid() != self._process:  # the first use, or a fork, where no thread is inside
            self._begin()
            self._process = os.getpid()
            Finalize(None, self._end, exitpriority=LATE)
        thread = threading.get_ident()
        with self._changed:
            if not self._ending or thread in self._depths:
                self._depths[thread] = self._depths.get(thread, 0) + 1
                return
        threading.Event().wait()

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._depths[thread] -= 1
            if not self._depths[thread]:
                del self._depths[thread]
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            own = {threading.get_ident()}
            self._changed.wait_for(lambda: self._depths.keys() <= own, LONGEST_S)


until_exit = _UntilExit()
