"""How long tests wait, and groups whose waits end soon.

A deadline ends a test that hangs; none may decide whether one passes. On a machine with 25 times as
many busy processes as cores, what takes a second takes half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 300.0
"""Of one wait, for what takes a second or two on a machine with nothing else to do."""
TIMEOUT = timedelta(seconds=DEADLINE_S)  # of a process group
JOB_DEADLINE_S = 2 * DEADLINE_S
"""Of a whole job or process. Waits inside it end before, and say what they have waited for."""
POLL_S = 0.02  # to look takes milliseconds


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, and fail where it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(POLL_S)


def group_that_gives_up(after_s: float, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new group of all ranks whose waits end after ``after_s``.

    The timeout begins to count once all ranks have joined: to make the group may take as long as
    a busy machine needs.
    """
    group: dist.ProcessGroup = dist.new_group(backend=backend)
    dist.barrier()  # of the default group: a call of the new one would count
    give_up(group, after_s)
    return group


def give_up(group: Any, after_s: float) -> None:
    """Let waits of a group, in which all ranks have joined, end after ``after_s``."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=after_s))
