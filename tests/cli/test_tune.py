"""``syncline tune`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.cli import main
from syncline.comm.groups import Choices
from syncline.comm.groups.choices import choices_path
from syncline.lab.bench import tuning
from tests.comm.groups.choice_examples import HERE, choices
from tests.timeouts import DEADLINE_S

COMMAND = (sys.executable, "-c", "from syncline.cli import main; main()")
QUICK = ("--sizes", "256,4KiB", "--workers", "2", "--lap", "0.001", "--collectives", "all-reduce")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "syncline" / "choices"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=folder,
    )


def test_what_was_measured_is_kept_shown_and_used(cache: Path, tmp_path: Path) -> None:
    tuned = run("tune", *QUICK, "--page", "page.html", folder=tmp_path)
    assert (tuned.returncode, tuned.stderr) == (0, "")
    [kept] = cache.iterdir()
    assert f"kept in {kept}" in tuned.stdout
    assert tuned.stdout.splitlines()[-1] == "page written to page.html"
    found = Choices.load(kept)
    assert kept == choices_path(found.site)
    shown = run("tune", "--show", folder=tmp_path)
    assert shown.returncode == 0
    assert "all-reduce" in shown.stdout
    assert shown.stdout in tuned.stdout
    assert run("show", str(kept), folder=tmp_path).stdout.strip() in tuned.stdout
    # A benchmark on the same host says where the choice comes from.
    measured = run(
        *("bench", "collectives", "--sizes", "4", "--workers", "2", "--lap", "0.001"),
        *("--contestants", "syncline", "--json"),
        folder=tmp_path,
    )
    versions = json.loads(measured.stdout)["versions"]
    assert versions["choices, 2 workers"] == f"measured {found.date}, {kept}"


@pytest.mark.slow
def test_a_file_of_its_own_as_json(cache: Path, tmp_path: Path) -> None:
    result = run("tune", *QUICK, "-o", "mine.json", "--json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    [document] = json.loads(result.stdout)
    assert Choices.from_json(json.dumps(document)) == Choices.load(tmp_path / "mine.json")
    assert not cache.exists()


def test_what_the_deadline_leaves_out_is_said(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = choices()
    monkeypatch.setattr(
        "syncline.cli.tune.measure",
        lambda *_, **__: tuning.Tuned((some,), ("broadcast with 2 workers",)),
    )
    monkeypatch.chdir(tmp_path)
    main_ends(["tune", "--deadline", "1"])
    assert capsys.readouterr().err == (
        "not measured within 1 s (--deadline), so as built in: broadcast with 2 workers\n"
    )
    assert Choices.load(cache / f"{HERE.key}.json") == some


def main_ends(arguments: list[str]) -> None:
    """Run a command that must end well."""
    try:
        main(arguments)
    except SystemExit as error:
        assert not error.code  # noqa: PT017


def test_a_damaged_file_is_named(cache: Path, refused: Callable[..., str]) -> None:
    cache.mkdir(parents=True)
    (cache / "broken.json").write_text("{}")
    said = refused("tune", "--show")
    assert str(cache / "broken.json") in said
    assert "delete it, or measure again with 'syncline tune'" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--show",), "nothing was measured yet in "),
        (("--show", "--workers", "2"), "--show measures nothing, so --workers has no meaning"),
        (("--show", "--output", "x"), "--show measures nothing, so --output has no meaning"),
        (("--collectives", "reduse"), "did you mean 'reduce'?"),
        (("--sizes", "4MB"), "write 4, 64KiB or 4..256MiB"),
        (("--workers", "2,4", "-o", "x.json"), "found 2, 4; name one with --workers"),
        (("--rate", "1gbit"), "--rate needs emulated hosts; say how many with --hosts"),
        (("--workers-per-host", "2"), "--workers-per-host needs emulated hosts"),
        (("--hosts", "2", "--place", "tcp"), "leave one out"),
        (("--page", "folder"), "expected the name of a page, such as choices.html"),
        (("--page", "missing/page.html"), "there is no folder missing"),
        (("--deadline", "0"), "deadline_s must be finite and above 0"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_mistakes(refused: Callable[..., str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("tune", *arguments)


def test_a_user_without_a_home(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert "no home folder" in refused("tune")
