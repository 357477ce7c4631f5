"""Strangers at the TCP ports of UCX, which accepts whoever connects."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline import _native
from syncline.groups import Group
from syncline.groups import group as group_module
from syncline.groups.notes import Notes
from syncline.groups.ucx import addresses
from tests.groups import jobs
from tests.timeouts import DEADLINE_S

STRANGERS = 20
Address = tuple[str, int]


def sockets() -> tuple[set[Address], Counter[Address]]:
    """Return where TCP sockets of this process listen, and the addresses of the others."""
    doors, others = set(), Counter[Address]()
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as each:
            if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    doors.add(each.getsockname())
                else:
                    others[each.getsockname()] += 1
    return doors, others


def listening(address: Address) -> bool:
    """Return whether a connection to it is accepted."""
    try:
        socket.create_connection(address, 0.2).close()
    except TimeoutError:
        return False
    return True


def pair() -> list[Group]:
    store = dist.HashStore()

    def join(rank: int) -> Group:
        return Group(store, rank, 2, timeout_s=DEADLINE_S, transport="ucx")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


def exchange(groups: Sequence[Group]) -> None:
    tensors = [torch.ones(10) for _ in groups]
    begun = [
        group.all_reduce(jobs.elements(tensor))
        for group, tensor in zip(groups, tensors, strict=True)
    ]
    for pending, tensor in zip(begun, tensors, strict=True):
        pending.wait()
        assert torch.equal(tensor, torch.full((10,), 2.0))


def test_strangers_take_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who come while the group forms are let go; afterwards nobody can connect."""
    others = sockets()[0]
    strangers: list[socket.socket] = []
    doors: set[Address] = set()
    turn = threading.Lock()

    def visited(
        worker: _native.UcxWorker, notes: Notes, peers: Sequence[int]
    ) -> list[tuple[int, bytes]]:
        with turn:
            for address in sockets()[0] - others - doors:
                doors.add(address)
                strangers.extend(socket.create_connection(address, 10) for _ in range(STRANGERS))
        return addresses(worker, notes, peers)

    monkeypatch.setattr(group_module, "addresses", visited)
    groups = pair()
    assert len(strangers) >= STRANGERS
    for stranger in strangers:
        stranger.settimeout(DEADLINE_S)
        assert stranger.recv(1) == b""
        stranger.close()
    exchange(groups)
    assert not any(listening(address) for address in doors)
    for _ in range(1000):  # UCX closes what has ended when it comes by it
        exchange(groups)
        if all(sockets()[1][address] < STRANGERS for address in doors):
            break
    else:
        pytest.fail(f"connections of strangers are kept: {sockets()}")
    exchange(groups)
    for group in groups:
        group.close()
