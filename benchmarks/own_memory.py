"""The memory of this process, read without importing anything that would take some."""

from __future__ import annotations

from pathlib import Path

__all__ = ["memory_bytes", "reset_peak"]


def memory_bytes(kind: str) -> int:
    """Return one of the kinds of memory of this process in proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")


def reset_peak() -> None:
    """Let ``VmHWM``, the largest resident memory, go on from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
