"""What a host says of its network, read from files as the kernel writes them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from syncline.train.measure import interfaces
from syncline.train.measure.interfaces import interface_used, segments


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two interfaces that are up, the second faster, and one that is down."""
    for name, speed, mtu, operstate in (
        ("eth0", 1000, 1500, "up"),
        ("eth1", 25_000, 3000, "up"),
        ("eth2", 100_000, 4500, "down"),
    ):
        (tmp_path / name).mkdir()
        for what, says in (("speed", speed), ("mtu", mtu), ("operstate", operstate)):
            (tmp_path / name / what).write_text(f"{says}\n")
    monkeypatch.setattr(interfaces, "INTERFACES", tmp_path)
    names = ["lo", "eth0", "eth1", "eth2"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    return tmp_path


def test_a_variable_names_the_interface(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = interface_used()
    assert (found.name, found.bytes_per_s, found.mtu_bytes) == ("eth0", 1.25e8, 1500)
    assert found.faster == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert interface_used().faster is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_used() is None


def test_a_driver_that_tells_no_speed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    (host / "eth0" / "speed").write_text("-1\n")
    found = interface_used()
    assert (found.bytes_per_s, found.faster) == (None, None)


def test_segments_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = tmp_path / "snmp"
    counters.write_text(
        "Ip: A B\nIp: 1 2\nTcp: OutSegs RetransSegs\nTcp: 1000 30\nUdp: C\nUdp: 1\n"
    )
    monkeypatch.setattr(interfaces, "COUNTERS", counters)
    assert segments() == (1000, 30)
    monkeypatch.setattr(interfaces, "COUNTERS", tmp_path / "missing")
    assert segments() == (0, 0)
