"""What tests of several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.cli import main
from tests.cli.examples import LINKED, PROFILE, Printed, Result, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def call(*arguments: object) -> Result:
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def printed(run: Run) -> Printed:
    """Return a call that runs a command which ends well and warns of nothing: what it prints."""

    def call(*arguments: object) -> str:
        result = run(*arguments)
        assert (result.code, result.err) == (0, "")
        return result.out

    return call


@pytest.fixture
def refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Return a call that runs a command and returns the one line with which it refuses.

    The exit code is 2, nothing is printed to the standard output, and nothing is written.
    """

    def call(*arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        before = set(tmp_path.iterdir())
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert set(tmp_path.iterdir()) == before
        return err

    return call


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    PROFILE.save(path := tmp_path / "profile.json")
    return path


@pytest.fixture
def network(tmp_path: Path) -> Path:
    LINKED.save(path := tmp_path / "network.json")
    return path
