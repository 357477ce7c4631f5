"""How each MPI's own mpiexec is told to start workers, and which way they are to take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from syncline.bench.ground import Ground
from syncline.errors import UserError

__all__ = ["Launch", "mpi_launch"]


class Launch(NamedTuple):
    """A command, without what is to be run, and variables for it."""

    command: Sequence[str]
    environment: Mapping[str, str]


def mpi_launch(
    mpi: str, python: Path, workers: int, ground: Ground, *, tcp: bool, agent: Path
) -> Launch:
    """Return how to start workers of an MPI.

    Args:
        mpi: which.
        python: the interpreter of its environment.
        workers: how many; more than there are cores is allowed.
        ground: where they run.
        tcp: whether they must talk by TCP; else the MPI chooses.
        agent: a program that starts commands on other hosts, called as ssh is.

    Raises:
        UserError: it is not installed there.
    """
    mpiexec = python.parent / "mpiexec"
    for needed in (python, mpiexec):
        if not needed.exists():
            raise UserError(f"no {needed}; tools/bench-mpi installs it")
    make = {"open-mpi": _open_mpi, "mpich": _mpich}[mpi]
    return make([str(mpiexec), "-n", str(workers)], workers, ground, tcp, agent)


def _open_mpi(start: list[str], workers: int, ground: Ground, tcp: bool, agent: Path) -> Launch:
    command = [*start, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if workers > len(os.sched_getaffinity(0)):
        # On emulated hosts it cannot see that its ranks share cores.
        command += ["--mca", "mpi_yield_when_idle", "1"]
    if ground.hosts:
        slots = ",".join(f"{host}:1" for host in ground.hosts)
        command += ["--host", slots, "--prtemca", "plm_ssh_agent", str(agent)]
        command += ["--prtemca", "prte_if_include", ground.interface]
    if tcp:
        command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        command += ["--mca", "btl_tcp_if_include", ground.interface]
    return Launch(command, {})


def _mpich(start: list[str], workers: int, ground: Ground, tcp: bool, agent: Path) -> Launch:
    del workers
    command, environment = start, {}
    if ground.hosts:
        command = [*start, "-hosts", ",".join(ground.hosts)]
        command += ["-launcher", "rsh", "-launcher-exec", str(agent), "-iface", ground.interface]
    if tcp:
        environment = {
            "MPIR_CVAR_NOLOCAL": "1",
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": ground.interface,
        }
    return Launch(command, environment)
