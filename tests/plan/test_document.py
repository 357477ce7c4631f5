"""Files: every noun survives the round trip, and no file, however broken, gets past FileError."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.groups import Choices
from syncline.errors import FileError, UserError
from syncline.plan.document import Document, read_document
from syncline.plan.files import write_atomically
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS, slices
from syncline.plan.planners.auto import choose
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.plan.run import Run
from syncline.plan.simulator.predict import predict
from syncline.plan.timeline import Timeline
from tests import strategies as some
from tests.comm.groups.choice_examples import choices
from tests.plan.documents import COMPARISON, EXAMPLES, NETWORK, PLAN, PROFILE, RUN, TIMELINE
from tests.plan.test_files import names

KINDS: tuple[type[Document], ...] = (Profile, Network, Plan, Timeline, Comparison, Run, Choices)
DOCUMENTS = (*EXAMPLES, choices())
Place = list[str | int]  # names and indices down to a value of a document

examples = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.KIND)


@some.many
@given(some.documents)
def test_every_noun_survives_the_round_trip(document: Document) -> None:
    text = document.to_json()
    assert type(document).from_json(text) == document
    assert type(document).from_json(text.encode()) == document
    assert json.loads(text)["format"] == f"syncline/{document.KIND}"


@examples
def test_a_saved_file_is_loaded_by_its_kind(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "noun.json"
    document.save(path)
    assert type(document).load(path) == document
    assert type(document).load(str(path)) == document
    assert read_document(path, KINDS) == document
    assert names(tmp_path) == ["noun.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.json", "absent.json: .*no such file.*check the path"),
        (".", "this is a folder; name a file in it"),
        ("a\0b", "null character"),
    ],
)
def test_a_path_that_cannot_be_read(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=message):
        Profile.load(tmp_path / name)


@examples
@pytest.mark.parametrize(
    "text", [b"", b" ", b"\0", b"\xff\xfe", "\ud800", b"nul", b"NaN", b'{"a":' * 100_000]
)
def test_what_is_not_json(document: Document, text: str | bytes) -> None:
    with pytest.raises(FileError, match=r"(?s)x\.json: not valid JSON.*write it again"):
        type(document).from_json(text, source="x.json")


@examples
def test_a_file_truncated_at_any_byte(document: Document) -> None:
    text = document.to_json().rstrip().encode()
    for length in range(len(text)):
        with pytest.raises(FileError, match=r"file\.json: not valid JSON"):
            type(document).from_json(text[:length], source="file.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"syncline/plan"'])
def test_json_that_is_no_object(text: str) -> None:
    with pytest.raises(FileError, match=r"x.json: expected a JSON object \(.* got `\w+`\); this"):
        Plan.from_json(text, source="x.json")


@examples
def test_a_file_of_another_kind(document: Document) -> None:
    other = Plan if not isinstance(document, Plan) else Profile
    said = f"expected a {other.KIND} file.*a {document.KIND} file.*syncline show x.json"
    with pytest.raises(FileError, match=said):
        other.from_json(document.to_json(), source="x.json")


@pytest.mark.parametrize("header", ["plan", "other/plan", 3, None, ["syncline/plan"]])
def test_a_file_that_is_not_ours(header: Any) -> None:
    with pytest.raises(FileError, match=r"x\.json: not a syncline file: expected"):
        Plan.from_json(edited(PLAN, ["format"], header), source="x.json")


def test_an_unknown_kind_lists_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format": "syncline/poem", "version": 1}')
    with pytest.raises(FileError, match=r"unknown kind of file 'poem'; .* comparison, network"):
        read_document(path, KINDS)


@examples
@pytest.mark.parametrize("version", [0, 9, "1", 1.0, True, None])
def test_another_version(document: Document, version: Any) -> None:
    said = rf"x\.json: expected version {document.VERSION} .* version {version!r}; write it again"
    with pytest.raises(FileError, match=said):
        type(document).from_json(edited(document, ["version"], version), source="x.json")


def edited(document: Document, path: Place, value: Any) -> str:
    """Return the document's JSON text with one value set."""
    fields = json.loads(document.to_json())
    inner = fields
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(fields)


@examples
def test_a_missing_field_is_named(document: Document) -> None:
    fields = json.loads(document.to_json())
    required = [f.encode_name for f in msgspec.structs.fields(document) if f.required]
    assert len(required) >= 3
    for name in required:
        rest = {k: v for k, v in fields.items() if k != name}
        with pytest.raises(FileError, match=f"missing required field `{name}`"):
            type(document).from_json(json.dumps(rest))


WRONG: list[tuple[Document, Place, Any, str]] = [
    *((document, ["colour"], "red", "unknown field `colour`") for document in DOCUMENTS),
    (PROFILE, ["model"], 3, r"Expected `str`, got `int` - at `\$.model`"),
    (PROFILE, ["workers"], 0, "profile: workers must be at least 1, found 0"),
    (PROFILE, ["iterations"], -1, "iterations must be at least 1"),
    (PROFILE, ["operations", 1, "duration_s"], -1.0, r"operations\[1\] 'b2': duration_s .* -1"),
    (PROFILE, ["operations", 1, "duration_s"], 1e9, "duration_s is 1e[+]09 s, longer than"),
    (PROFILE, ["operations", 1, "phase"], "sleep", "Invalid enum value 'sleep'"),
    (PROFILE, ["operations", 1, "after"], [1], r"\[1\] 'b2' waits for operation 1, .*DAG"),
    (PROFILE, ["operations", 1, "after"], [-1], "waits for operation -1"),
    (PROFILE, ["gradients"], [], "no gradient tensors"),
    (PROFILE, ["gradients", 0, "name"], "w1", r"gradients\[1\] 'w1': another gradient has this"),
    (PROFILE, ["gradients", 0, "elements"], -5, r"gradients\[0\] 'w2': elements .* negative: -5"),
    (PROFILE, ["gradients", 0, "elements"], 1 << 62, "at most 4611686018427387904 can be planned"),
    (PROFILE, ["gradients", 0, "dtype"], "floaty16", "unknown gradient dtype .* 'float16'"),
    (PROFILE, ["gradients", 0, "ready_after"], 9, "ready_after is 9, but there are 4 operations"),
    (PROFILE, ["gradients", 0, "ready_after"], -1, "ready_after is -1"),
    (PROFILE, ["gradients", 1, "ready_after"], 0, "ready before the one listed ahead"),
    (PROFILE, ["gradients", 1, "ready_after"], 3, r"'w1' is ready after operations\[3\], but"),
    (PROFILE, ["gradients", 0, "needed_by"], 4, "needed_by is 4"),
    (PROFILE, ["baseline", "iteration_s"], -1.0, "baseline: iteration_s must be a finite time"),
    (PROFILE, ["baseline", "iterations"], 0, "baseline: iterations must be at least 1"),
    (NETWORK, ["workers"], 0, "network: workers must be at least 1"),
    (NETWORK, ["workers"], 1 << 40, "at most 2147483648"),
    (NETWORK, ["contention", "computing"], 0.5, "contention must be at least 1"),
    (NETWORK, ["contention", "exchange"], 101, "at least 1 and at most 100, found 101.* exchange"),
    (NETWORK, ["contention", "per_message_s"], -1e-9, "contention.per_message_s must be a finite"),
    (NETWORK, ["algorithm"], "rong", "unknown all-reduce algorithm 'rong'; did you mean 'ring'"),
    (NETWORK, ["link", "alpha_s"], -1, "link: alpha_s must be finite and at least 0"),
    (NETWORK, ["fit_error"], -0.1, "fit_error must be finite and at least 0"),
    (NETWORK, ["points", 0, "time_s"], -1.0, r"points\[0\]: time_s must be a finite"),
    (NETWORK, ["handing_over_s"], 1e308, "handing_over_s is 1e.308 s, longer than"),
    (NETWORK, ["all_reduce", "segments"], [], "cost curve: no segments"),
    (NETWORK, ["all_reduce", "segments", 0, "start_bytes"], 1, "expected start_bytes 0, found 1"),
    (NETWORK, ["all_reduce", "segments", 0, "cost_s"], -1e-3, "cost_s must be finite and at least"),
    (NETWORK, ["all_reduce", "segments", 1, "start_bytes"], 0, "start_bytes must increase: 0"),
    (NETWORK, ["all_reduce", "segments", 1, "start_bytes"], 1 << 63, "start_bytes is beyond"),
    (NETWORK, ["all_reduce", "segments", 1, "cost_s"], 1e-4, "no message must cost less"),
    (PLAN, ["workers"], 0, "plan: workers must be at least 1"),
    (PLAN, ["tensors"], [], "no tensors to exchange"),
    (PLAN, ["tensors", 1, "name"], "w2", r"tensors\[1\] 'w2': another tensor has this name"),
    (PLAN, ["tensors", 1, "elements"], -1, "elements must not be negative: -1"),
    (PLAN, ["tensors", 1, "elements"], 1 << 62, "at most 4611686018427387904"),
    (PLAN, ["messages", 0, "start"], -1, r"starts at element 0, found \[-1, 15\)"),
    (PLAN, ["messages", 0, "start"], 1, r"starts at element 0, found \[1, 15\)"),
    (PLAN, ["messages", 1, "start"], 14, r"starts at element 15, found \[14, 40\)"),
    (PLAN, ["messages", 1, "start"], 16, r"starts at element 15, found \[16, 40\)"),
    (PLAN, ["messages", 1, "stop"], 3, r"found \[15, 3\)"),
    (PLAN, ["messages", 1, "stop"], 39, "cover 39 of 40 gradient elements"),
    (PLAN, ["messages"], [], "cover 0 of 40"),
    (PLAN, ["messages", 0, "collective"], "gossip", "Invalid enum value 'gossip'"),
    (TIMELINE, ["iteration_ns"], 10**60, "times are at most 4611686018427387904 ns, found a numb"),
    (TIMELINE, ["spans", 1, "stop_ns"], 10**30, "times are at most 4611686018427387904 ns"),
    (TIMELINE, ["iteration_ns"], -1, "iteration_ns is negative: -1"),
    (TIMELINE, ["spans", 1, "stop_ns"], 4, r"spans\[1\] 'w' runs from 5 ns to 4 ns"),
    (TIMELINE, ["spans", 0, "start_ns"], -1, r"spans\[0\] 'f' runs from -1 ns"),
    (TIMELINE, ["spans", 0, "start_ns"], 0.5, "Expected `int`, got `float`"),
    (TIMELINE, ["spans", 1, "ready_ns"], 6, r"'w' is ready at 6 ns and starts at 5 ns; a message"),
    (TIMELINE, ["spans", 1, "ready_ns"], -1, r"'w' is ready at -1 ns"),
    (TIMELINE, ["spans", 0, "ready_ns"], 0, r"'f' has ready_ns and is of the kind 'forward'"),
    (TIMELINE, ["spans", 0, "kind"], "stall", "Invalid enum value 'stall'"),
    (COMPARISON, ["chosen"], "merge", "chosen planner 'merge' is not in the table"),
    (COMPARISON, ["predictions", 0, "iteration_s"], 1e-320, "shorter than a nanosecond"),
    (COMPARISON, ["predictions", 0, "iteration_s"], -1, "'ddp': iteration_s must be finite"),
    (COMPARISON, ["predictions", 0, "messages"], -1, "messages is negative"),
    (RUN, ["decision"], "maybe", "Invalid enum value 'maybe'"),
    (RUN, ["baseline", "iteration_s"], -2, "rate 'DDP': iteration_s must be finite"),
    (RUN, ["baseline", "iteration_s"], 0, "rate 'DDP': iteration_s must be finite and above 0"),
    (RUN, ["baseline", "noise_s"], -0.1, "rate 'DDP': noise_s must be finite"),
    (RUN, ["phases", 0, "seconds"], -1, "phase 'profiling': seconds must be finite"),
    (RUN, ["phases", 0, "start"], -1, "phase 'profiling': start and iterations must be at least"),
    (RUN, ["phases", 0, "iterations"], -1, "phase 'profiling': start and iterations"),
]


@pytest.mark.parametrize(("document", "path", "value", "message"), WRONG)
def test_a_wrong_value_is_named(document: Document, path: Place, value: Any, message: str) -> None:
    said = rf"x\.json: not a valid {document.KIND} file: .*{message}.*; correct it"
    with pytest.raises(FileError, match=said):
        type(document).from_json(edited(document, path, value), source="x.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@examples
def test_numbers_that_json_does_not_have(document: Document, number: str) -> None:
    text = re.sub(r": \d+(\.\d+)?(e-?\d+)?", f": {number}", document.to_json())
    text = text.replace(f'"version": {number}', f'"version": {document.VERSION}')
    assert number in text
    with pytest.raises(FileError, match=r"not valid JSON|Number out of range"):
        type(document).from_json(text)


def test_what_is_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = tmp_path / "sparse.json"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    for read in (Profile.load, lambda path: read_document(path, KINDS)):
        with pytest.raises(FileError, match="/dev/zero: this is a device"):
            read(Path("/dev/zero"))
        with pytest.raises(FileError, match=f"{sparse}: holds more than 67108864 bytes"):
            read(sparse)
    monkeypatch.setattr("syncline.plan.document.LARGEST_FILE_BYTES", 1 << 20)
    out, into = os.pipe()
    with subprocess.Popen(["yes"], stdout=into) as endless:
        os.close(into)
        with pytest.raises(FileError, match="holds more than 1048576 bytes"):
            Profile.load(f"/dev/fd/{out}")
        os.close(out)
    assert endless.returncode == -signal.SIGPIPE


def test_a_pipe_is_read() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        file.write(PLAN.to_json())
    assert Plan.load(f"/dev/fd/{read}") == PLAN
    os.close(read)


def test_messages_quote_long_values_in_part() -> None:
    long = "x" * 10_000
    for document, path, value in (
        (PROFILE, ["format"], f"syncline/{long}"),
        (PROFILE, ["format"], long),
        (PROFILE, ["version"], long),
        (PROFILE, [long], 1),
        (PROFILE, ["operations", 1, "phase"], long),
        (PROFILE, ["gradients", 0, "dtype"], long),
        (PLAN, ["messages", 1, "collective"], long),
        (COMPARISON, ["chosen"], long),
        (TIMELINE, ["spans", 1, "kind"], long),
    ):
        with pytest.raises(FileError) as error:
            type(document).from_json(edited(document, list(path), value))
        assert len(str(error.value)) < 1000, path


def test_the_constructor_says_the_same_as_the_file() -> None:
    with pytest.raises(UserError, match="no gradient tensors") as error:
        Profile(model="m", device="d", workers=1, iterations=1, operations=(), gradients=())
    assert not isinstance(error.value, FileError)


splices = st.tuples(st.integers(0, 10_000), st.integers(0, 3), st.binary(max_size=3))


@some.many
@given(st.sampled_from(DOCUMENTS), st.lists(splices, min_size=1, max_size=6))
def test_bytes_changed_at_random(document: Document, changes: list[tuple[int, int, bytes]]) -> None:
    text = bytearray(document.to_json().encode())
    for position, replaced, new in changes:
        at = position % len(text)
        text[at : at + replaced] = new
    read_or_refuse(type(document), bytes(text))


def read_or_refuse(cls: type[Document], text: str | bytes) -> Document | None:
    try:
        return cls.from_json(text, source="x.json")
    except FileError as error:
        assert "x.json" in str(error)  # noqa: PT017 - success is as good
        return None


numbers = st.one_of(
    st.integers(-3, 50),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of every value in a JSON tree but the header."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if at or k not in ("format", "version")]
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [p for k, v in items for p in [(*at, k), *paths(v, (*at, k))]]


@examples
@some.many
@given(data=st.data())
def test_values_changed_at_random(data: st.DataObject, document: Document) -> None:
    path = data.draw(st.sampled_from(paths(json.loads(document.to_json()))))
    changed = edited(document, list(path), data.draw(json_values | numbers))
    read = read_or_refuse(type(document), changed)
    assert read is None or type(document).from_json(read.to_json()) == read


@some.costly
@given(st.data())
def test_whatever_loads_can_be_planned_and_simulated(data: st.DataObject) -> None:
    """Values that a file may hold never lead to anything but a plan or our own error."""
    loaded = []
    for document in (PROFILE, NETWORK):
        text = document.to_json()
        for _ in range(data.draw(st.integers(0, 2))):
            path = data.draw(st.sampled_from(paths(json.loads(text))))
            changed = edited(type(document).from_json(text), list(path), data.draw(numbers))
            if read_or_refuse(type(document), changed) is not None:
                text = changed
        loaded.append(type(document).from_json(text))
    profile, network = loaded
    assert isinstance(profile, Profile)
    assert isinstance(network, Network)
    with mock.patch.object(slices, "MOST_SLICES", 1 << 11):  # more take seconds to simulate
        for planner in PLANNERS.values():
            try:
                plan = planner.plan(profile, network)
                predict(profile, network, plan)
            except UserError:
                pass
    try:
        choose(profile, network)
    except UserError as error:
        assert "longer than" in str(error)  # noqa: PT017 - success is as good


@pytest.mark.parametrize(
    ("change", "twice"),
    [
        (('"version": 1', '"version": 1, "version": 1'), "version"),
        (('"name": ', '"name": "other", "name": '), "name"),
        (('"name": ', '"n\\u0061me": "other", "name": '), "name"),
    ],
)
def test_a_name_that_occurs_twice_is_refused(change: tuple[str, str], twice: str) -> None:
    text = PLAN.to_json().replace(*change, 1)
    with pytest.raises(FileError, match=rf"plan.json: '{twice}' occurs twice in one object; leave"):
        Plan.from_json(text, source="plan.json")


def test_a_failing_write_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_text()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=full))
    said = f"plan.json: .*No space left on device: {len(PLAN.to_json())} bytes .*{tmp_path}"
    with pytest.raises(FileError, match=said):
        PLAN.save(path)
    monkeypatch.undo()
    assert path.read_text() == before
    assert names(tmp_path) == ["plan.json"]


def test_what_cannot_be_encoded_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["notes.txt"]


def test_a_folder_that_does_not_exist_or_is_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"deep/plan.json: cannot be written: No such file"):
        PLAN.save(tmp_path / "deep" / "plan.json")
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(FileError, match="cannot be written: Is a directory"):
        PLAN.save(tmp_path / "plan.json")
    assert names(tmp_path) == ["plan.json"]


def test_what_is_not_a_regular_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "plan.json")
    PLAN.save(link)
    assert link.is_symlink()
    assert Plan.load(tmp_path / "plan.json") == PLAN
    read, write = os.pipe()
    PLAN.save(f"/dev/fd/{write}")
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == PLAN.to_json()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # so that a mistake here replaces a link
    with pytest.raises(FileError, match="full: cannot be written: No space left on device"):
        PLAN.save(full)
    assert stat.S_ISCHR(full.stat().st_mode)


def test_a_disk_that_fills_up_half_way_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # acts as a full disk does
    try:
        with pytest.raises(FileError, match=r"plan.json: cannot be written: File too large"):
            PLAN.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Plan.load(path) == PLAN
    assert names(tmp_path) == ["plan.json"]
