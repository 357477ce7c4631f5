"""Ranks that answer the invitation to a group, and do nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch.distributed as dist

from syncline.comm.groups.rendezvous import Members, RankCard, Rendezvous
from tests.timeouts import DEADLINE_S

FAR = RankCard(host=("b", "n"), name="far", machine="", socket="", nonce="far")
"""Of another host."""


@contextmanager
def answered(store: dist.Store, card: RankCard, name: str = "default") -> Iterator[Future[Members]]:
    """Let there be a rank 1 of 2 that has answered."""
    call = Rendezvous(store, name, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call.join, card, time.monotonic() + DEADLINE_S)
