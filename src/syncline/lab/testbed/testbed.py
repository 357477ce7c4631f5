"""``Testbed``: an emulated cluster, with its links."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec

from syncline.errors import UserError
from syncline.lab.processes import end_of
from syncline.lab.testbed.cluster import DEVICE, Cluster
from syncline.lab.testbed.control import Place, Sandbox
from syncline.lab.testbed.job import GRACE_S, Job, JobResult, Notice, Output, worker_environment
from syncline.lab.testbed.kernel import tool
from syncline.lab.testbed.sandbox import SWITCH_PLACE
from syncline.plan.document import Value

SWITCH = "switch"  # the bridge that joins all hosts
PREFIX_LENGTH = 24
BURST_PACKETS = 2
"""Packets of segmentation offload that a token bucket holds. If it held one, each packet would need
a full bucket, and a timer that fires late would lose tokens every time."""
LARGEST_PACKET_BYTES = 65536
DELAYED_PACKETS = 100_000  # packets that may be in flight on a link with latency


def port_of(host: int) -> str:
    """Return the switch's end of a host's link."""
    return f"port{host}"


def switch_links(cluster: Cluster, namespaces: list[str]) -> Iterator[str]:
    """Yield the lines for ``ip -batch`` on the switch; ``namespaces`` are the hosts' paths."""
    # Without snooping and spanning tree, links carry only what the job sends.
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
    """Yield the lines for ``tc -batch`` that limit what leaves through one end of a host's link."""
    rate = cluster.rate_of(host)
    if rate is not None:
        yield (
            f"qdisc replace dev {device} root handle 1: tbf rate {round(rate * 8)}bit "
            f"burst {cluster.burst_bytes(rate)} limit {cluster.queue_bytes(rate)}"
        )


def _largest_packet(cluster: Cluster, host: int) -> str:
    """Return the setting that keeps the packets of segmentation offload within the bucket.

    The kernel hands over up to 64 KiB at once, as if a card cut them into frames. The token bucket
    itself cuts packets larger than the bucket, which took three times the processor time.
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

    Only what a host sends is delayed, so that the latency counts once in each direction. It comes
    after :func:`shaping`, inside the token bucket, which releases the delayed packets.
    """
    if cluster.latency_s > 0:
        parent = "root" if cluster.rate_of(host) is None else "parent 1:1"
        yield (
            f"qdisc replace dev {DEVICE} {parent} handle 2: netem "
            f"delay {cluster.latency_s * 1e6:.3f}us limit {DELAYED_PACKETS}"
        )


class Traffic(Value, frozen=True, kw_only=True):
    """The traffic of one host's link so far, in bytes of whole frames."""

    sent_bytes: int
    received_bytes: int
    dropped_packets: int  # packets for which the queues at both ends of the link had no room


class Testbed:
    """Hosts on this machine that run commands, joined by a switch with links of given rates.

    As in::

        with Testbed(Cluster.of(hosts=4, rate="1gbit")) as bed:
            bed.hosts[0].run(["ping", "-c", "1", "host1"])
            result = bed.run(["python", "train.py"], timeout_s=600)

    Every host is a set of Linux namespaces: its own network devices, host name and shared memory;
    files, processors and GPUs are those of the machine. There is no way out to other networks.
    Whatever happens to this process, nothing is left behind.

    Raises:
        UserError: on entry, if this machine cannot emulate a cluster; the message says what to do.
    """

    __test__ = False  # pytest takes names that begin with Test for tests

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        cluster = self.cluster
        with contextlib.ExitStack() as stack:
            sandbox = stack.enter_context(Sandbox(cluster))
            self.switch = Place(sandbox, SWITCH_PLACE, SWITCH)
            self.hosts = tuple(
                Place(sandbox, host + 1, cluster.name_of(host)) for host in range(cluster.hosts)
            )
            _batch(self.switch, "ip", switch_links(cluster, sandbox.namespaces))
            for number, host in enumerate(self.hosts):
                _batch(host, "ip", host_links(cluster, number))
                _batch(host, "tc", shaping(cluster, number, DEVICE))
                _batch(host, "tc", delaying(cluster, number))
                _batch(self.switch, "tc", shaping(cluster, number, port_of(number)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        grace_s: float = GRACE_S,
        output: Output | None = None,
        notice: Notice | None = None,
        signals: socket.socket | None = None,
    ) -> JobResult:
        """Run a command once for every worker of the cluster, and wait until all have ended.

        When a worker fails, the others may go on for ``grace_s``, so that they can report their
        own errors. Then they get SIGTERM, and ``grace_s`` later SIGKILL.

        Args:
            command: and its arguments.
            environment: variables besides those of this process and those that torchrun sets.
            timeout_s: the job is stopped after this long; None lets it run.
            grace_s: how long workers may go on, and again after SIGTERM.
            output: gets every line as it comes; by default output is kept for the result.
            notice: gets a sentence when a worker fails and when a signal is passed on.
            signals: numbers of signals to pass on are read from here, one a byte; on the first,
                the workers have ``grace_s`` to end, the second kills them.

        Raises:
            UserError: the command cannot be run.
            PeerError: the cluster has ended.
        """
        cluster = self.cluster
        kept: list[tuple[list[bytes], list[bytes]]] = [([], []) for _ in range(cluster.workers)]

        def keep(rank: int, error: bool, line: bytes) -> None:
            kept[rank][error].append(line + b"\n")

        given = environment or {}
        with Job(cluster, output or keep, notice or (lambda _: None), grace_s) as job:
            stopped = signals is not None and job.listen(signals)
            for rank in range(0 if stopped else cluster.workers):
                host = self.hosts[rank // cluster.workers_per_host]
                added = worker_environment(cluster, rank, {**os.environ, **given})
                job.start(rank, host, command, {**given, **added})
            result = job.wait(timeout_s)
        if output is not None:
            return result
        stdout, stderr = (
            tuple(b"".join(streams[error]).decode(errors="replace") for streams in kept)
            for error in (False, True)
        )
        return msgspec.structs.replace(result, stdout=stdout, stderr=stderr)

    def traffic(self) -> tuple[Traffic, ...]:
        """Return what has passed each host's link so far."""
        answer = self.switch.run([_path("ip"), "-json", "-stats", "link", "show", "type", "veth"])
        ports = {port["ifname"]: port["stats64"] for port in json.loads(answer.stdout)}
        return tuple(
            # The switch receives what the host sends.
            Traffic(
                sent_bytes=ports[port_of(host)]["rx"]["bytes"],
                received_bytes=ports[port_of(host)]["tx"]["bytes"],
                dropped_packets=self._drops(self.switch, port_of(host))
                + self._drops(self.hosts[host], DEVICE),
            )
            for host in range(self.cluster.hosts)
        )

    def _drops(self, place: Place, device: str) -> int:
        answer = place.run([_path("tc"), "-json", "-stats", "qdisc", "show", "dev", device])
        return sum(qdisc.get("drops", 0) for qdisc in json.loads(answer.stdout))


def _batch(place: Place, name: str, commands: Iterable[str]) -> None:
    text = "".join(f"{command}\n" for command in commands)
    if not text:
        return
    result = place.run([_path(name), "-batch", "-"], text=text)
    if result.code == 0:
        return
    said = " ".join(result.stderr.split()) or end_of(result.code)
    if "netem" in text:
        raise UserError(
            "latency needs netem, which delays packets and which this kernel does not have (tc "
            f"said: {said}); load it with 'modprobe sch_netem' if there is such a module, or "
            "leave latency out"
        )
    raise UserError(
        f"the links of {place.name} cannot be made ({name} said: {said}); the kernel needs "
        "veth, bridge and sch_tbf: try 'modprobe' with each"
    )


def _path(name: str) -> str:
    found = tool(name)
    assert found is not None  # the sandbox has looked for it
    return found
