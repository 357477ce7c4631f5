"""What `make test-gpu` found: one JSON, and a short table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import facts

NO_GPU = f"no GPU here (torch {torch.__version__} finds none)"
OVER = "the time of SYNCLINE_GPU_SECONDS was over"
BEGAN_S = time.monotonic()


class Found:
    """Results as they come: the file is complete after every test, whatever ends the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}
        self.facts = facts()

    def note(self, test: str, **what: Any) -> None:
        self.tests.setdefault(test, {"figures": []}).update(what)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.facts, "tests": self.tests}, indent=1) + "\n")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float, str], None]:
    """Return a function that notes a figure by name, with its unit."""

    def note(name: str, value: float, unit: str) -> None:
        request.node.user_properties.append(("figure", [name, value, unit]))

    return note


class Report:
    """Writes what was found, and says it in few lines."""

    def __init__(self, path: Path) -> None:
        self.found = Found(path)
        self.limit_s = float(os.environ["SYNCLINE_GPU_SECONDS"])

    def pytest_runtest_setup(self) -> None:
        if torch.cuda.is_available() and time.monotonic() - BEGAN_S > self.limit_s:
            pytest.skip(OVER)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.found.note(nodeid, outcome="did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        what: dict[str, Any] = {}
        if report.when == "call" or report.outcome != "passed":
            what = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.skipped:
            # A file, a line and the reason.
            what["why"] = str(report.longrepr[2] if report.longrepr else "").removeprefix(
                "Skipped: "
            )
        elif report.failed:
            what["why"] = str(report.longrepr)[-4000:]
        if report.when == "call":
            what["figures"] = [value for name, value in report.user_properties if name == "figure"]
        if what:
            self.found.note(report.nodeid, **what)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        for name, test in self.found.tests.items():
            short = name.rsplit("/", 1)[-1]
            why = f": {test['why'].splitlines()[-1]}" if test.get("why") else ""
            word = {"skipped": "would run" if "no GPU here" in why else "skipped"}
            write(f"{word.get(test['outcome'], test['outcome']):<10} {short}{why}")
            for figure, value, unit in test["figures"]:
                write(f"{'':<10} {figure}: {value:.4g} {unit}")
        counts = [test["outcome"] for test in self.found.tests.values()]
        write(", ".join(f"{counts.count(each)} {each}" for each in sorted(set(counts))))
        write(f"written: {self.found.path}")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("SYNCLINE_GPU_JSON")
    if path is not None:
        config.pluginmanager.register(Report(Path(path)), "what make test-gpu found")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
