"""Ranks of one machine that take themselves for ranks of several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from syncline.groups.rendezvous import RankCard

__all__ = ["on_host"]


@contextmanager
def on_host(number: int) -> Iterator[None]:
    """Let groups that this process joins meanwhile find it on the host of that number.

    Ranks of different numbers then share no memory and are joined by UCX, here over the loopback
    device; those of one number are neighbours, as on a real host.
    """
    own = RankCard.own

    def elsewhere() -> RankCard:
        card = own()
        boot, network = card.host
        return replace(card, host=(boot, f"{network} of host {number}"), name=f"host-{number}")

    with mock.patch.object(RankCard, "own", elsewhere):
        yield
