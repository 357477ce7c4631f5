"""Ranks of different hosts meet over TCP: strangers, addresses and interfaces."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket

import msgspec
import pytest

from syncline import _native
from syncline.comm.groups import meeting, tcp
from syncline.comm.groups.meeting import HELLO, MAGIC, MOST_UNKNOWN
from syncline.comm.groups.rendezvous import RankCard
from syncline.comm.groups.tcp import Address, Place
from syncline.errors import PeerError, UserError
from tests.comm.groups.one_process import FAR, VisitedStore, add_up, join_with, joined, noting
from tests.timeouts import DEADLINE_S

NONCE, NO_PROOF = bytes(meeting.NONCE_BYTES), bytes(meeting.PROOF_BYTES)


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
    "no secret": lambda place: [said(place, HELLO.pack(MAGIC, 1, NONCE) + NO_PROOF)],
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_let_go_and_the_group_forms(kind: str) -> None:
    places: list[tuple[str, int]] = []
    visitors: list[socket.socket] = []

    def visit(key: str, value: str) -> None:
        if "/tcp/" in key:
            places.append(("127.0.0.1", json.loads(value)["port"]))
            visitors.extend(STRANGERS[kind](places[-1]))

    with joined(2, VisitedStore(visit), transport="tcp", interface="lo") as groups:
        for visitor in visitors:
            got = b""
            with visitor, contextlib.suppress(ConnectionResetError):
                while part := visitor.recv(1000):
                    got += part
            assert len(got) in (0, meeting.REPLY.size)  # a nonce and a proof, of use nowhere else
        add_up(groups, 100_000)
    assert len(places) == 2
    for place in places:  # nobody can come any more
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, DEADLINE_S)


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
            Place(addresses=("127.0.0.1",), port=closed_port(), boot=RankCard.own().host[0]),
            r"rank 1: no connection to rank 0 on far \(127.0.0.1 port \d+: Connection refused\);"
            ".*GLOO_SOCKET_IFNAME",
        ),
        ("{", "rank 1: a note of rank 0 in the store cannot be read"),
        ('{"addresses":["nowhere"],"port":1,"boot":""}', "rank 1: a note of rank 0 .* cannot be"),
    ],
    ids=["loopback", "refused", "no note", "no address"],
)
def test_a_rank_that_cannot_be_reached(place: Place | str, words: str) -> None:
    note = place if isinstance(place, str) else msgspec.json.encode(place).decode()
    joining = join_with(FAR, noting("tcp/0", note), answering=0)
    with pytest.raises(PeerError, match=words):
        joining.result()


def test_an_address_of_both_hosts_is_tried_last() -> None:
    own: list[Address] = [
        ipaddress.ip_interface(each) for each in ("172.17.0.1/16", "10.0.0.1/24", "127.0.0.1/8")
    ]
    place = Place(
        addresses=("172.17.0.1", "192.168.7.2", "10.0.0.2", "127.0.0.1"), port=7, boot="another"
    )
    ways = [address for address, _ in tcp.ways_to(place, own, "this")]
    assert ways == ["10.0.0.2", "192.168.7.2", "172.17.0.1"]
    assert ("127.0.0.1", 7) in tcp.ways_to(place, own, "another")


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
    with joined(transport="tcp") as groups:
        add_up(groups, 100_000)
