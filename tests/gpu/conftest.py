"""What `make test-gpu` found: one JSON, and a short table."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import facts, no_gpu

OVER = "the time of SYNCLINE_GPU_SECONDS was over"
BEGAN_S = time.monotonic()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float, str], None]:
    """Return a function that notes a figure by name, with its unit."""

    def note(name: str, value: float, unit: str) -> None:
        request.node.user_properties.append(("figure", [name, value, unit]))

    return note


class Report:
    """Writes results as they come, whatever ends the run, and says them in few lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}
        self.facts = facts()
        self.limit_s = float(os.environ["SYNCLINE_GPU_SECONDS"])

    def note(self, test: str, **what: Any) -> None:
        self.tests.setdefault(test, {"figures": []}).update(what)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.facts, "tests": self.tests}, indent=1) + "\n")

    def pytest_runtest_setup(self) -> None:
        if torch.cuda.is_available() and time.monotonic() - BEGAN_S > self.limit_s:
            pytest.skip(OVER)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(nodeid, outcome="did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        what: dict[str, Any] = {}
        if report.when == "call" or report.outcome != "passed":
            what = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            what["why"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            what["why"] = str(report.longrepr)[-4000:]
        if report.when == "call":
            what["figures"] = [value for name, value in report.user_properties if name == "figure"]
        if what:
            self.note(report.nodeid, **what)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write("")
        if not torch.cuda.is_available():
            write(f"{no_gpu()}, so nothing was run")
        counts = Counter[str]()
        for name, test in self.tests.items():
            said = test.get("why", "").splitlines() or [""]
            would_run = said[-1].startswith("no GPU here")
            word = "would run" if would_run else test["outcome"]
            counts[word] += 1
            # Of a failure, what pytest marks as the error.
            why = next((line[1:].strip() for line in said if line.startswith("E ")), said[-1])
            reason = f": {why}" if why and not would_run else ""
            write(f"{word:<11} {name.rsplit('/', 1)[-1]}{reason}")
            for figure, value, unit in test["figures"]:
                write(f"{'':<11} {figure}: {value:.4g} {unit}")
        write(", ".join(f"{number} {word}" for word, number in sorted(counts.items())))
        write(f"written: {self.path}")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("SYNCLINE_GPU_JSON")
    if path is not None:
        config.pluginmanager.register(Report(Path(path)), "what make test-gpu found")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip(no_gpu())
