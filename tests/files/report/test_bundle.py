"""A report directory is written whole, read back the same, and refused when it is broken."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.errors import FileError, UserError
from syncline.files.report.bundle import DOCUMENTS, Bundle
from syncline.files.report.page import save
from syncline.files.report.summary import Summary, summarise

fields = pytest.mark.parametrize("field", DOCUMENTS)


def test_a_saved_bundle_loads_the_same(whole: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    save(whole, folder)
    names = {name for name, _ in DOCUMENTS.values()} | {"report.html", "report.json", "trace.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert Bundle.load(folder) == whole
    assert Summary.load(folder / "report.json") == summarise(whole)
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


@fields
def test_any_single_part_makes_a_report(whole: Bundle, field: str, tmp_path: Path) -> None:
    save(Bundle(**{field: getattr(whole, field)}), tmp_path)
    assert getattr(Bundle.load(tmp_path), field) == getattr(whole, field)
    page = (tmp_path / "report.html").read_text()
    assert "<h1>" in page
    assert "None" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


@fields
def test_any_part_may_be_missing(bundle: Bundle, field: str) -> None:
    assert summarise(replace(bundle, **{field: None})).verdict.headline


def test_an_empty_directory_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds none of run\.json, profile\.json.*syncline train"):
        Bundle.load(tmp_path)
    with pytest.raises(FileError, match="is no directory"):
        Bundle.load(tmp_path / "absent")
    with pytest.raises(UserError, match="nothing to report on"):
        Bundle()


def test_a_broken_file_or_dangling_link_is_no_missing_file(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save(tmp_path)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(FileError, match=r"plan\.json: no such file"):
        Bundle.load(tmp_path)
    (tmp_path / "network.json").write_text('{"format": "syncline/network", "version": 1')
    with pytest.raises(FileError, match=r"network\.json: not valid JSON"):
        Bundle.load(tmp_path)


def test_swapped_timelines_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a predicted timeline"):
        Bundle(timeline_predicted=bundle.timeline_measured)
    bundle.timeline_measured.save(tmp_path / "timeline-predicted.json")
    with pytest.raises(FileError, match="says that it is measured"):
        Bundle.load(tmp_path)


def test_files_of_an_earlier_report_are_set_aside(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save(tmp_path)
    later = Bundle(profile=bundle.profile)
    later.save(tmp_path)
    assert Bundle.load(tmp_path) == later
    assert (tmp_path / "plan.json.old").exists()


def test_a_directory_that_cannot_be_made_is_an_error(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        bundle.save(tmp_path / "file" / "report")


def test_the_trace_has_waits_and_a_counter(overlapped: Bundle, tmp_path: Path) -> None:
    save(overlapped, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(e["ph"] == "X" and e["name"].startswith("wait: ") for e in events)
    counters = [e["args"]["messages"] for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(counters) > 1
