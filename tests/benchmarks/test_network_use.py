"""How ``benchmarks.network_use`` finds the iterations of a phase, and what was sent in them."""

from __future__ import annotations

import pytest
from benchmarks.network_use import ITERATIONS, STEP_S, Steps, sent_in_steps

from syncline.lab.training.progress import Snapshot


def snapshot(phase: str) -> Snapshot:
    return Snapshot(
        epoch=1, epochs=1, step=1, steps=9, loss=0.0, samples_per_s=1.0, exposed_s=0.0, phase=phase
    )


def test_the_last_whole_iterations_of_a_phase_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = ["trying"] * (ITERATIONS + 3) + ["profiling", "trying", "steady"]
    moments = iter(range(len(phases)))
    monkeypatch.setattr("time.monotonic", lambda: float(next(moments)))
    steps = Steps()
    for phase in phases:
        steps.step(snapshot(phase))
    assert steps.window("trying") == (2.0, 2.0 + ITERATIONS)
    with pytest.raises(SystemExit, match="steady"):
        steps.window("steady")


def test_bytes_between_samples_are_shared_out_evenly() -> None:
    samples = [(0.0, 100), (2 * STEP_S, 300), (2.5 * STEP_S, 500), (4.5 * STEP_S, 500)]
    assert sent_in_steps(samples) == [100, 100, 200, 0]
