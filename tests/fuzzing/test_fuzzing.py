"""The fuzzer covers all kinds of files, and sees what a command must not do.

``tools/fuzz-files`` runs the inputs; ``.ci/run`` runs a hundred of each kind.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from syncline.cli.show import PRINTERS as SHOWN
from syncline.errors import FileError, InternalError
from syncline.files.traces.formats import FORMATS
from tests.files.traces.seeds import seeds
from tests.fuzzing.files import KINDS, Command, Kind
from tests.fuzzing.mutations import mutated
from tests.fuzzing.runner import fuzz
from tests.programs import ran


def test_every_kind_of_file_is_fuzzed() -> None:
    documents = {noun.KIND for noun in SHOWN} - {"timeline"}
    traces = {form.name for form in FORMATS.values() if form.read is not None} - {"json"}
    others = {"timeline-predicted", "timeline-measured", "checkpoint", "compression"}
    assert set(KINDS) == documents | traces | others


def test_inputs_are_a_function_of_their_seed() -> None:
    files = seeds()["chakra"]
    assert mutated(files, "1:chakra:7") == mutated(files, "1:chakra:7")
    assert len({mutated(files, f"1:chakra:{i}") for i in range(100)}) > 80


def _endless() -> None:
    while True:
        pass


REFUSING = mock.Mock(side_effect=FileError("something is wrong"))
BROKEN: dict[str, Callable[[], Any]] = {
    "not done after 4.0 s": _endless,
    "MemoryError": lambda: sys.stdout.write("x" * (1 << 30)),
    "KeyError: 'nodes'": mock.Mock(side_effect=KeyError("nodes")),
    "InternalError: a bug": mock.Mock(side_effect=InternalError("a bug")),
    "an error of 5008 characters": mock.Mock(side_effect=FileError("x" * 5000)),
    "steers a terminal": lambda: sys.stdout.write("\x1b[2J"),
    "the file is not named": REFUSING,
    "ended with -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
}  # what a command does that it must not, by what is said of it


@pytest.mark.slow
def test_what_a_command_must_not_do_is_seen(tmp_path: Path) -> None:
    calls = list(BROKEN.values())

    def commands(file: Path, out: Path, number: int) -> list[Command]:
        del file, out
        return [("show" if calls[number] is REFUSING else "call", calls[number])]

    kind = Kind("broken", lambda: [b"x"], "file", commands)
    outcome = fuzz(
        kind, inputs=len(calls), seed=0, folder=tmp_path, deadline_s=4.0, memory_bytes=1 << 28
    )
    assert outcome.inputs == len(calls)
    assert [finding.number for finding in outcome.findings] == list(range(len(calls)))
    for finding, text in zip(outcome.findings, BROKEN, strict=True):
        assert text in finding.text


@pytest.mark.slow
def test_some_inputs_of_one_kind() -> None:
    # A process of its own: the fuzzer forks, and other tests have started threads here.
    tool = Path(__file__).parents[2] / "tools" / "fuzz-files"
    ended = ran(sys.executable, tool, "--kind", "plan", "--inputs", "30", "--seed", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Neither too tame nor too wild to reach what lies behind the first check.
    counts = re.search(r"show +(\d+) done +(\d+) refused", ended.stdout)
    assert counts is not None
    assert int(counts[1]) > 1
    assert int(counts[2]) > 10
