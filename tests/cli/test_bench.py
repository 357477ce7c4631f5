"""``syncline bench collectives`` as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.lab.bench.result import Benchmark
from tests.timeouts import DEADLINE_S

COMMAND = (sys.executable, "-c", "from syncline.cli import main; main()", "bench", "collectives")
QUICK = ("--sizes", "4,4KiB", "--workers", "2", "--lap", "0.001", "--contestants", "syncline,gloo")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=folder,
    )


def test_a_table_and_a_report(tmp_path: Path) -> None:
    result = run(*QUICK, "--report", "measured", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no bar where there is no terminal
    assert "all-reduce · 2 workers · one host, shared memory" in result.stdout
    assert result.stdout.splitlines()[-1] == "report written to measured"
    assert {path.name for path in (tmp_path / "measured").iterdir()} == {
        "collectives.html",
        "collectives.json",
    }


@pytest.mark.slow
def test_json(tmp_path: Path) -> None:
    result = run(*QUICK, "--json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    benchmark = Benchmark.from_json(result.stdout)
    assert [entry.size_bytes for entry in benchmark.entries] == [4, 4, 4096, 4096]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--collective", "all-reduse"), "did you mean 'all-reduce'?"),
        (("--contestants", "glo"), "did you mean 'gloo'?"),
        (("--contestants", "gloo,gloo"), "name each contestant once"),
        (("--workers", "1"), "a collective needs 2 to"),
        (("--rounds", "4"), "rounds must be at least 5, found 4"),
        (("--lap", "0"), "lap_s must be finite and above 0"),
        (("--sizes", "4MB"), "write 4, 64KiB or 4..256MiB"),
        (("--sizes", "2GiB"), "sizes must be from 1 to"),
        (("--rate", "1gbit"), "say how many with --hosts"),
        (("--hosts", "2", "--place", "tcp"), "leave one out"),
        (("--hosts", "2", "--workers", "4"), "leave the worker count out"),
        (("--mpi", "mpich"), "expected NAME=PYTHON"),
        (("--mpi", "mpih=python"), "did you mean 'mpich'?"),
    ],
)
def test_mistakes(refused: Callable[..., str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("bench", "collectives", *arguments)
