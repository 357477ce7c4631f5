"""Ranks of a benchmark that may die or hang, as processes of their own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["exit_codes"]


def exit_codes(
    work: Callable[[int, Path, Any], None], ranks: int, folder: Path, job: Any, deadline_s: float
) -> list[int | None]:
    """Let ranks work; return their exit codes, None for one that hung, when none runs any more.

    Args:
        work: what a rank does, given its number, the folder and the job.
        ranks: how many there are.
        folder: where they leave what they found.
        job: the same for all.
        deadline_s: after which a rank that still runs has hung, and is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    processes = [
        context.Process(target=work, args=(rank, folder, job), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end_s = time.monotonic() + deadline_s
    for process in processes:
        process.join(max(end_s - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes
