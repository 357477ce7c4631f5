"""Fabrics: what transfers cost alone, and what they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reproduce.fabric import Fabric, FabricWire, Slowdown

from syncline.errors import UserError

INSIDE = FabricWire(alpha_s=1e-6, beta_s_per_byte=1e-10)
BETWEEN = FabricWire(alpha_s=1e-5, beta_s_per_byte=1e-9)


def two_hosts(**changes: Any) -> Fabric:
    fields = {"hosts": (0, 0, 1, 1), "inside": INSIDE, "between": BETWEEN}
    return Fabric(**{**fields, **changes})


def cost_s(fabric: Fabric, source: int, destination: int, size_bytes: int) -> float:
    seconds = fabric.transfer_s(
        np.array([source], dtype=np.int32),
        np.array([destination], dtype=np.int32),
        np.array([size_bytes]),
    )
    return float(seconds[0])


def test_the_wire_inside_and_between() -> None:
    fabric = two_hosts()
    assert cost_s(fabric, 0, 1, 1000) == pytest.approx(1e-6 + 1e-7)
    assert cost_s(fabric, 1, 2, 1000) == pytest.approx(1e-5 + 1e-6)


def test_a_card_that_is_slower_than_the_wire() -> None:
    fabric = two_hosts(nic_s_per_byte=4e-9)
    assert cost_s(fabric, 1, 2, 1000) == pytest.approx(1e-5 + 4e-6)
    assert cost_s(fabric, 0, 1, 1000) == pytest.approx(1e-6 + 1e-7)
    assert fabric.concurrent(fabric.nic_s_per_byte) == 1


@pytest.mark.parametrize(
    ("rate", "together"),
    [(None, None), (0.0, None), (1e-9, 1), (1e-9 / 3, 3), (3e-10, 3), (9e-9, 1)],
)
def test_how_many_transfers_a_card_carries(rate: float | None, together: int | None) -> None:
    assert two_hosts().concurrent(rate) == together


def test_straggling_ports_and_ways() -> None:
    fabric = two_hosts(
        slowdowns=(Slowdown(source=0, factor=2), Slowdown(source=0, destination=3, factor=5))
    )
    alone = BETWEEN.alpha_s + BETWEEN.beta_s_per_byte * 10
    assert cost_s(fabric, 0, 2, 10) == pytest.approx(2 * alone)
    assert cost_s(fabric, 0, 3, 10) == pytest.approx(10 * alone)
    assert cost_s(fabric, 1, 3, 10) == pytest.approx(alone)


def test_equal_hosts() -> None:
    fabric = Fabric.of_hosts(3, 2, inside=INSIDE, between=BETWEEN, oversubscription=3)
    assert fabric.hosts == (0, 0, 1, 1, 2, 2)
    assert fabric.concurrent(fabric.nic_s_per_byte) == 1
    assert fabric.concurrent(fabric.switch_s_per_byte) == 1
    free = Fabric.of_hosts(3, 2, inside=INSIDE, between=BETWEEN)
    assert free.switch_s_per_byte is None


def test_a_flat_fabric_shares_nothing() -> None:
    fabric = Fabric.flat(4, alpha_s=1e-6, beta_s_per_byte=1e-9)
    assert (fabric.ranks, fabric.nic_s_per_byte, fabric.switch_s_per_byte) == (4, None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosts": ()}, "no ranks"),
        ({"hosts": (0, -1)}, "a host's number is negative: -1"),
        ({"gamma_s_per_byte": -1.0}, "gamma_s_per_byte must be finite and at least 0"),
        ({"nic_s_per_byte": float("nan")}, "nic_s_per_byte must be finite"),
        ({"switch_s_per_byte": float("inf")}, "switch_s_per_byte must be finite"),
        (
            {"slowdowns": (Slowdown(source=4, factor=2),)},
            r"slowdowns\[0\] is about rank 4; .* 0 to 3",
        ),
    ],
)
def test_fabrics_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        two_hosts(**changes)


def test_wires_and_slowdowns_that_cannot_be() -> None:
    with pytest.raises(UserError, match="wire: alpha_s must be finite and at least 0, found -1"):
        FabricWire(alpha_s=-1, beta_s_per_byte=0)
    with pytest.raises(UserError, match="factor must be at least 1"):
        Slowdown(factor=0.5)
    with pytest.raises(UserError, match="at least 1 host with 1 rank"):
        Fabric.of_hosts(0, 2, inside=INSIDE, between=BETWEEN)
    with pytest.raises(UserError, match=r"oversubscription must be at least 1, found 0\.5"):
        Fabric.of_hosts(2, 2, inside=INSIDE, between=BETWEEN, oversubscription=0.5)
