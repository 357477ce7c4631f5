from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import FileError
from syncline.files.traces import kineto_events
from syncline.files.traces.kineto import read_kineto
from syncline.files.traces.kineto_events import read_events
from tests.files.traces.kineto_files import Job
from tests.files.traces.seeds import written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ts": "12"}, r"expected a number of microseconds in 'ts', found '12'"),
        ({"ts": None}, r"expected a number of microseconds in 'ts', found None"),
        ({"ts": True}, r"expected a number of microseconds in 'ts', found True"),
        ({"ts": float("nan")}, r"in 'ts', found nan"),
        ({"dur": float("inf")}, r"in 'dur', found inf"),
        ({"dur": [[]]}, r"in 'dur', found a list"),
        ({"dur": None}, r"in 'dur', found None"),
        ({"dur": -3}, r"dur is negative \(-3 us\): the event ends before it starts"),
        ({"ts": 10**300}, r"further than 70369 s from the first event"),
        ({"dur": 1e18}, r"further than 70369 s from the first event"),
        ({"tid": [1]}, r"expected a number or a text in 'tid', found a list"),
    ],
)
def test_a_broken_event_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    job = Job(steps=1)
    next(event for event in job.events if event["cat"] == "kernel").update(change)
    path = str(written(tmp_path, job.trace()))
    with pytest.raises(FileError, match=message) as caught:
        read_events(path)
    assert str(caught.value).startswith(f"{path}: traceEvents[")
    assert "'kernel of aten::layer0'" in str(caught.value)


def test_events_that_are_not_needed_may_be_anything(tmp_path: Path) -> None:
    whole = Job().trace()
    expected = read_kineto(written(tmp_path, whole)).profile()
    whole["traceEvents"] += [
        {"ph": "X", "cat": "python_function", "name": 3, "ts": "x"},
        {"ph": "s", "cat": "ac2g", "ts": None},
        {"ph": "M"},
        {},
    ]
    assert read_kineto(written(tmp_path, whole)).profile() == expected


UNKNOWN = {"ph": "X", "cat": "blink", "name": "a", "ts": 0, "dur": 1}


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({}, "none of its 0 events"),
        ({"nodes": []}, r"no events in it .* found members 'nodes'; is this a profiler trace"),
        ({"traceEvents": 3}, "expected an array of events in 'traceEvents', found int"),
        ({"traceEvents": []}, "none of its 0 events"),
        ({"traceEvents": [3]}, r"traceEvents\[0\]: expected an object, found int"),
        (
            {"traceEvents": [UNKNOWN]},
            r"none of its 1 events is an operator.* \(categories with spans: 'blink'\)",
        ),
    ],
    ids=str,
)
def test_what_is_no_profiler_trace(tmp_path: Path, whole: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_events(str(written(tmp_path, whole)))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (3, "expected an object in 'distributedInfo'"),
        ({"rank": -1}, "rank must be a whole number from 0 to .*, found -1"),
        ({"rank": 2, "world_size": 2}, "rank must be a whole number from 0 to 1, found 2"),
        ({"rank": "0", "world_size": 2}, "found '0'"),
    ],
    ids=str,
)
def test_broken_information_on_the_job_is_refused(tmp_path: Path, info: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_events(str(written(tmp_path, {**Job().trace(), "distributedInfo": info})))


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ('"schemaVersion": 1', '"schemaVersion": 9', "schemaVersion 9 is not known here"),
        ('"correlation": 1,', "", "1 of 48 device tasks were launched by no recorded call"),
        ("_SingleProcess", "_MultiProcessing", "read by loader processes"),
    ],
)
def test_what_is_unusual_is_noted(tmp_path: Path, old: str, new: str, note: str) -> None:
    text = json.dumps(Job().trace())
    assert old in text
    assert any(note in n for n in read_kineto(written(tmp_path, text.replace(old, new))).notes)


@pytest.mark.parametrize("shift", [-7, 3, 200])
def test_overlapping_spans_do_no_harm(tmp_path: Path, shift: int) -> None:
    job = Job()
    for index, event in enumerate(job.events):
        if index % 5 == 0 and "ProfilerStep" not in event["name"]:
            event["ts"] += shift
    assert 0 < read_kineto(written(tmp_path, job.trace())).profile().computation_s < 1


def test_more_events_than_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path, Job(steps=1).trace(), "trace.json"))
    monkeypatch.setattr(kineto_events, "MOST_EVENTS", 10)
    with pytest.raises(FileError, match=r"trace.json: holds more than 10 operators, calls and dev"):
        read_events(path)
