"""Where workers run: this host, or emulated hosts."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO, Protocol, Self

from syncline.processes import Process
from syncline.testbed import Cluster, Testbed
from syncline.testbed import Process as RemoteProcess
from syncline.testbed.cluster import DEVICE

__all__ = ["EmulatedHosts", "Ground", "Running", "ThisHost", "ground_of"]

LAST_BYTES = 2000


class Running(Protocol):
    """A process that was started."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""

    def said(self) -> str:
        """Return the end of its output."""

    def close(self, deadline_s: float) -> None:
        """Let it end until then, on the monotonic clock; kill what is left."""


class Ground(Protocol):
    """Where the workers of a crew run, rank by rank."""

    interface: str
    """The network device between them."""
    hosts: Sequence[str]
    """Names of the hosts; empty where all is one host."""

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Start a command where that rank belongs."""

    def start_on(self, host: str, command: Sequence[str]) -> Running:
        """Start a command on a host by its name."""


class ThisHost:
    """All workers are processes of this host."""

    interface = "lo"
    hosts: Sequence[str] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Start a command; the rank makes no difference."""
        del rank
        return _LocalProcess(command, environment)

    def start_on(self, host: str, command: Sequence[str]) -> Running:
        """There is no other host: start it here."""
        del host
        return _LocalProcess(command, {})


class _LocalProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = Process(command, environment, stdout=self._output, stderr=self._output)

    @property
    def ended(self) -> bool:
        return self._process.ended

    def said(self) -> str:
        return _end_of(self._output)

    def close(self, deadline_s: float) -> None:
        self._process.close(deadline_s)
        self._output.close()


class EmulatedHosts:
    """Workers on the hosts of an emulated cluster."""

    interface = DEVICE

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._bed = Testbed(cluster)
        self.hosts: Sequence[str] = [cluster.name_of(host) for host in range(cluster.hosts)]

    def __enter__(self) -> Self:
        self._bed.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bed.__exit__(kind, error, trace)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Start a command on the host of the rank; ranks fill one host after the other."""
        host = self.hosts[rank // self._cluster.workers_per_host]
        return _RemoteProcess(self._bed, self.hosts.index(host), command, environment)

    def start_on(self, host: str, command: Sequence[str]) -> Running:
        """Start a command on a host by its name."""
        return _RemoteProcess(self._bed, self.hosts.index(host), command, {})


def ground_of(place: str | Cluster) -> AbstractContextManager[Ground]:
    """Return where the workers of a benchmark run: emulated hosts, or else this one."""
    return EmulatedHosts(place) if isinstance(place, Cluster) else ThisHost()


class _RemoteProcess:
    def __init__(
        self, bed: Testbed, host: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        descriptor = self._output.fileno()
        self._process: RemoteProcess = bed.hosts[host].start(
            command, environment=environment, stdout=descriptor, stderr=descriptor
        )

    @property
    def ended(self) -> bool:
        return bool(select.select([self._process], [], [], 0)[0])

    def said(self) -> str:
        return _end_of(self._output)

    def close(self, deadline_s: float) -> None:
        select.select([self._process], [], [], max(deadline_s - time.monotonic(), 0))
        self._process.close()
        self._output.close()


def _end_of(output: IO[bytes]) -> str:
    end = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), LAST_BYTES, max(end - LAST_BYTES, 0)).decode(errors="replace")
