from __future__ import annotations

import gzip
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import FileError, UserError
from syncline.files.traces import reading
from syncline.files.traces.reading import json_elements, open_trace, text_lines
from tests import strategies as some


def elements(text: str | bytes, *arrays: str) -> list[tuple[str, int | None, object]]:
    data = text.encode() if isinstance(text, str) else text
    return [tuple(e) for e in json_elements(io.BytesIO(data), arrays)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_packing_is_recognised_by_content_not_name(tmp_path: Path, packed: bool, name: str) -> None:
    text = b"line\n" * 1000
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if packed else text)
    with open_trace(path) as stream:
        assert stream.read() == text


def test_progress_counts_bytes_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * (3 << 20))
    seen: list[tuple[int, int | None]] = []
    with open_trace(path, progress=lambda done, total: seen.append((done, total))) as stream:
        while stream.read(1 << 16):
            pass
    assert seen[0] == (1 << 20, 3 << 20)
    assert seen[-1] == (3 << 20, 3 << 20)


def test_what_is_no_trace_file_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(range(256)) * 100, mtime=0)
    broken = packed[:20] + b"\xff" * 40 + packed[60:]
    cases: dict[str, tuple[bytes | None, str]] = {
        "missing": (None, "missing: no such file; check the path"),
        "folder": (None, "folder: this is a folder; name a file in it"),
        "empty": (b"", "empty: the file is empty; record or copy it again"),
        "empty.gz": (gzip.compress(b""), "empty.gz: the file is empty"),
        "cut.gz": (packed[: len(packed) // 2], "cut.gz: the gzip file ends too early"),
        "broken.gz": (broken, "broken.gz: broken gzip file"),
        "crc.gz": (packed[:-8] + b"\0" * 8, "crc.gz: broken gzip file .*CRC"),
        "nul\0": (None, "null character"),
        "a" * 300: (None, "cannot be read: File name too long"),
        "/dev/zero": (None, "this is a device"),
    }
    (tmp_path / "folder").mkdir()
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=message), open_trace(tmp_path / name) as stream:
            stream.read()


def test_no_more_than_the_largest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_TRACE_BYTES", 3 << 20)
    large = b"x" * (4 << 20)
    for name, content in (("bomb.gz", gzip.compress(large)), ("large", large)):
        (tmp_path / name).write_bytes(content)
        message = f"{name}: holds more than 3145728 bytes .unpacked"
        with pytest.raises(FileError, match=message), open_trace(tmp_path / name) as stream:
            stream.read()


def test_lines_are_numbered() -> None:
    lines = text_lines(io.BytesIO("ä\r\n\nlast".encode()))
    assert list(lines) == [("line 1", "ä"), ("line 3", "last")]


def test_lines_that_are_no_text() -> None:
    with pytest.raises(UserError, match=r"^line 2 is not text"):
        list(text_lines(io.BytesIO(b"ok\n\xff\n")))
    endless = io.BytesIO(b"x" * (reading.LONGEST_LINE_BYTES + 2))
    with pytest.raises(UserError, match=r"^line 1 is longer than"):
        list(text_lines(endless))


def test_half_a_character_becomes_a_question_mark() -> None:
    """No output could hold it."""
    text = rb'{"a": [{"name": "x\uD83D", "\ud83d\ude00": 1}]}'
    assert elements(text, "a") == [("a", 0, {"name": "x?", "\U0001f600": 1})]


def test_members_and_elements_come_in_the_order_of_the_file() -> None:
    assert elements('{"a": {"x": [1]}, "e": [1, {"y": 2}, []], "b": 3}', "e") == [
        ("a", None, {"x": [1]}),
        ("e", 0, 1),
        ("e", 1, {"y": 2}),
        ("e", 2, []),
        ("b", None, 3),
    ]
    assert elements("[1, 2]") == [("", 0, 1), ("", 1, 2)]
    assert elements('{"e": {"no": "array"}}', "e") == [("e", None, {"no": "array"})]
    assert elements("{}") == []
    assert elements(' {"e":[ ] }\n', "e") == []


numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@some.many
@given(
    events=st.lists(json_values, max_size=8),
    others=st.dictionaries(st.text().filter(lambda key: key != "e"), json_values, max_size=3),
    chunk=st.integers(1, 40),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_json_is_read_whatever_the_chunks(
    events: list[object], others: dict[str, object], chunk: int, ascii_only: bool, indent: int
) -> None:
    whole = {**others, "e": events}
    text = json.dumps(whole, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "CHUNK_BYTES", chunk)
        found = elements(text.encode("utf-8", "surrogatepass"), "e")
    if "\ufffd" in text or not ascii_only:
        assert sum(key == "e" and place is not None for key, place, _ in found) == len(events)
        return
    assert [value for key, place, value in found if place is not None] == events
    assert {key: value for key, place, value in found if place is None} == others


@some.many
@given(cut=st.integers(0, 70))
def test_a_truncated_file_is_never_taken_for_a_whole_one(cut: int) -> None:
    text = '{"traceEvents": [{"ph": "X", "ts": 1.5}, {"ts": -2e3}], "end": [true, "é"]}'
    with pytest.raises(UserError):
        elements(text[:cut], "traceEvents")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing but white space"),
        (" \n", "nothing but white space"),
        ("hello", "expected JSON, found 'hello' at the beginning"),
        ('{"e": [1, 2', r"the file ends after e\[1\], it is truncated"),
        ('{"e": [1,', r"the file ends in e\[1\], it is truncated"),
        ('{"e": [{"a": "b', r"the file ends in e\[0\], it is truncated"),
        ('{"e": 1', "the file ends after 'e', it is truncated"),
        ('{"e"', "the file ends in 'e', it is truncated"),
        ("{1: 2}", "expected the name of a member, found 1"),
        ('{"e": [1 2]}', r"character 9: expected ',' after e\[0\], found '2\]}'"),
        ('{"e": [{"a": x}]}', r"character 13: Expecting value in e\[0\], near 'x}\]}'"),
        ('{"e": [1]} more', "expected the end of the file, found 'more'"),
        ('{"e": [' + "[" * 100_000, r"e\[0\] are nested too deeply"),
        ('{"e": [' + "1" * 5000 + "]}", r"Exceeds the limit .* in e\[0\]"),
        ('{"a": 1, "e": [], "a": 2}', "'a' occurs twice in the top-level object"),
        ('{"a": {"b": 1, "b": 1}}', "'b' occurs twice in one object; leave one of them out in 'a'"),
        ('{"e": [{"a": 1, "\\u0061": 2}]}', r"'a' occurs twice in one object; .* in e\[0\]"),
    ],
)
def test_errors_in_json_name_their_place(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        elements(text, "e")


MANY = [{"name": f"a::{i}, {{", "args": {"at: ": [i]}} for i in range(100)]


@pytest.mark.parametrize(
    "twice", ['{"a": 1, "a": 1}', '{"a": 1, "a": {":": ":"}}', '{"b": {"a": 1, "a": "\\u003a"}}']
)
def test_a_name_that_occurs_twice_is_refused_among_many_elements(twice: str) -> None:
    """They are decoded at once, by a decoder that takes the last value."""
    begun = json.dumps({"e": MANY})[:-2]
    with pytest.raises(UserError, match=r"'a' occurs twice in one object; .* in e\[100\]"):
        elements(f"{begun}, {twice}, {{}}, {{}}]}}", "e")


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n  ", " : ")])
@pytest.mark.parametrize("odd", ["NaN", '"\\ud800"', '"\\u003a"', '"a\tb"', "1e400", '"}, {"'])
def test_many_elements_with_an_odd_one(separators: tuple[str, str], odd: str) -> None:
    text = json.dumps([*MANY, {"odd": 0}, *MANY], separators=separators)
    text = text.replace(f'"odd"{separators[1]}0', f'"odd"{separators[1]}{odd}')
    found = elements(text)
    expected = json.loads(text.replace("\\ud800", "?"), strict=False)
    assert repr([value for _, _, value in found]) == repr(expected)
    assert [place for _, place, _ in found] == list(range(201))


def test_more_elements_or_lines_than_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_ELEMENTS", 50)
    with pytest.raises(UserError, match="holds more than 50 elements of 'e', the most that is"):
        elements(json.dumps({"e": MANY}), "e")
    with pytest.raises(UserError, match="holds more than 50 lines, the most that is read"):
        list(text_lines(io.BytesIO(b"a\n" * 51)))
    assert len(list(text_lines(io.BytesIO(b"a\n" * 50)))) == 50


def test_an_endless_element_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_ELEMENT", 1 << 20)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1 << 16)
    with pytest.raises(UserError, match="an element is longer than 1048576 characters"):
        elements('{"e": ["' + "x" * (1 << 22), "e")


def test_what_profilers_really_write_is_read() -> None:
    text = b'\xef\xbb\xbf{"e": [{"name": "a\tb\xff", "v": NaN}, -Infinity]}'
    (_, _, first), (_, _, second) = elements(text, "e")
    assert (first["name"], second) == ("a\tb\ufffd", -math.inf)
    assert math.isnan(first["v"])
