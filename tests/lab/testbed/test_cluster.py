"""The description of a cluster, and the commands that make its links."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import UserError
from syncline.lab.testbed.cluster import Cluster
from syncline.lab.testbed.testbed import delaying, host_links, shaping, switch_links


def test_quantities_with_units() -> None:
    made = Cluster.of(hosts=4, rate="1gbit", hosts_rate=["0:100mbit", "3:2.5gbit"], latency="20us")
    assert made.rate_bytes_per_s == 125e6
    assert [made.rate_of(host) for host in range(4)] == [12.5e6, 125e6, 125e6, 312.5e6]
    assert made.latency_s == pytest.approx(20e-6)
    assert str(made) == (
        "4 hosts, 1 worker each, links 1 Gbit/s (host0 100 Mbit/s, host3 2.5 Gbit/s), 20 us one way"
    )
    assert str(Cluster(hosts=1, workers_per_host=2)) == "1 host, 2 workers each, links not limited"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosts": 0}, "hosts must be from 1 to 100, found 0"),
        ({"hosts": 101}, "hosts must be from 1 to 100, found 101"),
        ({"workers_per_host": 0}, "workers per host must be at least 1, found 0"),
        ({"workers_per_host": 200}, "2 hosts with 200 workers each are 400 processes on one mach"),
        ({"rate": "10kbit"}, "must be from 100 kbit/s to 1000 Gbit/s, found 10 kbit/s"),
        ({"rate": "2tbit"}, "must be from 100 kbit/s to 1000 Gbit/s, found 2000 Gbit/s"),
        ({"rate": "fast"}, "bandwidth 'fast' is not a number with a unit"),
        ({"hosts_rate": ["2:1gbit"]}, "a rate is given for host 2, but the 2 hosts are 0 to 1"),
        ({"hosts_rate": ["1gbit"]}, "host rate '1gbit': expected HOST:RATE, such as 0:100mbit"),
        ({"hosts_rate": ["-1:1gbit"]}, "host rate '-1:1gbit': expected HOST:RATE"),
        ({"hosts_rate": ["0:1gbit", "0:2gbit"]}, "host rate '0:2gbit': host 0 has a rate already"),
        ({"hosts_rate": ["0:1"]}, "bandwidth '1' has no unit"),
        ({"latency": "20"}, "duration '20' is not a number with a unit"),
        ({"latency": "1000s"}, "latency must be from 0 s to 10 s, found 1000 s"),
        ({"mtu_bytes": 100}, "mtu must be from 1280 bytes to 65000 bytes, found 100 bytes"),
    ],
)
def test_what_cannot_be_emulated(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster.of(**{"hosts": 2, **changes})
    assert said in str(caught.value)


@pytest.mark.parametrize("bits_per_s", [1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("mtu_bytes", [1500, 9000])
def test_the_bucket_holds_two_frames_and_little_more(bits_per_s: float, mtu_bytes: int) -> None:
    cluster = Cluster(hosts=2, mtu_bytes=mtu_bytes)
    burst_bytes = cluster.burst_bytes(bits_per_s / 8)
    assert burst_bytes >= 2 * (mtu_bytes + 14)
    free_s = burst_bytes / (bits_per_s / 8)
    assert free_s <= max(400.01e-6, 2.01 * (mtu_bytes + 14) / (bits_per_s / 8))


@pytest.mark.parametrize("mtu_bytes", [1500, 9000])
@pytest.mark.parametrize("rate", ["1gbit", "10gbit", "100gbit"])
def test_packets_fit_into_the_bucket_twice_and_hold_two_frames(rate: str, mtu_bytes: int) -> None:
    cluster = Cluster.of(hosts=1, rate=rate, mtu_bytes=mtu_bytes)
    asked = cluster.rate_of(0)
    assert asked is not None
    packet_bytes = int(list(host_links(cluster, 0))[-1].split()[-1])
    assert list(switch_links(cluster, ["/a"]))[-1].endswith(f" gso_max_size {packet_bytes}")
    assert 2 * mtu_bytes <= packet_bytes <= cluster.burst_bytes(asked) / 2
    assert packet_bytes <= 65536


@pytest.mark.parametrize(("rate", "mtu_bytes"), [("100mbit", 9000), ("1gbit", 65000), (None, 9000)])
def test_slow_and_unlimited_links_keep_their_packets(rate: str | None, mtu_bytes: int) -> None:
    cluster = Cluster.of(hosts=1, rate=rate, mtu_bytes=mtu_bytes)
    assert list(host_links(cluster, 0))[-1] == "link set dev eth0 up"


@pytest.mark.parametrize(
    ("hosts", "processors", "shares"),
    [
        (2, [0, 1], [[0], [1]]),
        (2, [0, 1, 2, 5, 6], [[0, 1], [2, 5]]),
        (4, [0, 1], [[0], [1], [0], [1]]),
        (3, [0, 1], [[0, 1]] * 3),
        (1, [3], [[3]]),
    ],
)
def test_shares_of_processors(hosts: int, processors: list[int], shares: list[list[int]]) -> None:
    cluster = Cluster(hosts=hosts)
    assert [cluster.processors_of(host, processors) for host in range(hosts)] == shares


def test_shaping_in_bits_and_latency_inside_the_bucket() -> None:
    both = Cluster.of(hosts=2, rate="10gbit", latency="20us")
    assert list(shaping(both, 0, "port0")) == [
        "qdisc replace dev port0 root handle 1: tbf rate 10000000000bit burst 500000 limit 62500000"
    ]
    assert list(delaying(both, 0)) == [
        "qdisc replace dev eth0 parent 1:1 handle 2: netem delay 20.000us limit 100000"
    ]
    # What is not asked for is not set.
    late = Cluster.of(hosts=2, latency="1ms")
    assert list(shaping(late, 0, "eth0")) == []
    assert list(delaying(late, 0)) == [
        "qdisc replace dev eth0 root handle 2: netem delay 1000.000us limit 100000"
    ]
    assert list(delaying(Cluster.of(hosts=2, rate="1gbit"), 0)) == []
