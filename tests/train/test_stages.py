"""Stages, and what all ranks measured in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from syncline.plan.profile import ACCUMULATING, Gradient, Phase, Profile
from syncline.plan.run import Rate
from syncline.train import rank_measurements
from syncline.train.rank_measurements import RankMeasurements, StageResult
from syncline.train.stages import (
    Deferring,
    Findings,
    Measurement,
    Probe,
    Settings,
    Stage,
    Step,
    Typical,
    last_batch_s,
)
from tests.strategies import in_sequence
from tests.train.jobs import plain_plan


def profile(*operations: tuple[str, Phase, float]) -> Profile:
    return in_sequence(
        operations, [Gradient(name="w", elements=1, ready_after=len(operations) - 1)]
    )


@pytest.mark.parametrize(
    ("before", "seconds"),
    [([], 3.0), ([("b", "forward", 1.25), (ACCUMULATING, "forward", 7.0)], 3.0)],
    ids=["one batch", "the last of several micro-batches"],
)
def test_passes_are_timed(before: list[tuple[str, Phase, float]], seconds: float) -> None:
    read, passes = ("read", "data", 5.0), [("a", "forward", 1.0), ("b", "backward", 2.0)]
    assert last_batch_s(profile(read, *before, *passes)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("alone_s", "slowdown_s"), [(1.0, 1.0), (1.96, 0.04), (1.99, 0.0), (2.01, -0.01)]
)
def test_only_slower_passes_can_be_noise(alone_s: float, slowdown_s: float) -> None:
    """0.04 s are within twice the error, of which no more than 0.01 s is believed."""
    one = profile(("a", "forward", 0.5), ("b", "backward", alone_s - 0.5))
    found = Measurement(computing=Typical(2.0, 0.03)).slowdown_s(one)
    assert found == pytest.approx(slowdown_s)
    assert Measurement().slowdown_s(one) is None


def test_waiting_for_buffers_is_not_computing() -> None:
    one = profile(("between modules", "forward", 1.5), ("b", "backward", 0.25))
    # Of 1.75 s alone, 0.5 s were a broadcast: 1.25 s of computing became 2 s.
    found = Measurement(active=Typical(2.0, 0.0)).active_slowdown_s(one, broadcast_s=0.5)
    assert found == pytest.approx(0.75)


def of_two_ranks(value: Any, *_: object) -> list[Any]:
    """The other rank has measured 2 s, and nothing in the reducer."""
    other = {"times_s": [2.0] * 3, "active": [2.0, 0.5], "computing": None, "broadcast_s": 2.0}
    return [value, {**value, **other, "mismatch": "other", "norm": None}]


@pytest.mark.parametrize(("own_s", "longest_s"), [([1.0, 1.0, 9.0], 2.0), ([3.0], 3.0), ([], 2.0)])
def test_what_ranks_measured_is_put_together(
    own_s: list[float], longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_measurements, "gather_json", of_two_ranks)
    monkeypatch.setattr(rank_measurements, "dist", mock.Mock())
    job = SimpleNamespace(deferring=Deferring(can_defer=True), group=None, device=None)
    passes = {"computing_s": [1.0] * 3, "active_s": [1.0] * 3}
    result = StageResult(iteration_s=[1.0, 2.0, 4.0], broadcast_s=own_s, norm="2", **passes)
    ranks = RankMeasurements(job)  # type: ignore[arg-type]
    found = ranks.measurement(Stage(name="some"), result, Settings(), Findings())
    assert found.times_s == (1.5, 2.0, 3.0)
    assert found.computing is None
    assert found.active == (1.5, 0.25)
    assert found.broadcast_s == longest_s
    assert (found.mismatch, found.norm, found.read_early) == ("other", "2", None)
    assert found.deferring.can_defer


def test_a_stage_is_the_same_after_it_was_sent() -> None:
    rate = Rate(name="DDP", iteration_s=1.0, noise_s=0.1, iterations=3)
    stage = Stage(name="steady", plan=plain_plan(), turns=("quiet", "lean"), baseline=rate)
    for step in (stage, Probe(iteration_s=1.0, contention=True)):
        assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(step)), Step) == step
