"""Ranks of different hosts meet over TCP: strangers, addresses and interfaces."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from syncline import _native
from syncline.comm.groups import Group, tcp
from syncline.comm.groups.meeting import (
    HELLO,
    MAGIC,
    MOST_UNKNOWN,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY,
)
from syncline.comm.groups.rendezvous import Rendezvous
from syncline.comm.groups.tcp import Address, Place
from syncline.errors import PeerError, UserError
from tests.comm.groups import jobs
from tests.comm.groups.answers import FAR
from tests.timeouts import DEADLINE_S

NONCE = bytes(NONCE_BYTES)


def pair(interface: str | None = None) -> list[Group]:
    store = dist.HashStore()

    def join(rank: int) -> Group:
        return Group(store, rank, 2, timeout_s=DEADLINE_S, transport="tcp", interface=interface)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


def exchange(groups: Sequence[Group]) -> None:
    tensors = [torch.ones(100_000) for _ in groups]
    begun = [
        group.all_reduce(jobs.elements(tensor))
        for group, tensor in zip(groups, tensors, strict=True)
    ]
    for pending, tensor in zip(begun, tensors, strict=True):
        pending.wait()
        assert torch.equal(tensor, torch.full((100_000,), 2.0))
    for group in groups:
        group.close()


class Visited:
    """Has strangers come to every socket as soon as it listens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visit: Any) -> None:
        self.places: list[tuple[str, int]] = []
        self.visitors: list[socket.socket] = []
        listening = tcp._listening

        def visited(own: Sequence[Address]) -> socket.socket:
            found = listening(own)
            place = ("127.0.0.1", found.getsockname()[1])
            self.places.append(place)
            self.visitors += visit(place)
            return found

        monkeypatch.setattr(tcp, "_listening", visited)

    def close(self) -> None:
        for visitor in self.visitors:
            visitor.close()


def said(place: tuple[str, int], words: bytes) -> socket.socket:
    visitor = socket.create_connection(place, DEADLINE_S)
    visitor.sendall(words)
    return visitor


STRANGERS = {
    "silent": lambda place: [said(place, b"") for _ in range(MOST_UNKNOWN + 50)],
    "part of a word": lambda place: [said(place, MAGIC)],
    "noise": lambda place: [said(place, b"\xff" * 100_000)],
    "gone": lambda place: [said(place, HELLO.pack(MAGIC, 1, NONCE)).close() or said(place, b"")],
    "of no rank": lambda place: [said(place, HELLO.pack(MAGIC, 7, NONCE))],
    "without the secret": lambda place: [
        said(place, HELLO.pack(MAGIC, 1, NONCE) + bytes(PROOF_BYTES))
    ],
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_let_go_and_the_group_forms(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    visited = Visited(monkeypatch, STRANGERS[kind])
    groups = pair("lo")
    for visitor in visited.visitors:
        visitor.settimeout(DEADLINE_S)
        got = b""
        try:
            while part := visitor.recv(1000):
                got += part
        except ConnectionResetError:
            pass
        assert len(got) in (0, REPLY.size)  # a nonce and a proof, of use nowhere else
    exchange(groups)
    for place in visited.places:  # nobody can come any more
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, DEADLINE_S)
    visited.close()


@contextmanager
def called(store: dist.Store, place: Place | str) -> Iterator[None]:
    """Let there be a rank 0 of 2, on another host, that has invited others and left an address."""
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Rendezvous(store, "default", 0, 2).join, FAR, time.monotonic() + 60)

        def leave() -> None:
            note = place if isinstance(place, str) else msgspec.json.encode(place).decode()
            store.set(f"{joining.result(DEADLINE_S).prefix}/tcp/0", note)

        with ThreadPoolExecutor(1) as leaving:
            leaving.submit(leave)
            yield


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            Place(addresses=("127.0.1.1", "::1"), port=1, boot="another"),
            "rank 1: rank 0 on far listens at a loopback address only, .*GLOO_SOCKET_IFNAME",
        ),
        (
            Place(addresses=("127.0.0.1",), port=closed_port(), boot=boot()),
            r"rank 1: no connection to rank 0 on far \(127.0.0.1 port \d+: Connection refused\);"
            ".*GLOO_SOCKET_IFNAME",
        ),
        ("{", "rank 1: a note of rank 0 in the store cannot be read"),
        ('{"addresses":["nowhere"],"port":1,"boot":""}', "rank 1: a note of rank 0 .* cannot be"),
    ],
    ids=["loopback", "refused", "no note", "no address"],
)
def test_a_rank_that_cannot_be_reached(place: Place | str, words: str) -> None:
    store = dist.HashStore()
    with called(store, place), pytest.raises(PeerError, match=words):
        Group(store, 1, 2, timeout_s=DEADLINE_S)


def test_an_address_of_both_hosts_is_tried_last() -> None:
    own: list[Address] = [
        ipaddress.ip_interface(each) for each in ("172.17.0.1/16", "10.0.0.1/24", "127.0.0.1/8")
    ]
    place = Place(
        addresses=("172.17.0.1", "192.168.7.2", "10.0.0.2", "127.0.0.1"), port=7, boot="another"
    )
    ways = [address for address, _ in tcp._ways(place, own, "this")]
    assert ways == ["10.0.0.2", "192.168.7.2", "172.17.0.1"]
    assert ("127.0.0.1", 7) in tcp._ways(place, own, "another")


def test_the_interface_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _native, "interfaces", lambda: [("lo", "127.0.0.1", 8), ("a", "10.0.0.1", 24)]
    )
    monkeypatch.delenv(tcp.VARIABLE, raising=False)
    assert [str(each) for each in tcp.own_addresses(0, None)] == ["127.0.0.1/8", "10.0.0.1/24"]
    assert [str(each) for each in tcp.own_addresses(0, "a")] == ["10.0.0.1/24"]
    monkeypatch.setenv(tcp.VARIABLE, "b,lo")
    assert [str(each) for each in tcp.own_addresses(0, None)] == ["127.0.0.1/8"]
    with pytest.raises(UserError, match=r"rank 0: no interface 'c' is up .found: lo, a., or has"):
        tcp.own_addresses(0, "c")


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(address == "::1" for _, address, _ in _native.interfaces()):
        pytest.skip("this host has no IPv6")
    monkeypatch.setattr(tcp, "own_addresses", lambda *_: [ipaddress.ip_interface("::1/128")])
    exchange(pair())
