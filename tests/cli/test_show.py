"""``syncline show`` reads any of our files by its header."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli.show import show
from syncline.errors import FileError
from syncline.plan.network import PRESETS


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "any-name.json"
    PRESETS["10gbe-k80"].save(path)
    return path


def test_a_file_is_known_by_its_header(network: Path) -> None:
    result = CliRunner().invoke(show, [str(network)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Network 10gbe-k80" in result.output
    assert "972 µs" in result.output


def test_json_is_all_that_is_printed(network: Path) -> None:
    result = CliRunner().invoke(show, [str(network), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout) == json.loads(network.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object"),
        ('{"format": "syncline/poem", "version": 1}', "unknown kind of file 'poem'"),
        ('{"format": "syncline/network", "version": 9}', "expected version 2"),
    ],
)
def test_what_is_not_ours_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        CliRunner().invoke(show, [str(path)], catch_exceptions=False)


def test_a_missing_file_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        CliRunner().invoke(show, [str(tmp_path / "absent.json")], catch_exceptions=False)
