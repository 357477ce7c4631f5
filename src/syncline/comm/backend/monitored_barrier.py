"""A barrier in which rank 0 names the ranks that did not reach it."""

from __future__ import annotations

import itertools
import time
from typing import Any

from syncline.errors import PeerError

SHORTEST_POLL_S, LONGEST_POLL_S = 1e-3, 20e-3
"""Intervals between polls of the store. The store's own wait could not be interrupted."""


def monitored_barrier(
    store: Any, key: str, rank: int, ranks: int, *, timeout_s: float, wait_all_ranks: bool
) -> None:
    """Return once all ranks have called this; raise PeerError if one does not.

    It uses only the store, under a ``key`` of this barrier alone, so it works after a failure, too.
    As in Gloo's ``monitored_barrier``, rank 0 waits for the others, one after the other, and then
    lets them go on; each waits for at most ``timeout_s``. With ``wait_all_ranks`` the error names
    all ranks that are missing, not only the first.
    """
    deadline = time.monotonic() + timeout_s
    if rank != 0:
        store.set(f"{key}/{rank}", "come")
        if not _comes(store, f"{key}/0", deadline):
            raise PeerError(
                f"rank {rank} reached the monitored barrier, but rank 0 did not let it go on "
                f"within {timeout_s:g} s; see the output of rank 0, which names the missing ranks"
            )
        return
    late = (r for r in range(1, ranks) if not _comes(store, f"{key}/{r}", deadline))
    missing = list(late if wait_all_ranks else itertools.islice(late, 1))
    if missing:
        many = "ranks" if len(missing) > 1 else "rank"
        raise PeerError(
            f"rank 0: {many} {', '.join(map(str, missing))} did not reach the monitored barrier "
            f"within {timeout_s:g} s; see the output there"
        )
    store.set(f"{key}/0", "go on")


def _comes(store: Any, key: str, deadline: float) -> bool:
    pause_s = SHORTEST_POLL_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
    return True
