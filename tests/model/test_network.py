"""The network: presets of the paper, extrapolation from a link."""

from __future__ import annotations

import pytest

from syncline.errors import UserError
from syncline.model.cost import CostCurve
from syncline.model.network import PRESETS, Link, Network


@pytest.mark.parametrize(
    ("name", "a_s", "b_s_per_byte"),
    # MG-WFBP, Fig. 4.
    [
        ("10gbe-k80", 9.72e-4, 1.97e-9),
        ("10gbe-v100", 9.08e-4, 7.4e-10),
        ("56gbib-v100", 2.36e-4, 4.06e-10),
    ],
)
def test_the_presets_are_the_papers_lines(name: str, a_s: float, b_s_per_byte: float) -> None:
    assert PRESETS[name].all_reduce == CostCurve.line(a_s, b_s_per_byte)
    assert (PRESETS[name].name, PRESETS[name].workers) == (name, 16)


LINKED = Network(
    name="lan",
    workers=4,
    all_reduce=CostCurve.line(9, 9),
    backend="gloo",
    contention=1.2,
    link=Link(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=5.0),
    fit_error=0.1,
)


def test_other_workers_cost_what_the_link_says() -> None:
    more = LINKED.with_workers(8, algorithm="binary-tree")
    assert more.all_reduce == CostCurve.line(12, 33)  # see test_cost: Table 2 by hand
    assert (more.workers, more.backend, more.contention) == (8, "gloo", 1.2)
    assert more.name == "lan at 8 workers (binary-tree)"
    assert more.link == LINKED.link
    assert (more.points, more.fit_error) == ((), None)  # nothing of it was measured


def test_the_ring_is_the_default() -> None:
    assert LINKED.with_workers(8).all_reduce == CostCurve.line(28, 9.625)


def test_without_a_link_there_is_nothing_to_extrapolate_from() -> None:
    with pytest.raises(
        UserError, match=r"'10gbe-k80' has no point-to-point measurement .*syncline.probe"
    ):
        PRESETS["10gbe-k80"].with_workers(64)


def test_no_workers() -> None:
    with pytest.raises(UserError, match="at least 1"):
        LINKED.with_workers(0)
