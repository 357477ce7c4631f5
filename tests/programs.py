"""Programs that tests run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.timeouts import DEADLINE_S


def ran(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = DEADLINE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, in this environment and more, and return how it ended."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def output_of(*command: str | Path, **options: Any) -> str:
    """Run a program that must succeed, with the options of :func:`ran`; return what it prints."""
    done = ran(*command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
