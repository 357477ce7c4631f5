"""Tensors that a backend of torch may still hold, after it has said that it is done with them.

A thread of Gloo lets go of a collective's tensors a moment after it has woken who waits for them,
and needs the interpreter for that. Where the interpreter goes in that moment, the process is
aborted: "terminate called without an active exception". So a process ends only after it has all
tensors back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from multiprocessing.util import Finalize

import torch

__all__ = ["BEFORE_RETURNS", "lend"]

PATIENCE_S = 1.0
"""A thread that waits for a peer returns nothing, and is not waited for."""
POLL_S = 0.001
RETURNING = 90
BEFORE_RETURNS = RETURNING + 1
"""Priorities among the process's finalizers: when tensors must be back, and of what is to happen
before, such as the end of the last exchange."""

_lent: deque[weakref.ref[torch.Tensor]] = deque()
_lock = threading.Lock()
_ends: list[Finalize[None]] = []
"""What waits at the end of this process, if anything was lent in it."""


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Return what to give to a collective in a tensor's place, on any thread.

    The caller keeps no reference to it: that it is gone is what says that it was returned.

    Args:
        tensor: on any device, of any shape and type, without gradient; not kept alive.

    Returns:
        Another tensor of the same memory.
    """
    if not _ends:
        _ends.append(Finalize(None, _await_returns, exitpriority=RETURNING))
    alias = tensor.detach()
    with _lock:
        while _lent and _lent[0]() is None:
            _lent.popleft()
        _lent.append(weakref.ref(alias))
    return alias


def _await_returns() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(lent() is not None for lent in tuple(_lent)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _lent.clear()
    _ends.clear()


# The threads have stayed behind.
os.register_at_fork(after_in_child=_forget)
