"""``syncline report`` renders a directory again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli.report import report
from syncline.errors import FileError
from syncline.plan.network import PRESETS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "report"
    folder.mkdir()
    PRESETS["10gbe-k80"].save(folder / "network.json")
    return folder


def _run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(report, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_report_is_rendered_beside_its_files(folder: Path) -> None:
    assert _run(folder) == f"{folder / 'report.html'}\n"
    assert "10gbe-k80" in (folder / "report.html").read_text()
    assert (folder / "report.json").exists()
    assert (folder / "trace.json").exists()


def test_json_is_all_that_is_printed(folder: Path) -> None:
    printed = json.loads(_run(folder, "--json"))
    assert printed == json.loads((folder / "report.json").read_text())
    assert printed["format"] == "syncline/report"


def test_output_takes_the_page_elsewhere(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert _run(folder, "--output", page) == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in folder.iterdir()] == ["network.json"]


def test_a_directory_without_our_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds none of"):
        CliRunner().invoke(report, [str(tmp_path)], catch_exceptions=False)
