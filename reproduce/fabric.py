"""``Fabric``: ranks on hosts, and the ports, network cards and switch between them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UserError
from syncline.plan.document import Value

__all__ = ["Fabric", "FabricWire", "Slowdown"]

LARGEST_FACTOR = 1e6


class FabricWire(Value, frozen=True, kw_only=True):
    """What a transfer over a port costs when it is alone: ``alpha + beta M`` (MG-WFBP, 2.5)."""

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        _require_cost("wire", "alpha_s", self.alpha_s)
        _require_cost("wire", "beta_s_per_byte", self.beta_s_per_byte)


class Slowdown(Value, frozen=True, kw_only=True):
    """A straggling link: transfers that match take ``factor`` times longer.

    With a source only, it is that rank's outgoing port; with a destination only, its incoming one;
    with both, the way from one rank to another.
    """

    factor: float
    source: int | None = None
    destination: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= LARGEST_FACTOR:
            raise UserError(
                f"slowdown: factor must be at least 1 and at most {LARGEST_FACTOR:g}, "
                f"found {self.factor}"
            )


class Fabric(Value, frozen=True, kw_only=True):
    """Which ranks are connected, at what cost, and what they share.

    Each rank has a port out and a port in, used at once (full duplex) and each by one transfer at a
    time. A host's ranks may share a network card (NIC), again out and in, and all hosts a switch.
    A transfer of M bytes holds the ports of both ranks and, between hosts, both cards and the
    switch, for ``alpha + beta M``. A card or switch carries as many transfers at once as its rate
    holds of the wire's, rounded down; one that is slower than the wire carries one, at its rate.

    Raises:
        UserError: on construction, if there is no rank, a host is negative, a cost is negative or
            not finite, or a slowdown names a rank that does not exist.
    """

    hosts: tuple[int, ...]
    """The host of each rank."""
    inside: FabricWire
    """Between ranks of one host."""
    between: FabricWire
    """Between hosts."""
    gamma_s_per_byte: float = 0.0
    """Time in which a rank adds a byte that it received to its own."""
    nic_s_per_byte: float | None = None
    """Rate of a host's card, each way. None: it is never the bottleneck."""
    switch_s_per_byte: float | None = None
    """Rate of what all transfers between hosts pass. None: it is never the bottleneck."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Straggling links; where several match, their factors multiply."""

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UserError("fabric: no ranks; give the host of each rank")
        if min(self.hosts) < 0:
            raise UserError(f"fabric: a host's number is negative: {min(self.hosts)}")
        _require_cost("fabric", "gamma_s_per_byte", self.gamma_s_per_byte)
        for field in ("nic_s_per_byte", "switch_s_per_byte"):
            value = getattr(self, field)
            if value is not None:
                _require_cost("fabric", field, value)
        for index, slowdown in enumerate(self.slowdowns):
            for rank in (slowdown.source, slowdown.destination):
                if rank is not None and not 0 <= rank < self.ranks:
                    raise UserError(
                        f"fabric: slowdowns[{index}] is about rank {rank}; the ranks are 0 to "
                        f"{self.ranks - 1}"
                    )

    @classmethod
    def flat(
        cls, ranks: int, *, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0
    ) -> Fabric:
        """Return a fabric in which every rank reaches every other at the same cost."""
        wire = FabricWire(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
        return cls(
            hosts=tuple(range(ranks)),
            inside=wire,
            between=wire,
            gamma_s_per_byte=gamma_s_per_byte,
        )

    @classmethod
    def of_hosts(
        cls,
        hosts: int,
        ranks_per_host: int,
        *,
        inside: FabricWire,
        between: FabricWire,
        gamma_s_per_byte: float = 0.0,
        oversubscription: float | None = None,
    ) -> Fabric:
        """Return equal hosts, each with one card of the wire's rate that its ranks share.

        Args:
            hosts: how many hosts.
            ranks_per_host: how many ranks each has; ranks are numbered host by host.
            inside: the wire between ranks of a host.
            between: the wire between hosts.
            gamma_s_per_byte: time to add a received byte.
            oversubscription: how many times more the cards can send together than the switch
                carries. None: the switch carries all.
        """
        if hosts < 1 or ranks_per_host < 1:
            raise UserError(
                f"fabric: at least 1 host with 1 rank is needed, found {hosts} hosts with "
                f"{ranks_per_host} each"
            )
        if oversubscription is not None and not (
            math.isfinite(oversubscription) and oversubscription >= 1
        ):
            raise UserError(
                f"fabric: oversubscription must be at least 1, found {oversubscription}"
            )
        return cls(
            hosts=tuple(np.repeat(np.arange(hosts), ranks_per_host).tolist()),
            inside=inside,
            between=between,
            gamma_s_per_byte=gamma_s_per_byte,
            nic_s_per_byte=between.beta_s_per_byte,
            switch_s_per_byte=(
                None
                if oversubscription is None
                else between.beta_s_per_byte * oversubscription / hosts
            ),
        )

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def concurrent(self, s_per_byte: float | None) -> int | None:
        """Return how many transfers between hosts a card or switch of that rate carries at once.

        None: any number.
        """
        if not s_per_byte:
            return None
        # A ratio of 4 must not become 3 because of how its terms round.
        return max(1, math.floor(self.between.beta_s_per_byte / s_per_byte * (1 + 1e-9)))

    def is_between_hosts(
        self, source: NDArray[np.int32], destination: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return which transfers leave their host."""
        host = np.asarray(self.hosts)
        return np.asarray(host[source] != host[destination])

    def transfer_s(
        self,
        source: NDArray[np.int32],
        destination: NDArray[np.int32],
        size_bytes: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return how many seconds each transfer takes once it holds what it needs."""
        between = self.is_between_hosts(source, destination)
        slowest = max(
            self.between.beta_s_per_byte, self.nic_s_per_byte or 0.0, self.switch_s_per_byte or 0.0
        )
        beta = np.where(between, slowest, self.inside.beta_s_per_byte)
        alpha = np.where(between, self.between.alpha_s, self.inside.alpha_s)
        seconds = np.asarray(alpha + beta * size_bytes, dtype=np.float64)
        for slowdown in self.slowdowns:
            matches = np.ones(len(source), dtype=np.bool_)
            if slowdown.source is not None:
                matches &= source == slowdown.source
            if slowdown.destination is not None:
                matches &= destination == slowdown.destination
            seconds[matches] *= slowdown.factor
        return seconds


def _require_cost(where: str, field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{where}: {field} must be finite and at least 0, found {value}")
