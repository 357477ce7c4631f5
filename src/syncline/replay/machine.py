"""The machine that emulates: its name, and whether it has room for so many workers."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from syncline.errors import UserError
from syncline.model.profile import Profile
from syncline.report.units import size

__all__ = ["machine_name", "require_memory"]

COPIES = 3.5
"""Copies of all gradients that a worker holds at most: the gradients, their buckets, those that are
being rebuilt, and what a backend needs for itself. Parameters are zeros that take no memory."""
WORKER_BYTES = 300e6
"""What Python and torch take in each worker."""


def machine_name() -> str:
    """Return the processor and how many cores this process may use."""
    processor = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor}, {cores} core{'' if cores == 1 else 's'}"


def require_memory(profile: Profile, workers: int) -> None:
    """Check that all workers' gradients fit into memory.

    Raises:
        UserError: they do not.
    """
    needed = workers * (COPIES * profile.gradient_bytes + WORKER_BYTES)
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if needed > available:
                raise UserError(
                    f"{workers} workers with {size(profile.gradient_bytes)} of gradients each need "
                    f"about {size(needed)} of memory, and {size(available)} are free; emulate "
                    "fewer hosts"
                )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux, where there is no emulated cluster either
        return []
