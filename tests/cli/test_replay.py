"""``syncline replay`` as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli.commands import cli
from syncline.lab.replay.result import Replay
from tests.lab.replay.examples import PROFILE
from tests.lab.testbed.machine import require_namespaces
from tests.timeouts import DEADLINE_S

COMMAND = (sys.executable, "-c", "from syncline.cli import main; main()", "replay")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


QUICK = ("--rounds", "1", "--iterations", "1", "--warmup", "1", "--rate", "1gbit")


def test_a_table_and_a_report(profile: Path, tmp_path: Path) -> None:
    require_namespaces()
    report = tmp_path / "report"
    result = run(
        profile, "--planner", "ddp,merge", *QUICK, "--scale-compute", "2", "--report", report
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no bar where there is no terminal
    lines = result.stdout.splitlines()
    assert lines[0].startswith("layers · 2 hosts, 1 worker each, links 1 Gbit/s · medians of 1 ")
    begins = {line.split()[0] for line in lines if line.strip()}
    assert begins >= {"planner", "ddp", "merge", "computing"}
    assert "note: computing takes 2 times as long as in the profile" in lines
    assert lines[-1] == f"report written to {report}"
    found = Replay.load(report / "replay.json")
    assert found.computation_s == pytest.approx(2 * PROFILE.computation_s)


@pytest.mark.slow
def test_json_is_all_that_is_printed(profile: Path, tmp_path: Path) -> None:
    require_namespaces()
    network = "a=1e-4,b=1e-9"
    result = run(profile, "--planner", "wfbp", *QUICK, "--network", network, "--json")
    assert result.returncode == 0, result.stderr
    found = Replay.from_json(result.stdout)
    assert [entry.planner for entry in found.entries] == ["wfbp"]
    assert found.network.startswith(f"{network} at 2 workers")
    saved = tmp_path / "saved.json"
    saved.write_text(result.stdout)
    shown = CliRunner().invoke(cli, ["show", str(saved)], catch_exceptions=False)
    assert shown.output.startswith("layers \u00b7 2 hosts")
    assert found.warmup == found.iterations == found.rounds == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--planner", "merg"), "did you mean 'merge'"),
        (("--planner", "all,ddp"), "--planner all stands alone"),
        (("--planner", "ddp,ddp"), "'ddp' would run twice"),
        (("--rounds", "0"), "rounds must be at least 1"),
        (("--hosts", "1"), "at least 2 workers"),
        (("--hosts", "0"), "hosts"),
        (("--rate", "1gb"), "bits or bytes"),
        (("--scale-compute", "0"), "compute scale"),
        (("--timeout", "0"), "the timeout must be"),
        (("--network", "nowhere.json"), "nowhere.json: no such file"),
        (("--network", "bandwidth=1gbit,workers=9"), "is of 9 workers, the emulated cluster has 2"),
        (("--plan", "nowhere.json"), "nowhere.json: no such file"),
        (("--report", "no/where.html"), "there is no folder no"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    refused: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    PROFILE.save(path)
    assert said in refused("replay", str(path), *arguments)


def test_a_missing_profile(refused: Callable[..., str]) -> None:
    assert "nowhere.json: no such file" in refused("replay", "nowhere.json")
