"""The benchmark of selection, on small vectors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from benchmarks.selection import (
    FUSED,
    READ,
    SELECT,
    TORCH,
    TORCH_FUSED,
    Selections,
    Timed,
    contestants,
    measure_selection,
)

from benchmarks import selection


def test_everybody_has_a_turn_in_every_round() -> None:
    found = measure_selection([100, 2000], [0.1, 0.01], rounds=2)
    for elements in (100, 2000):
        for density in (0.1, 0.01):
            for name in (SELECT, FUSED, TORCH, TORCH_FUSED, READ):
                assert len(found.of(name, elements, density).rounds_s) == 2


def test_what_a_gpu_does_selects_the_same_on_the_cpu() -> None:
    """Its contestants, which check what they select; all of them leave zeros where they took."""
    calls = contestants(70_000, 70, torch.device("cpu"))
    with mock.patch.object(selection, "_on_the_host", selection._on_a_device):
        theirs = contestants(70_000, 70, torch.device("cpu"))
    assert calls.keys() == theirs.keys()
    assert theirs[SELECT]().tolist() == calls[SELECT]().tolist()  # type: ignore[attr-defined]
    theirs[FUSED]()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured() -> None:
    found = measure_selection([100_000], [0.01], rounds=1, device="cuda")
    assert found.device == torch.cuda.get_device_name()
    assert len(found.entries) == 5


def test_ratios_are_medians_over_rounds() -> None:
    def timed(name: str, *rounds_s: float) -> Timed:
        return Timed(contestant=name, elements=10, density=0.1, rounds_s=rounds_s)

    measured = Selections(
        machine="one",
        versions={},
        instructions="avx2",
        entries=(timed(SELECT, 1.0, 2.0, 1.0), timed(TORCH, 10.0, 60.0, 20.0)),
    )
    assert measured.times_faster(SELECT, TORCH, 10, 0.1) == 20.0
