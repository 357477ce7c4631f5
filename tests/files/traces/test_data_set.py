"""The layer-wise traces of single iterations in ``reproduce/traces/dag`` can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.files.traces.layer_table import read_layer_table

FOLDER = Path(__file__).parents[3] / "reproduce" / "traces" / "dag"
PATHS = sorted(FOLDER.glob("*.txt.gz"))
GRADIENTS = {"alexnet": 93_089_064, "googlenet": 23_935_208, "resnet50": 94_114_088}
"""Bytes, at 10 classes."""


def test_every_network_is_there_and_small() -> None:
    names = {f"{name}-{workers}" for name in GRADIENTS for workers in ("1worker", "2workers")}
    assert {path.name for path in PATHS} == {f"{name}.txt.gz" for name in names}
    assert sum(path.stat().st_size for path in PATHS) < 1 << 20


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_file_holds_100_iterations_of_its_network(path: Path) -> None:
    network, _, workers = path.name.removesuffix(".txt.gz").partition("-")
    trace = read_layer_table(path)
    profile = trace.known_profile()
    assert trace.steps == 100
    assert profile.gradient_bytes == GRADIENTS[network]
    assert profile.phase_s("forward") > 0
    assert profile.phase_s("backward") > 0
    # One worker sends nothing.
    assert bool(trace.points) == (workers == "2workers")
