"""Links that explain iterations which were measured at some numbers of workers."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from syncline.errors import UserError
from syncline.plan.network import PRESETS, Network
from syncline.plan.planners.ddp import Ddp
from syncline.plan.simulator.calibration import calibrated
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some

PROFILE = some.profile_of([10_000_000] * 20, [2_000_000] * 20, forward_ns=100_000_000)
"""160 MB of gradients, computing 0.3 s."""
GIVEN = PRESETS["10gbit"].with_workers(8)


def measured(network: Network, *counts: int, noise: float = 0.0) -> dict[int, float]:
    """Return what iterations take on a network, in turns longer and shorter by some noise."""
    found = {}
    for count in counts:
        net = network.with_workers(count)
        seconds = predict_iteration_s(PROFILE, net, Ddp().plan(PROFILE, net))
        found[count] = seconds * (1 + noise)
        noise = -noise
    return found


def slower(factor: float) -> Network:
    link = GIVEN.exchange.link
    return GIVEN.replace(
        bandwidth_bytes_per_s=1 / (link.beta_s_per_byte * factor), latency_s=link.alpha_s * factor
    )


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.5, 9.0])
def test_the_link_is_found_from_iterations_on_it(factor: float) -> None:
    truth = slower(factor)
    counts = (8, 16) if factor > 2 else (64, 512)  # where messages are not hidden
    found = calibrated(PROFILE, GIVEN, measured(truth, *counts), Ddp().plan)
    if factor > 1:
        assert found.factor == pytest.approx(factor, rel=1e-3)
    assert all(abs(error) < 1e-3 for error in found.errors.values())
    (expected,) = measured(truth, 1024).values()
    (predicted,) = measured(found.network, 1024).values()
    assert predicted == pytest.approx(expected, rel=0.01)


def test_the_link_fits_noisy_iterations_in_the_mean() -> None:
    times_s = measured(slower(4.0), 4, 8, 16, 32, noise=0.03)
    track = Mock(side_effect=iter)
    found = calibrated(PROFILE, GIVEN, times_s, Ddp().plan, track=track)
    track.assert_called_once()  # with what takes most of the time
    assert found.factor == pytest.approx(4.0, rel=0.03)
    errors = list(found.errors.values())
    assert max(errors) > 0.015
    assert min(errors) < -0.015
    assert "4" in found.note
    assert "slower than given" in found.note
    assert "+3" in found.note


def test_a_curve_keeps_its_shape() -> None:
    points = [(1 << k, 1e-4 + (1 << k) * 2e-9 * (1 + k % 2)) for k in range(10, 28)]
    sizes, times_s = zip(*points, strict=True)
    network = Network.from_points(sizes, times_s, workers=8)
    truth = network.replace(bandwidth_bytes_per_s=0.5 / network.exchange.link.beta_s_per_byte)
    found = calibrated(PROFILE, network, measured(truth, 8, 16), Ddp().plan)
    assert found.factor == pytest.approx(2.0, rel=0.05)
    assert len(found.network.all_reduce.segments) == len(network.all_reduce.segments)


def test_what_says_nothing_of_the_network() -> None:
    slow = some.profile_of([1_000_000_000] * 20, [2_000_000] * 20, forward_ns=1_000_000_000)
    seconds = predict_iteration_s(slow, GIVEN, Ddp().plan(slow, GIVEN))
    with pytest.raises(UserError, match="hidden behind computing at 8 workers"):
        calibrated(slow, GIVEN, {8: seconds}, Ddp().plan)


@pytest.mark.parametrize("seconds", [0.05, 60.0])
def test_what_no_link_explains(seconds: float) -> None:
    with pytest.raises(UserError, match="no link from 16 times slower to as many times faster"):
        calibrated(PROFILE, GIVEN, {8: seconds}, Ddp().plan)
