"""What tests of several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.cli import main


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a call that runs a command and returns the one line with which it refuses.

    The exit code is 2, nothing is printed to the standard output, and nothing is written.
    """

    def run(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert not list(tmp_path.iterdir())
        return err

    return run
