"""The commands of iproute2 that make a cluster's links; pure functions of its description."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.testbed.cluster import DEVICE, Cluster

__all__ = ["SWITCH", "delaying", "host_links", "port_of", "shaping", "switch_links"]

SWITCH = "switch"
"""The bridge that joins all hosts."""
PREFIX_LENGTH = 24
BURST_PACKETS = 2
"""Packets of segmentation offload that a bucket holds: with one it would have to be full for each,
and a timer that fires late would lose tokens every time."""
LARGEST_PACKET_BYTES = 65536
"""The kernel's default."""
DELAYED_PACKETS = 100_000
"""Packets that may be under way on a link with latency."""


def port_of(host: int) -> str:
    """Return the switch's end of a host's link."""
    return f"port{host}"


def switch_links(cluster: Cluster, namespaces: list[str]) -> Iterator[str]:
    """Yield the lines for ``ip -batch`` on the switch.

    Args:
        cluster: what to make.
        namespaces: the path of each host's network namespace.
    """
    # Without snooping and spanning tree nothing is sent but what the job sends.
    yield f"link add {SWITCH} type bridge stp_state 0 mcast_snooping 0"
    yield f"link set dev {SWITCH} up"
    for host, path in enumerate(namespaces):
        port, mtu = port_of(host), cluster.mtu_bytes
        yield (
            f"link add name {port} mtu {mtu} type veth peer name {DEVICE} mtu {mtu} netns {path}"
        )
        yield f"link set dev {port} master {SWITCH} up{_largest_packet(cluster, host)}"


def host_links(cluster: Cluster, host: int) -> Iterator[str]:
    """Yield the lines for ``ip -batch`` on a host: an address, and no route but to the others."""
    yield "link set dev lo up"
    yield f"address add {cluster.address_of(host)}/{PREFIX_LENGTH} dev {DEVICE}"
    yield f"link set dev {DEVICE} up{_largest_packet(cluster, host)}"


def shaping(cluster: Cluster, host: int, device: str) -> Iterator[str]:
    """Yield the lines for ``tc -batch`` that limit what leaves through one end of a host's link.

    Args:
        cluster: what to make.
        host: whose link it is.
        device: the host's own end, or the switch's.
    """
    rate = cluster.rate_of(host)
    if rate is not None:
        yield (
            f"qdisc replace dev {device} root handle 1: tbf rate {round(rate * 8)}bit "
            f"burst {cluster.burst_bytes(rate)} limit {cluster.queue_bytes(rate)}"
        )


def _largest_packet(cluster: Cluster, host: int) -> str:
    """Return the setting that keeps the packets of segmentation offload within the bucket.

    The kernel hands over up to 64 KiB at once, as if a card cut them into frames. What is larger
    than its bucket the token bucket cuts itself, which took three times the processor time: 8 hosts
    on 2 cores reached 0.76 of a line of 1 Gbit/s, and reach 0.97 of it with smaller packets.
    """
    rate = cluster.rate_of(host)
    if rate is None:
        return ""
    size_bytes = cluster.burst_bytes(rate) // BURST_PACKETS
    if size_bytes < 2 * cluster.mtu_bytes:  # slow enough that cutting costs little
        return ""
    return f" gso_max_size {min(size_bytes, LARGEST_PACKET_BYTES)}"


def delaying(cluster: Cluster, host: int) -> Iterator[str]:
    """Yield the lines for ``tc -batch`` on a host that add latency.

    Only what a host sends is delayed, so that the latency counts once on a way. It comes after
    :func:`shaping`, inside the token bucket, which releases what has been delayed.
    """
    if cluster.latency_s > 0:
        parent = "root" if cluster.rate_of(host) is None else "parent 1:1"
        yield (
            f"qdisc replace dev {DEVICE} {parent} handle 2: netem "
            f"delay {cluster.latency_s * 1e6:.3f}us limit {DELAYED_PACKETS}"
        )
