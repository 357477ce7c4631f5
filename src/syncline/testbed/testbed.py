"""``Testbed``: an emulated cluster while it lasts."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from syncline.errors import UserError
from syncline.model.document import Value
from syncline.processes import end_of
from syncline.testbed.cluster import DEVICE, Cluster
from syncline.testbed.control import Sandbox
from syncline.testbed.job import GRACE_S, Notice, Output, run_job
from syncline.testbed.links import (
    SWITCH,
    delaying,
    host_links,
    port_of,
    shaping,
    switch_links,
)
from syncline.testbed.place import Place
from syncline.testbed.refusal import tool
from syncline.testbed.result import JobResult
from syncline.testbed.sandbox import SWITCH_PLACE

__all__ = ["Testbed", "Traffic"]


class Traffic(Value, frozen=True, kw_only=True):
    """What has passed one host's link, in bytes of whole frames."""

    sent_bytes: int
    received_bytes: int
    dropped_packets: int
    """For want of room in the queues at both ends of the link."""


class Testbed:
    """Hosts on this machine, joined by a switch with links of given rates, that commands run on.

    As in::

        with Testbed(Cluster.of(hosts=4, rate="1gbit")) as bed:
            bed.hosts[0].run(["ping", "-c", "1", "host1"])
            result = bed.run(["python", "train.py"], timeout_s=600)

    Every host is a set of Linux namespaces: its own network devices, host name and shared memory;
    files, processors and GPUs are those of the machine. There is no way out to other networks.
    Whatever happens to this process, nothing is left behind.

    Raises:
        UserError: on entry, if the machine has not what it takes; the message says what to do.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Run a command on every host as torchrun would; see :func:`syncline.testbed.job.run_job`.

        Raises:
            UserError: the command cannot be run.
            PeerError: the cluster has ended.
        """
        return run_job(
            self.cluster,
            self.hosts,
            command,
            environment=environment,
            timeout_s=timeout_s,
            grace_s=grace_s,
            output=output,
            notice=notice,
            signals=signals,
        )

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
    """Have ``ip`` or ``tc`` carry out commands on a host or the switch."""
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
