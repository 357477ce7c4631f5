"""A barrier in which rank 0 names the ranks that did not come."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from syncline.errors import PeerError

__all__ = ["MonitoredBarrier"]

SHORTEST_POLL_S, LONGEST_POLL_S = 1e-3, 20e-3
"""Intervals between polls of the store. The store's own wait could not be interrupted."""


@dataclass(slots=True, eq=False)
class MonitoredBarrier:
    """Ranks that meet in the store, so that it works also where their group has failed.

    Source: the same as Gloo's ``monitored_barrier``: rank 0 waits for the others, one after the
    other, and then lets them go on.
    """

    _store: Any
    """Where the ranks of the group look."""
    _meeting: str
    """Unique to the group in this store."""
    _rank: int
    _ranks: int
    _number: int = 0
    """How many barriers there were."""

    def wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Return once all ranks have come.

        Args:
            timeout_s: how long rank 0 waits for the others, and they for rank 0.
            wait_all_ranks: name all that are missing, not only the first.

        Raises:
            PeerError: a rank did not come, or rank 0 did not let this one go on.
        """
        self._number += 1
        deadline = time.monotonic() + timeout_s
        if self._rank != 0:
            self._store.set(self._key(self._rank), "come")
            if not self._comes(self._key(0), deadline):
                raise PeerError(
                    f"rank {self._rank} reached the monitored barrier, but rank 0 did not let it "
                    f"go on within {timeout_s:g} s; see the output of rank 0, which names the "
                    "ranks that did not come"
                )
            return
        late = (r for r in range(1, self._ranks) if not self._comes(self._key(r), deadline))
        missing = list(late if wait_all_ranks else itertools.islice(late, 1))
        if missing:
            many = "ranks" if len(missing) > 1 else "rank"
            raise PeerError(
                f"rank 0: {many} {', '.join(map(str, missing))} did not reach the monitored "
                f"barrier within {timeout_s:g} s; see the output there"
            )
        self._store.set(self._key(0), "go on")

    def _key(self, rank: int) -> str:
        return f"monitored barrier/{self._meeting}/{self._number}/{rank}"

    def _comes(self, key: str, deadline: float) -> bool:
        """Say whether a key is set in the store in time."""
        pause_s = SHORTEST_POLL_S
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        return True
