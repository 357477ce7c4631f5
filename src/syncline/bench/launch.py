"""The workers of the benchmark: where they run, and how they are started."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from syncline.bench.messages import LapTimes, Order, Ready, Refused, Setup
from syncline.errors import UserError
from syncline.testbed import Cluster, Testbed
from syncline.testbed.cluster import DEVICE
from syncline.workers import START_S, Host, ThisHost, WorkerGroup, module_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The host of each rank."""

    of_rank: Sequence[Host]
    interface: str
    """The network device between ranks."""

    @property
    def by_name(self) -> dict[str, Host]:
        """Emulated hosts by name; none where all ranks run on this host."""
        return {host.name: host for host in self.of_rank if not isinstance(host, ThisHost)}

    def environment(self, folder: Path) -> dict[str, str]:
        """Return variables for all workers, whose temporary files go to ``folder``."""
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            "UCX_NET_DEVICES": self.interface,
            "TMPDIR": str(folder),
        }


@contextmanager
def hosts_of(place: str | Cluster, workers: int) -> Iterator[Hosts]:
    """Yield the hosts of a benchmark's workers: those of an emulated cluster, or this one."""
    if not isinstance(place, Cluster):
        yield Hosts(of_rank=[ThisHost()] * workers, interface="lo")
        return
    with Testbed(place) as bed:
        hosts = [bed.hosts[rank // place.workers_per_host] for rank in range(workers)]
        yield Hosts(of_rank=hosts, interface=DEVICE)


class Team:
    """Workers that have met: those of Syncline and torch's backends, or those of an MPI."""

    def __init__(self, workers: WorkerGroup, setup: Setup) -> None:
        workers.gather(setup.ranks)
        self._workers = workers
        [self.ready, *_] = workers.ask(setup, Ready, timeout_s=START_S)

    def run(self, order: Order, timeout_s: float) -> LapTimes | Refused:
        """Have all ranks do a lap; return what an iteration took, or why a rank could not.

        That is the time of the slowest rank, and the CPU time of all ranks together.

        Raises:
            PeerError: a rank has ended, or did not answer in time.
        """
        answers = self._workers.ask(
            order,
            LapTimes | Refused,
            timeout_s=timeout_s,
            overdue=f"{order.contestant} did not end {order.collective} of {order.size_bytes} "
            f"bytes within {timeout_s:g} s",
        )
        laps = [answer for answer in answers if isinstance(answer, LapTimes)]
        for answer in answers:
            if isinstance(answer, Refused):
                return answer
        return LapTimes(
            wall_s=max(lap.wall_s for lap in laps) / order.iterations,
            cpu_s=math.fsum(lap.cpu_s for lap in laps) / order.iterations,
        )


@contextmanager
def torch_team(folder: Path, setup: Setup, hosts: Hosts) -> Iterator[Team]:
    """Yield the workers of Syncline and of torch's backends.

    Raises:
        PeerError: they do not start or do not meet.
    """
    with WorkerGroup(folder, name="torch worker") as workers:
        for rank, host in enumerate(hosts.of_rank):
            command = _worker(sys.executable, workers.path, "torch", str(rank))
            workers.start(host, command, hosts.environment(folder), rank=rank)
        yield Team(workers, setup)


@contextmanager
def mpi_team(
    mpi: str, python: Path, folder: Path, setup: Setup, hosts: Hosts, *, tcp: bool
) -> Iterator[Team]:
    """Yield the workers that an MPI's own mpiexec starts; there may be more of them than cores.

    ``python`` is the interpreter of its environment. With ``tcp`` they must talk by TCP; else the
    MPI chooses.

    Raises:
        UserError: the MPI is not installed there.
        PeerError: the workers do not start.
    """
    mpiexec = python.parent / "mpiexec"
    for needed in (python, mpiexec):
        if not needed.exists():
            raise UserError(f"no {needed}; tools/bench-mpi installs it")
    with WorkerGroup(folder, name=f"{mpi} worker", hosts=hosts.by_name) as workers:
        # Called as ssh is, to start commands on other hosts.
        agent = folder / f"{mpi}-agent"
        call = module_command("syncline.workers", workers.path)
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
        agent.chmod(0o700)
        start = [str(mpiexec), "-n", str(setup.ranks)]
        options, variables = _OPTIONS[mpi](setup.ranks, hosts, tcp, agent)
        command = [*start, *options, *_worker(str(python), workers.path, mpi)]
        environment = {**hosts.environment(folder), **variables}
        workers.start(hosts.of_rank[0], command, environment)
        yield Team(workers, setup)


def _worker(python: str, *arguments: str) -> list[str]:
    return module_command("syncline.bench.worker", *arguments, python=python)


Options = tuple[list[str], Mapping[str, str]]
"""Arguments of mpiexec, and variables for it."""


def _open_mpi(workers: int, hosts: Hosts, tcp: bool, agent: Path) -> Options:
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if workers > len(os.sched_getaffinity(0)):
        # On emulated hosts it cannot see that its ranks share cores.
        options += ["--mca", "mpi_yield_when_idle", "1"]
    if hosts.by_name:
        slots = ",".join(f"{host}:1" for host in hosts.by_name)
        options += ["--host", slots, "--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--prtemca", "prte_if_include", hosts.interface]
    if tcp:
        options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        options += ["--mca", "btl_tcp_if_include", hosts.interface]
    return options, {}


def _mpich(_: int, hosts: Hosts, tcp: bool, agent: Path) -> Options:
    options = []
    if hosts.by_name:
        options = ["-hosts", ",".join(hosts.by_name)]
        options += ["-launcher", "rsh", "-launcher-exec", str(agent), "-iface", hosts.interface]
    variables = {
        "MPIR_CVAR_NOLOCAL": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": hosts.interface,
    }
    return options, variables if tcp else {}


_OPTIONS = {"open-mpi": _open_mpi, "mpich": _mpich}
