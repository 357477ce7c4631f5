"""Keeps the process alive until the backend has released the tensors of all collectives.

A thread of Gloo releases a collective's tensors just after it has woken the waiting thread, and
needs the interpreter for that. If the interpreter exits at that moment, the process is aborted:
"terminate called without an active exception".
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from multiprocessing.util import Finalize

import torch

PATIENCE_S = 1.0  # longest wait at exit: a thread that waits for a peer releases nothing
POLL_S = 0.001
LEAVING_S = 0.02
"""For the thread that freed the last tensor: torch gives the interpreter away while it frees one,
after it has cleared the weak references, and takes it again."""
RELEASED = 90
BEFORE_RELEASED = RELEASED + 1
"""Priorities of the process's finalizers: the wait for released tensors, and what must come before
it, such as the end of the last exchange."""

_aliases: deque[weakref.ref[torch.Tensor]] = deque()
_lock = threading.Lock()
_ends: list[Finalize[None]] = []
"""The finalizer that waits at the end of this process, once a collective was given a tensor."""


def keepalive(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias to give to a collective in a tensor's place, on any thread.

    It is another tensor of the same memory, without gradient. The caller must keep no reference to
    it: it is freed when the backend has released it. The tensor itself is not kept alive.
    """
    if not _ends:
        _ends.append(Finalize(None, _await_releases, exitpriority=RELEASED))
    alias = tensor.detach()
    with _lock:
        while _aliases and _aliases[0]() is None:
            _aliases.popleft()
        _aliases.append(weakref.ref(alias))
    return alias


def _await_releases() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(alias() is not None for alias in tuple(_aliases)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(LEAVING_S)


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _aliases.clear()
    _ends.clear()


# The fork has none of the threads.
os.register_at_fork(after_in_child=_forget_after_fork)
