"""Ranks of a benchmark: processes that may die or hang, or pretend to be on several hosts."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from syncline.comm.groups.rendezvous import RankCard

__all__ = ["exit_codes", "on_host"]


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


@contextmanager
def on_host(number: int) -> Iterator[None]:
    """Let groups that this process joins meanwhile find it on the host of that number.

    Ranks of different numbers then share no memory and are joined by TCP, here over the loopback
    device; those of one number are neighbours, as on a real host.
    """
    own = RankCard.own

    def elsewhere() -> RankCard:
        card = own()
        boot, network = card.host
        return replace(card, host=(boot, f"{network} of host {number}"), name=f"host-{number}")

    with mock.patch.object(RankCard, "own", elsewhere):
        yield
