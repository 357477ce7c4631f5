"""What all benchmarks share: the machine, the statistics and the result files."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import raw
from syncline.train.measure.machine import processor_name

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge a figure."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} .. {max(values):.4g})"


def _portable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with paths of this machine reduced to their names."""
    return [Path(a).name if a.startswith("/") else a for a in arguments]


def save(name: str, measured: dict[str, Any], *, module: str | None = None) -> None:
    """Write the raw results of a benchmark, of another module's where the name is another."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": " ".join(
            ["python -m", f"benchmarks.{module or name}", *_portable(sys.argv[1:])]
        ),
        "machine": machine(),
        **measured,
    }
    path = raw.write(RESULTS / f"{name}.json", record)
    print(f"raw results: {path.relative_to(Path.cwd())}")
