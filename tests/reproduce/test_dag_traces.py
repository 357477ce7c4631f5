"""The results of ``dag_traces`` are those of the files, read here by hand."""

from __future__ import annotations

import gzip

import pytest
from reproduce.common import load, tidy
from reproduce.dag_traces import NAME, NETWORKS, TRACES, compute

US = 1e-6
ITERATIONS = 100


def mean_s(name: str, workers: str, *columns: int) -> float:
    """Return the mean over the iterations of some columns' sums."""
    text = gzip.decompress((TRACES / f"{name}-{workers}.txt.gz").read_bytes()).decode()
    rows = [line.split("\t") for line in text.splitlines()]
    cells = [float(row[column]) for row in rows if row[0].isdigit() for column in columns]
    return sum(cells) * US / ITERATIONS


def test_every_result_is_of_its_files() -> None:
    result = compute()
    assert tidy(result) == load(NAME)  # else run `make reproduce` again
    for name in NETWORKS:
        found = result["networks"][name]
        assert found["iterations"] == [ITERATIONS, ITERATIONS]
        computing, messages = found["computing_s"], found["messages_s"]
        assert computing["predicted"] == pytest.approx(mean_s(name, "1worker", 2, 3), abs=1e-6)
        assert computing["measured"] == pytest.approx(mean_s(name, "2workers", 2, 3), abs=1e-6)
        assert messages["measured"] == pytest.approx(mean_s(name, "2workers", 4), abs=1e-6)
        whole = {kind: computing[kind] + messages[kind] for kind in computing}
        assert found["error"] == pytest.approx(whole["predicted"] / whole["measured"] - 1)
