"""The workers of a benchmark: where they run, and how they are started."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from syncline.errors import UserError
from syncline.lab.bench.messages import LapTimes, Order, Ready, Refused, Setup
from syncline.lab.bench.request import Local
from syncline.lab.processes import run_folder
from syncline.lab.testbed import Cluster, Testbed
from syncline.lab.testbed.cluster import DEVICE
from syncline.lab.workers import START_S, Host, ThisHost, WorkerGroup, module_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the workers of a benchmark run, and how they find each other."""

    setup: Setup
    folder: Path
    hosts: Sequence[Host]
    interface: str  # the network device between ranks

    @property
    def by_name(self) -> dict[str, Host]:
        """Emulated hosts by name; none where all ranks run on this host."""
        return {host.name: host for host in self.hosts if not isinstance(host, ThisHost)}

    @property
    def environment(self) -> dict[str, str]:
        """Variables for all workers."""
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            "TMPDIR": str(self.folder),
        }


@contextmanager
def meeting(
    place: Local | Cluster,
    workers: int,
    *,
    choices: Literal["measured", "built-in"],
    timeout_s: float,
) -> Iterator[Meeting]:
    """Yield where workers can meet, on an emulated cluster or on this host."""
    emulated = Testbed(place) if isinstance(place, Cluster) else nullcontext()
    with run_folder() as folder, emulated as bed:
        setup = Setup(
            ranks=workers,
            store=str(folder / "store"),
            transport="tcp" if place == "tcp" else "auto",
            choices=choices,
            timeout_s=timeout_s,
        )
        hosts: Sequence[Host] = [ThisHost()] * workers
        if bed is not None:
            hosts = [bed.hosts[rank // bed.cluster.workers_per_host] for rank in range(workers)]
        interface = "lo" if bed is None else DEVICE
        yield Meeting(setup=setup, folder=folder, hosts=hosts, interface=interface)


class Team:
    """Connected workers: those of Syncline and torch's backends, or those of an MPI."""

    def __init__(self, workers: WorkerGroup, setup: Setup) -> None:
        workers.gather(setup.ranks)
        self._workers, self._timeout_s = workers, setup.timeout_s
        [self.ready, *_] = workers.ask(setup, Ready, timeout_s=START_S)

    def run(self, order: Order) -> LapTimes | Refused:
        """Have all ranks run a lap; return the slowest one's time and the CPU time of all."""
        answers = self._workers.ask(
            order,
            LapTimes | Refused,
            timeout_s=self._timeout_s,
            overdue=f"{order.contestant} did not end {order.collective} of {order.size_bytes} "
            f"bytes within {self._timeout_s:g} s",
        )
        for answer in answers:
            if isinstance(answer, Refused):
                return answer
        return LapTimes(
            wall_s=max(lap.wall_s for lap in answers) / order.iterations,
            cpu_s=math.fsum(lap.cpu_s for lap in answers) / order.iterations,
        )


@contextmanager
def torch_team(at: Meeting) -> Iterator[Team]:
    """Yield the workers of Syncline and of torch's backends."""
    with WorkerGroup(at.folder, name="torch worker") as workers:
        for rank, host in enumerate(at.hosts):
            command = _worker(sys.executable, workers.path, "torch", str(rank))
            workers.start(host, command, at.environment, rank=rank)
        yield Team(workers, at.setup)


@contextmanager
def mpi_team(mpi: str, python: Path, at: Meeting, *, tcp: bool) -> Iterator[Team]:
    """Yield the workers that an MPI's own mpiexec starts; there may be more of them than cores.

    ``python`` is the interpreter of the environment in which the MPI is installed; a UserError says
    if it is not. With ``tcp`` the workers must use TCP; otherwise the MPI chooses.
    """
    mpiexec = python.parent / "mpiexec"
    for needed in (python, mpiexec):
        if not needed.exists():
            raise UserError(f"no {needed}; tools/bench-mpi installs it")
    with WorkerGroup(at.folder, name=f"{mpi} worker", hosts=at.by_name) as workers:
        # mpiexec calls this in place of ssh, to start commands on other hosts.
        agent = at.folder / f"{mpi}-agent"
        call = module_command("syncline.lab.workers", workers.path)
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
        agent.chmod(0o700)
        start = [str(mpiexec), "-n", str(at.setup.ranks)]
        options, variables = _OPTIONS[mpi](at, tcp, agent)
        command = [*start, *options, *_worker(str(python), workers.path, mpi)]
        workers.start(at.hosts[0], command, {**at.environment, **variables})
        yield Team(workers, at.setup)


def _worker(python: str, *arguments: str) -> list[str]:
    return module_command("syncline.lab.bench.worker", *arguments, python=python)


Options = tuple[list[str], Mapping[str, str]]  # arguments of mpiexec, and variables for it


def _open_mpi(at: Meeting, tcp: bool, agent: Path) -> Options:
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if at.setup.ranks > len(os.sched_getaffinity(0)):
        # On emulated hosts Open MPI cannot see that its ranks share cores.
        options += ["--mca", "mpi_yield_when_idle", "1"]
    if at.by_name:
        slots = ",".join(f"{host}:1" for host in at.by_name)
        options += ["--host", slots, "--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--prtemca", "prte_if_include", at.interface]
    if tcp:
        options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        options += ["--mca", "btl_tcp_if_include", at.interface]
    return options, {}


def _mpich(at: Meeting, tcp: bool, agent: Path) -> Options:
    options = []
    if at.by_name:
        options = ["-hosts", ",".join(at.by_name)]
        options += ["-launcher", "rsh", "-launcher-exec", str(agent), "-iface", at.interface]
    variables = {
        "MPIR_CVAR_NOLOCAL": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": at.interface,
    }
    return options, variables if tcp else {}


_OPTIONS = {"open-mpi": _open_mpi, "mpich": _mpich}
