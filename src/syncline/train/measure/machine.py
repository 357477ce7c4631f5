"""The names of this machine and its processor, to label measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_name() -> str:
    """Return the processor and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {cores} core{'' if cores == 1 else 's'}"


def processor_name() -> str:
    """Return the model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
