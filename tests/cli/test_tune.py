"""``syncline tune`` and ``syncline bench`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from syncline.comm.groups import Choices
from syncline.comm.groups.choices import choices_path
from syncline.lab.bench import tuning
from syncline.lab.bench.result import Benchmark
from tests.cli.examples import Printed, Run
from tests.comm.groups.choice_examples import HERE, choices

QUICK = ("--sizes", "256,4KiB", "--workers", "2", "--lap", "0.001", "--collectives", "all-reduce")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "syncline" / "choices"


@pytest.mark.slow
def test_what_was_measured_is_kept_and_used(cache: Path, printed: Printed, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    tuned = printed("tune", *QUICK, "--page", page)
    [kept] = cache.iterdir()
    assert f"kept in {kept}" in tuned
    assert tuned.splitlines()[-1] == f"page written to {page}"
    found = Choices.load(kept)
    assert kept == choices_path(found.site)
    shown = printed("tune", "--show")
    assert "all-reduce" in shown
    assert shown in tuned
    assert printed("show", kept).strip() in tuned
    # A benchmark on the same host says where the choice comes from.
    benchmark = Benchmark.from_json(printed(*BENCH, "--json"))
    assert [entry.size_bytes for entry in benchmark.entries] == [4, 4, 4096, 4096]
    assert benchmark.versions["choices, 2 workers"] == f"measured {found.date}, {kept}"


def test_a_file_of_its_own_as_json(
    cache: Path, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choices()
    monkeypatch.setattr("syncline.cli.tune.measure", lambda *_, **__: tuning.Tuned((found,), ()))
    [document] = json.loads(printed("tune", *QUICK, "-o", tmp_path / "mine.json", "--json"))
    assert Choices.from_json(json.dumps(document)) == Choices.load(tmp_path / "mine.json") == found
    assert not cache.exists()


def test_what_is_left_out_is_said(cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    some = choices()
    tuned = tuning.Tuned((some,), ("broadcast with 2 workers",))
    monkeypatch.setattr("syncline.cli.tune.measure", lambda *_, **__: tuned)
    result = run("tune", "--deadline", "1")
    assert result.code == 0
    assert result.err == (
        "not measured within 1 s (--deadline), so as built in: broadcast with 2 workers\n"
    )
    assert Choices.load(cache / f"{HERE.key}.json") == some


def test_a_damaged_file_is_named(cache: Path, refused: Printed) -> None:
    cache.mkdir(parents=True)
    (cache / "broken.json").write_text("{}")
    said = refused("tune", "--show")
    assert str(cache / "broken.json") in said
    assert "delete it, or measure again with 'syncline tune'" in said


def test_a_user_without_a_home(refused: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert "no home folder" in refused("tune")


BENCH = (
    *("bench", "collectives", "--sizes", "4,4KiB", "--workers", "2", "--lap", "0.001"),
    *("--contestants", "syncline,gloo"),
)


def test_a_table_and_a_report(printed: Printed, tmp_path: Path) -> None:
    report = tmp_path / "measured"
    out = printed(*BENCH, "--report", report)
    assert "all-reduce · 2 workers · one host, shared memory" in out
    assert out.splitlines()[-1] == f"report written to {report}"
    assert {path.name for path in report.iterdir()} == {"collectives.html", "collectives.json"}
