"""The probe, the profiler and the exchange of JSON through real process groups."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from syncline.errors import UserError
from syncline.plan.fit import fit_cost_curve
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.sparse_costs import SparseSpeeds
from syncline.train.measure import sparse
from syncline.train.measure.exchange import gather_json, gather_numbers, share_json
from syncline.train.measure.probe import (
    Session,
    between_powers,
    contention_of,
    probe,
    probe_sizes,
)
from syncline.train.measure.profiler import profile
from tests.workers import WorkerPool


def exchanges() -> dict[str, Any]:
    rank, given = dist.get_rank(), (dist.group.WORLD, torch.device("cpu"))
    return {
        "gathered": gather_json({"rank": rank, "text": "x" * (10 * rank)}, *given),
        "numbers": gather_numbers([rank, 0.5 * rank], *given),
        "empty": gather_json([], *given),
        "shared": share_json({"from": rank, "text": "größe"}, *given),
    }


def probes() -> str:
    return probe(largest_bytes=1 << 20, seconds=0.05, name="here").to_json()


def probes_subgroup() -> int:
    group = dist.new_group([0, 2])
    return 1 if dist.get_rank() == 1 else probe(group, largest_bytes=1 << 16, seconds=0.02).workers


def link_beside_a_device() -> set[str]:
    """Measure messages of a group whose tensors are on a device; say where messages are."""
    session = Session(dist.group.WORLD, torch.device("meta"))
    making = mock.patch.object(dist, "P2POp", side_effect=dist.P2POp)
    with mock.patch.object(session, "slowest", list), making as made:
        session.link(1 << 16)
    return {call.args[1].device.type for call in made.call_args_list}


def profiles() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    batches = [(torch.randn(4, 8), torch.randint(3, (4,)))]
    return profile(model, batches, cross_entropy, iterations=3).to_json()


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(1, 4), st.floats(1, 4))
def test_contention_of_a_computation_and_a_message(
    computing_s: float, message_s: float, computing: float, exchange: float
) -> None:
    overlap_s = min(computing_s * computing, message_s * exchange)
    computed_s = overlap_s + computing_s - overlap_s / computing
    sent_s = overlap_s + message_s - overlap_s / exchange
    found = contention_of((computing_s, computed_s), (message_s, sent_s))
    assert found.computing == pytest.approx(computing, abs=2e-3)
    assert found.exchange == pytest.approx(exchange, abs=2e-3)


def test_json_travels_between_ranks(workers: WorkerPool) -> None:
    for result in workers.run(exchanges, 3):
        assert result == {
            "gathered": [{"rank": rank, "text": "x" * (10 * rank)} for rank in range(3)],
            "numbers": [[0.0, 0.0], [1.0, 0.5], [2.0, 1.0]],
            "empty": [[], [], []],
            "shared": {"from": 0, "text": "größe"},
        }


def test_gloo_s_messages_are_sent_from_host_memory(workers: WorkerPool) -> None:
    """It cannot read a device's."""
    assert workers.run(link_beside_a_device, 2) == [{"cpu"}, {"cpu"}]


def test_the_probe_measures_what_it_says(workers: WorkerPool) -> None:
    network, other = map(Network.from_json, workers.run(probes, 2))
    assert other.points == network.points
    assert (network.workers, network.backend) == (2, "gloo")
    assert [p.size_bytes for p in network.points] == between_powers(probe_sizes(1 << 20))
    assert all(p.time_s > 0 and p.repetitions >= 3 for p in network.points)
    assert network.link.gamma_s_per_byte > 0
    assert network.sparse.select_s_per_element > 0
    fit = fit_cost_curve(network.points)
    assert (network.fit_error, network.fit_error_max) == (fit.error, fit.error_max)
    for point in network.points:  # what bursts passed for nothing costs more
        assert network.all_reduce.seconds(point.size_bytes) >= fit.curve.seconds(point.size_bytes)


def test_a_subgroup_is_probed_alone(workers: WorkerPool) -> None:
    assert workers.run(probes_subgroup, 3) == [2, 1, 2]


def test_profiles_are_medians_over_the_ranks(workers: WorkerPool) -> None:
    first, second = map(Profile.from_json, workers.run(profiles, 2))
    assert first.workers == 2
    mine, theirs = ([o.duration_s for o in p.operations[1:]] for p in (first, second))
    assert mine == theirs


@pytest.mark.parametrize("largest_bytes", [1024, 1 << 16, 1 << 20, 10_000_000, 1 << 24, 1 << 26])
def test_all_reduces_are_measured_between_powers_of_two(largest_bytes: int) -> None:
    powers = probe_sizes(largest_bytes)
    sizes = between_powers(powers)
    for ordered in (powers, sizes):
        assert ordered == sorted(set(ordered))
        assert (ordered[0], ordered[-1]) == (256, largest_bytes)
    # No gap is wider, and no more bytes are sent above 8 MiB, where they take longest.
    steps = [b / a for a, b in itertools.pairwise(sizes) if a >= 16 * 1024]
    assert all(step < 3 for step in steps)
    costly = [sum(size for size in chosen if size > 8 << 20) for chosen in (powers, sizes)]
    assert costly[1] <= costly[0]
    if largest_bytes >= 1 << 20:
        assert {24 << 10, 96 << 10, 384 << 10, 768 << 10} < set(sizes)


def test_probing_without_a_process_group_is_refused() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        probe()


def test_every_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "ELEMENTS", 100_000)
    monkeypatch.setattr(sparse, "ENTRIES", 1000)
    found = sparse.sparse_speeds()
    for field in SparseSpeeds.__struct_fields__:
        assert 0 < getattr(found, field) < math.inf
