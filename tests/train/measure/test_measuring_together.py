"""The probe, the profiler and the exchange of JSON through real process groups."""

from __future__ import annotations

import itertools

import pytest

from syncline.errors import UserError
from syncline.plan.fit import fit_cost_curve
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.train.measure.probe import between_powers, probe, probe_sizes
from tests.train.measure import jobs
from tests.workers import WorkerPool


def test_json_travels_between_ranks(workers: WorkerPool) -> None:
    for result in workers.run(jobs.exchanges, 3):
        assert [g["rank"] for g in result["gathered"]] == [0, 1, 2]
        assert [len(g["text"]) for g in result["gathered"]] == [0, 10, 20]
        assert result["numbers"] == [[0.0, 0.0], [1.0, 0.5], [2.0, 1.0]]
        assert result["empty"] == [[], [], []]
        assert result["shared"] == {"from": 0, "text": "größe"}


def test_gloo_s_messages_are_sent_from_host_memory(workers: WorkerPool) -> None:
    """It cannot read a device's."""
    assert workers.run(jobs.link_beside_a_device, 2) == [{"cpu"}, {"cpu"}]


def test_the_probe_measures_what_it_says(workers: WorkerPool) -> None:
    texts = workers.run(jobs.probes, 2)
    network = Network.from_json(texts[0])
    assert texts[1] == texts[0] or Network.from_json(texts[1]).points == network.points
    assert network.workers == 2
    assert network.backend == "gloo"
    assert [p.size_bytes for p in network.points] == between_powers(probe_sizes(1 << 20))
    assert all(p.time_s > 0 and p.repetitions >= 3 for p in network.points)
    assert network.link is not None
    assert network.link.gamma_s_per_byte > 0
    assert network.sparse is not None
    assert network.sparse.select_s_per_element > 0
    fit = fit_cost_curve(network.points)
    assert (network.fit_error, network.fit_error_max) == (fit.error, fit.error_max)
    for point in network.points:  # what bursts passed for nothing costs more
        assert network.all_reduce.seconds(point.size_bytes) >= fit.curve.seconds(point.size_bytes)


def test_a_subgroup_is_probed_alone(workers: WorkerPool) -> None:
    results = workers.run(jobs.probes_subgroup, 3)
    assert [count for count, _ in results] == [2, 1, 2]


def test_profiles_are_medians_over_the_ranks(workers: WorkerPool) -> None:
    texts = workers.run(jobs.profiles, 2)
    profiles = [Profile.from_json(text) for text in texts]
    assert profiles[0].workers == 2
    mine = [o.duration_s for o in profiles[0].operations[1:]]
    assert mine == [o.duration_s for o in profiles[1].operations[1:]]


def test_sizes_go_from_256_bytes_to_64_mib() -> None:
    sizes = probe_sizes()
    assert sizes[0] == 256
    assert sizes[-1] == 64 * 1024 * 1024
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("largest_bytes", [1024, 1 << 16, 1 << 20, 10_000_000, 1 << 24, 1 << 26])
def test_all_reduces_are_measured_between_powers_of_two(largest_bytes: int) -> None:
    powers = probe_sizes(largest_bytes)
    sizes = between_powers(powers)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (powers[0], powers[-1])
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
