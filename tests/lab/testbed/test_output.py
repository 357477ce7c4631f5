"""Whole lines behind the names of workers."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.testbed.output import LONGEST_LINE_BYTES, Lines, Printer
from tests import strategies as some


def fed(*pieces: tuple[bytes, float]) -> list[bytes]:
    lines = Lines()
    found = [line for data, now_s in pieces for line in lines.feed(data, now_s)]
    return found + lines.finish()


@some.many
@given(st.text("ab\n", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_lines_do_not_depend_on_how_they_come(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    pieces = [(data[a:b], 0.0) for a, b in itertools.pairwise(edges)]
    assert fed(*pieces) == data.removesuffix(b"\n").split(b"\n") * bool(data)


def test_a_progress_bar_is_shown_once_a_second_and_at_its_end() -> None:
    bar = [(b"\r%d %%" % percent, percent / 10) for percent in range(1, 31)]
    assert fed(*bar, (b"\rdone\n", 3.1)) == [b"1 %", b"11 %", b"21 %", b"done"]


def test_a_line_drawn_over_for_hours_is_not_kept() -> None:
    lines = Lines()
    for percent in range(1000):
        lines.feed(b"%d %%\r" % percent, 0.0)
    assert lines.finish() == [b"999 %"]


def test_lines_that_end_as_on_windows() -> None:
    assert fed((b"a\r\nb\r", 0), (b"\nc", 0)) == [b"a", b"b", b"c"]


def test_a_line_without_end_is_passed_on_in_parts() -> None:
    parts = fed((b"x" * (2 * LONGEST_LINE_BYTES + 1), 0))
    assert list(map(len, parts)) == [LONGEST_LINE_BYTES, LONGEST_LINE_BYTES, 1]


def test_names_are_aligned_and_streams_kept_apart(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printer = Printer(["host0 rank 9", "host1 rank 10"], [0, 1])
    printer(0, False, b"one")
    printer(1, True, b"\xff two")
    out, err = capfdbinary.readouterr()
    assert out == b"host0 rank 9  | one\n"
    assert err == b"host1 rank 10 | \xff two\n"


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, kind: type[io.TextIOWrapper]) -> bytes:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", kind(out))
    Printer(["a", "b"], [0, 1])(1, False, b"text")
    return out.getvalue()


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert printed(monkeypatch, io.TextIOWrapper) == b"b | text\n"
    assert printed(monkeypatch, Terminal) == b"\x1b[32mb | \x1b[0mtext\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Terminal) == b"b | text\n"
