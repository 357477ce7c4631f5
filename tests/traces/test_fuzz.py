"""Readers take mutated files, or refuse them with an error of the user's that names the file.

``tools/fuzz-traces`` runs many more inputs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import FileError, InternalError
from syncline.traces.formats import FORMATS, Format, Options, Paths
from syncline.traces.trace import Trace
from tests.traces.fuzzing import fuzz, mutated, try_input
from tests.traces.seeds import seeds

INPUTS = 400


@pytest.mark.parametrize("form", sorted(seeds()))
def test_mutated_files_are_read_or_refused(form: str, tmp_path: Path) -> None:
    outcome = fuzz(form, seeds()[form], inputs=INPUTS, seed=2018, folder=tmp_path)
    for failure in outcome.failures:
        raise AssertionError(f"input {failure.number}: {failure.content!r}") from failure.error
    # Neither too tame nor too wild to reach what lies behind the first check.
    assert outcome.read > INPUTS // 20
    assert outcome.refused > INPUTS // 10


def test_every_format_that_is_read_is_fuzzed() -> None:
    assert set(seeds()) == {form.name for form in FORMATS.values() if form.read is not None}


def test_inputs_are_a_function_of_their_seed() -> None:
    files = seeds()["chakra"]
    assert mutated(files, "1:chakra:7") == mutated(files, "1:chakra:7")
    assert len({mutated(files, f"1:chakra:{i}") for i in range(100)}) > 80


def _endless(paths: Paths, options: Options) -> Trace:
    while True:
        pass


def _careless(paths: Paths, options: Options) -> Trace:
    raise KeyError("nodes")


def _ours(paths: Paths, options: Options) -> Trace:
    raise InternalError("a bug")


def _nameless(paths: Paths, options: Options) -> Trace:
    raise FileError("something is wrong somewhere")


@pytest.mark.parametrize(
    ("reader", "kind", "says"),
    [
        (_endless, BaseException, "not done after"),
        (_careless, KeyError, "nodes"),
        (_ours, InternalError, "a bug"),
        (_nameless, AssertionError, "does not name the file"),
    ],
)
def test_what_a_reader_must_not_do_is_seen(
    reader: object,
    kind: type[BaseException],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = Format(name="broken", summary="", read=reader)  # type: ignore[arg-type]
    monkeypatch.setitem(FORMATS, "broken", form)
    with pytest.raises(kind, match=says):
        try_input("broken", b"x", tmp_path / "trace", write=False, within_s=0.2)
    outcome = fuzz("broken", [b"x"], inputs=1, seed=0, folder=tmp_path, deadline_s=0.2)
    assert len(outcome.failures) == 1
