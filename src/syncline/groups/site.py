"""``Site``: where the ranks of a group are, as far as it decides which algorithm is fastest."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Literal

import msgspec

from syncline.errors import UserError
from syncline.model.document import Value

__all__ = ["Hosts", "Route", "Site", "machine_identity"]

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host."""
Route = Literal["auto", "ucx"]
"""``"auto"``: shared memory inside a host, UCX between hosts; ``"ucx"``: UCX to all ranks."""

MACHINE_ID = Path("/etc/machine-id")
DOMAIN = Path("/proc/sys/kernel/domainname")
"""Of emulated hosts it says which cluster they are: one with other links is another site."""
IDENTITY_LETTERS = 16


class Site(Value, frozen=True, kw_only=True):
    """What measured choices of algorithms hold for.

    Raises:
        UserError: on construction, if the ranks are not 0, 1, 2 ... each on one host.
    """

    route: Route
    layout: Hosts
    """The ranks of each host; where all are joined by UCX, each counts as on its own."""
    machines: tuple[str, ...]
    """The identities of the hosts, in alphabetical order."""
    names: tuple[str, ...]
    """Of the hosts, in alphabetical order, for people."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.layout for rank in host)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.layout):
            raise UserError(
                f"site: expected each of the ranks 0, 1, 2 ... on one host, found {self.layout}"
            )

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(len(host) for host in self.layout)

    @property
    def key(self) -> str:
        """A name for files, which two sites share only if the same choices hold for both."""
        text = msgspec.json.encode([self.route, self.layout, self.machines])
        return f"{self.route}-{self.ranks}-{hashlib.sha256(text).hexdigest()[:IDENTITY_LETTERS]}"

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        where = self.names[0] if len(self.names) == 1 else f"{len(self.names)} hosts"
        return f"{ranks} on {where}{' by UCX' if self.route == 'ucx' else ''}"


def machine_identity() -> str:
    """Return what tells this host from others and stays the same when it is started again.

    Nothing else can be told from it: ``/etc/machine-id`` is not to be passed on as it is.

    Raises:
        OSError: this host has no ``/proc``.
    """
    machine = MACHINE_ID.read_text().strip() if MACHINE_ID.exists() else ""
    text = f"{machine}\n{socket.gethostname()}\n{DOMAIN.read_text().strip()}"
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_LETTERS]
