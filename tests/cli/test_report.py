"""``syncline report`` renders a directory again; ``syncline show`` reads any of our files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.examples import K80, Printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "report").mkdir()
    K80.save(folder / "network.json")
    return folder


def test_the_report_is_rendered_beside_its_files(printed: Printed, folder: Path) -> None:
    assert printed("report", folder) == f"{folder / 'report.html'}\n"
    assert "10gbe-k80" in (folder / "report.html").read_text()
    assert (folder / "trace.json").exists()
    found = json.loads(printed("report", folder, "--json"))
    assert found == json.loads((folder / "report.json").read_text())
    assert found["format"] == "syncline/report"


def test_output_takes_the_page_elsewhere(printed: Printed, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert printed("report", folder, "--output", page) == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in folder.iterdir()] == ["network.json"]


def test_a_file_is_known_by_its_header(printed: Printed, tmp_path: Path) -> None:
    K80.save(path := tmp_path / "any-name.json")
    out = printed("show", path)
    assert "Network 10gbe-k80" in out
    assert "972 µs" in out
    assert json.loads(printed("show", path, "--json")) == json.loads(path.read_text())
