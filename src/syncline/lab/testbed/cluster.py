"""``Cluster``: what is emulated, as a frozen value."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import msgspec

from syncline.errors import UserError
from syncline.plan.document import Value
from syncline.plan.quantities import parse_bandwidth, parse_duration, require_count

DEVICE = "eth0"  # the network device of every host
PORT = 29500  # MASTER_PORT on host 0: torchrun's default, free because the host is new
MOST_HOSTS = 100
MOST_WORKERS = 250  # each takes three of the files that this process may have open
LEAST_RATE_BYTES_PER_S = 1e5 / 8
LARGEST_RATE_BYTES_PER_S = 1e12 / 8
SMALLEST_MTU_BYTES, LARGEST_MTU_BYTES = 1280, 65000
LONGEST_LATENCY_S = 10.0

FRAME_HEADER_BYTES = 14  # Ethernet's header, which the token bucket counts and the MTU does not
BURST_S = 400e-6
BURST_FRAMES = 2
QUEUE_S = 50e-3
LEAST_QUEUE_BYTES = 1_000_000  # room for several senders' windows: a job measures links, not losses


class Cluster(Value, frozen=True, kw_only=True):
    """Hosts on one switch, each joined to it by one link.

    Raises:
        UserError: on construction, for a count, rate, latency or size out of range.
    """

    hosts: int
    rate_bytes_per_s: float | None = None  # of every link, each direction; None: not limited
    host_rates_bytes_per_s: dict[int, float] = msgspec.field(default_factory=dict)
    """Host number -> rate of its link, where it differs from the other links'."""
    latency_s: float = 0.0  # added to every packet between two hosts, one way
    workers_per_host: int = 1
    mtu_bytes: int = 9000
    """Largest packet. With 9000, as in data centres, 99.3 % of the rate is payload; with 1500 it
    is 95.6 %."""

    def __post_init__(self) -> None:
        _require_between("hosts", self.hosts, 1, MOST_HOSTS)
        require_count("workers per host", self.workers_per_host)
        if self.workers > MOST_WORKERS:
            raise UserError(
                f"{self.hosts} hosts with {self.workers_per_host} workers each are {self.workers} "
                f"processes on one machine, at most {MOST_WORKERS} can be run"
            )
        for rate in (self.rate_bytes_per_s, *self.host_rates_bytes_per_s.values()):
            if rate is not None:
                low, high = LEAST_RATE_BYTES_PER_S, LARGEST_RATE_BYTES_PER_S
                _require_between("the rate of a link", rate, low, high, bit_rate)
        for host in self.host_rates_bytes_per_s:
            if not 0 <= host < self.hosts:
                raise UserError(
                    f"a rate is given for host {host}, but the {self.hosts} hosts are 0 to "
                    f"{self.hosts - 1}; correct the number, or make more hosts"
                )
        _require_between("latency", self.latency_s, 0.0, LONGEST_LATENCY_S, lambda s: f"{s:g} s")
        sizes = self.mtu_bytes, SMALLEST_MTU_BYTES, LARGEST_MTU_BYTES
        _require_between("mtu", *sizes, lambda size: f"{size} bytes")

    @classmethod
    def of(
        cls,
        *,
        hosts: int,
        rate: str | None = None,
        hosts_rate: Iterable[str] = (),
        latency: str | None = None,
        workers_per_host: int = 1,
        mtu_bytes: int = 9000,
    ) -> Self:
        """Return the cluster that quantities with units describe.

        A ``rate`` is such as ``"1gbit"``, one of ``hosts_rate`` such as ``"0:100mbit"``, and a
        ``latency`` such as ``"20us"``.
        """
        rates: dict[int, float] = {}
        for text in hosts_rate:
            host, colon, quantity = text.partition(":")
            if not (colon and host.strip().isdecimal()):
                raise UserError(
                    f"host rate {text!r}: expected HOST:RATE, such as 0:100mbit for host 0"
                )
            if int(host) in rates:
                raise UserError(f"host rate {text!r}: host {int(host)} has a rate already")
            rates[int(host)] = parse_bandwidth(quantity)
        return cls(
            hosts=hosts,
            rate_bytes_per_s=None if rate is None else parse_bandwidth(rate),
            host_rates_bytes_per_s=rates,
            latency_s=0.0 if latency is None else parse_duration(latency),
            workers_per_host=workers_per_host,
            mtu_bytes=mtu_bytes,
        )

    @property
    def workers(self) -> int:
        """Workers of a job that fills the cluster."""
        return self.hosts * self.workers_per_host

    @property
    def domain(self) -> str:
        """NIS domain name of the hosts: equal only for clusters with the same description.

        It is part of a host's identity in measured choices of algorithms, which are valid only for
        hosts with the same links.
        """
        rates = dict(sorted(self.host_rates_bytes_per_s.items()))
        described = msgspec.structs.replace(self, host_rates_bytes_per_s=rates)
        return f"syncline-{hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]}"

    def name_of(self, host: int) -> str:
        """Return the host's name, which every host can look up."""
        return f"host{host}"

    def address_of(self, host: int) -> str:
        """Return the host's address."""
        return f"10.0.0.{host + 1}"

    def rate_of(self, host: int) -> float | None:
        """Return the rate of the host's link, in bytes/s, each direction; None is unlimited."""
        return self.host_rates_bytes_per_s.get(host, self.rate_bytes_per_s)

    def processors_of(self, host: int, processors: Sequence[int]) -> list[int]:
        """Return which of the machine's processors a host's commands may use.

        Each host has an equal share. If all hosts used all processors, the kernel would let two
        workers share one for tens of milliseconds while a third has another to itself, and the job
        would wait for the slower ones. All hosts use all only if there are no equal shares.
        """
        count = len(processors)
        if count >= self.hosts:
            share = count // self.hosts
            return list(processors[host * share : (host + 1) * share])
        return list(processors) if self.hosts % count else [processors[host % count]]

    def burst_bytes(self, rate_bytes_per_s: float) -> int:
        """Return how much may pass a link at once after it was idle.

        A token bucket lets this much pass for free, so it must be small: a message of M bytes then
        takes (M - burst) / rate. But a timer that fires late by t loses the tokens that do not fit
        into the bucket, so it must hold t * rate, or the rate falls short. 0.4 ms is between the
        two: 1 MB at 1 Gbit/s passes within 3 % of the rate, and 8 hosts on 2 busy cores still reach
        it. Two frames are the least with which a queue never waits for a bucket that is full.
        """
        frame = self.mtu_bytes + FRAME_HEADER_BYTES
        return max(BURST_FRAMES * frame, math.ceil(rate_bytes_per_s * BURST_S))

    def queue_bytes(self, rate_bytes_per_s: float) -> int:
        """Return how much may wait for a link before packets are dropped."""
        return max(LEAST_QUEUE_BYTES, math.ceil(rate_bytes_per_s * QUEUE_S))

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'' if self.hosts == 1 else 's'}"
        workers = f"{self.workers_per_host} worker{'' if self.workers_per_host == 1 else 's'} each"
        link = "not limited" if self.rate_bytes_per_s is None else bit_rate(self.rate_bytes_per_s)
        special = ", ".join(
            f"{self.name_of(host)} {bit_rate(rate)}"
            for host, rate in sorted(self.host_rates_bytes_per_s.items())
        )
        latency = f", {self.latency_s * 1e6:g} us one way" if self.latency_s else ""
        return f"{hosts}, {workers}, links {link}{f' ({special})' if special else ''}{latency}"


def _require_between(
    what: str, value: float, low: float, high: float, text: Callable[[float], str] = str
) -> None:
    if not low <= value <= high:
        raise UserError(f"{what} must be from {text(low)} to {text(high)}, found {text(value)}")


def bit_rate(bytes_per_s: float) -> str:
    """Return a rate as link rates are quoted, such as ``"1 Gbit/s"``."""
    bits = bytes_per_s * 8
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"
