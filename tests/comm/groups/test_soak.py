"""A few seconds of ``benchmarks.soak``, which goes on for minutes."""

from __future__ import annotations

from benchmarks.soak import run
from benchmarks.soak_worker import Soak


def test_mixed_collectives_in_several_groups_are_right() -> None:
    found = run(Soak(ranks=3, seconds=2.0, seed=1, routes=("auto", "tcp", "mixed")))
    routes = ("auto", "tcp", "mixed")
    assert {name.split()[0] for name in found["collectives"]} == set(routes)
    assert {f"{route} messages" for route in routes} <= set(found["collectives"])
    assert all(warm == end for warm, end in found["descriptors"])
