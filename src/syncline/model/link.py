"""``Link``: what one message between two workers costs; ``Stage``: what it passes beside a link."""

from __future__ import annotations

import math
from typing import Literal

from syncline.errors import UserError
from syncline.model.collective_costs import SERVER_ALGORITHMS, line_formula, server_formula
from syncline.model.document import Value
from syncline.model.quantities import require_finite

__all__ = ["Link", "Stage"]


class Link(Value, frozen=True, kw_only=True):
    """Point-to-point cost between two workers: ``alpha + beta M`` (MG-WFBP, section 2.5)."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    """Time to add one byte of two arrays in memory, for arrays larger than the caches."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            require_finite(f"link: {field}", getattr(self, field))

    @classmethod
    def of_line(
        cls,
        algorithm: str,
        *,
        workers: int,
        a_s: float,
        b_s_per_byte: float,
        gamma_s_per_byte: float = 0.0,
        servers: int | None = None,
    ) -> Link:
        """Return the link over which an all-reduce of at least 2 workers costs ``a + b M``.

        Source: MG-WFBP, section 6.4, which takes a measured line to other worker counts with the
        ring. With gamma unknown leave it 0: summation is then part of beta. For the ring that makes
        no difference at any worker count, since both terms grow with ``(N - 1) / N``. For
        ``parameter-server`` say how many servers there are; None: one.

        Raises:
            UserError: the algorithm is no key of ``ALL_REDUCE_ALGORITHMS`` and has no servers, a
                single worker has no link, or summation alone takes longer than the line.
        """
        if algorithm in SERVER_ALGORITHMS:
            formula = server_formula((servers or 1) if algorithm == "parameter-server" else None)
        else:
            formula = line_formula(algorithm)
        if workers < 2:
            raise UserError(f"a link needs an all-reduce of at least 2 workers, found {workers}")
        startups, _ = formula(workers, 1.0, 0.0, 0.0)
        _, sent = formula(workers, 0.0, 1.0, 0.0)
        _, added = formula(workers, 0.0, 0.0, 1.0)
        transmission = b_s_per_byte - added * gamma_s_per_byte
        if transmission < 0:
            raise UserError(
                f"link: adding alone takes {added * gamma_s_per_byte:.3g} s a byte, more than the "
                f"{b_s_per_byte:.3g} s a byte of the whole all-reduce; lower gamma"
            )
        return cls(
            alpha_s=a_s / startups,
            beta_s_per_byte=transmission / sent,
            gamma_s_per_byte=gamma_s_per_byte,
        )

    def with_(
        self, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None
    ) -> Link:
        """Return the link with another bandwidth, one way, or latency; gamma stays.

        Raises:
            UserError: a value is not finite, a bandwidth not above 0 or a latency negative.
        """
        rate = bandwidth_bytes_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UserError(f"a bandwidth must be finite and above 0 bytes a second, found {rate}")
        return Link(
            alpha_s=self.alpha_s if latency_s is None else latency_s,
            beta_s_per_byte=self.beta_s_per_byte if rate is None else 1 / rate,
            gamma_s_per_byte=self.gamma_s_per_byte,
        )


class Stage(Value, frozen=True, kw_only=True):
    """A resource beside the links, with a capacity that its users share equally.

    ``"host"``: what a host does with a message before it is sent and after it has arrived: copies
    over the PCIe lane, staging, passes over all elements. The whole message of each worker passes
    once, also where only some of its elements are sent, in turn with the links. The workers of a
    host share it.

    ``"switch"``: what carries the bytes of all links together, such as a switch or an uplink. All
    bytes that the exchange sends pass it, while they pass the links, and the slower of the two
    counts.

    Raises:
        UserError: on construction, if the capacity is not finite and above 0.
    """

    at: Literal["host", "switch"]
    bytes_per_s: float
    """Capacity."""

    def __post_init__(self) -> None:
        require_finite(f"stage: the capacity of a {self.at}", self.bytes_per_s, above_0=True)
