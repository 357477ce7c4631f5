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
    for index, (name, speed, state) in enumerate(
        [("eth0", "1000", "up"), ("eth1", "25000", "up"), ("eth2", "100000", "down")]
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
        (tmp_path / name / "mtu").write_text(f"{1500 * (index + 1)}\n")
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    monkeypatch.setattr(interfaces, "INTERFACES", tmp_path)
    monkeypatch.setattr(
        socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "eth2")]
    )
    return tmp_path


def test_the_interface_is_the_one_that_a_variable_names(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = interface_used()
    assert found is not None
    assert (found.name, found.bytes_per_s, found.mtu_bytes) == ("eth0", 1.25e8, 1500)
    assert found.faster == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    found = interface_used()
    assert found is not None
    assert found.faster is None


def test_a_driver_that_tells_no_speed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    (host / "eth0" / "speed").write_text("-1\n")
    found = interface_used()
    assert found is not None
    assert found.bytes_per_s is None
    assert found.faster is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_used() is None


def test_segments_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = tmp_path / "snmp"
    counters.write_text(
        "Ip: A B\nIp: 1 2\nTcp: OutSegs RetransSegs\nTcp: 1000 30\nUdp: C\nUdp: 1\n"
    )
    monkeypatch.setattr(interfaces, "COUNTERS", counters)
    assert segments() == (1000, 30)
    monkeypatch.setattr(interfaces, "COUNTERS", tmp_path / "missing")
    assert segments() == (0, 0)
