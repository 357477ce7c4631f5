"""``Site``: where the ranks of a group are, which decides which algorithm is fastest."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Literal

import msgspec

from syncline.errors import UserError
from syncline.plan.document import Value

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host
Route = Literal["auto", "tcp", "ucx", "shared+ucx"]
"""How ranks are joined; see :data:`~syncline.comm.groups.group.Transport`."""
APART = ("tcp", "ucx")  # routes without shared memory
WORDS: dict[Route, str] = {
    "auto": "",
    "tcp": " by TCP",
    "ucx": " by UCX",
    "shared+ucx": " by UCX between hosts",
}

MACHINE_ID = Path("/etc/machine-id")
DOMAIN = Path("/proc/sys/kernel/domainname")
"""Emulated hosts have their cluster's name here: a cluster with other links is another site."""
IDENTITY_LETTERS = 16


class Site(Value, frozen=True, kw_only=True):
    """The ranks, hosts and route for which measured choices are valid."""

    route: Route
    layout: Hosts
    """The ranks of each host; without shared memory, each rank counts as a host of its own."""
    machines: tuple[str, ...]
    names: tuple[str, ...]  # for display; both are in alphabetical order

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.layout for rank in host)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.layout):
            raise UserError(
                f"site: expected each of the ranks 0, 1, 2 ... on one host, found {self.layout}"
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(len(host) for host in self.layout)

    @property
    def key(self) -> str:
        """A file name; two sites share it only if the same choices are valid for both."""
        text = msgspec.json.encode([self.route, self.layout, self.machines])
        return f"{self.route}-{self.ranks}-{hashlib.sha256(text).hexdigest()[:IDENTITY_LETTERS]}"

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        where = self.names[0] if len(self.names) == 1 else f"{len(self.names)} hosts"
        return f"{ranks} on {where}{WORDS[self.route]}"


def machine_identity() -> str:
    """Return an identity of this host that survives a restart: a digest, which may be published."""
    machine = MACHINE_ID.read_text().strip() if MACHINE_ID.exists() else ""
    text = f"{machine}\n{socket.gethostname()}\n{DOMAIN.read_text().strip()}"
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_LETTERS]
