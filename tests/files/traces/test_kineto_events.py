from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import FileError
from syncline.files.traces import kineto_events
from syncline.files.traces.kineto import read_kineto
from syncline.files.traces.kineto_events import read_events
from tests import strategies as some
from tests.files.traces.kineto_files import Job, fuzz_target


def written(tmp_path: Path, whole: Any) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(whole))
    return path


def kernel(job: Job) -> dict[str, Any]:
    return next(event for event in job.events if event["cat"] == job.names["kernel"])


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    job = Job(steps=1)
    change(kernel(job))
    return job.trace()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(ts="12"), r"expected a number of microseconds in 'ts', found '12'"),
        (lambda e: e.update(ts=None), r"expected a number of microseconds in 'ts', found None"),
        (lambda e: e.update(ts=True), r"expected a number of microseconds in 'ts', found True"),
        (lambda e: e.update(ts=float("nan")), r"in 'ts', found nan"),
        (lambda e: e.update(dur=float("inf")), r"in 'dur', found inf"),
        (lambda e: e.update(dur=[[]]), r"in 'dur', found a list"),
        (lambda e: e.pop("dur"), r"in 'dur', found None"),
        (lambda e: e.update(dur=-3), r"dur is negative \(-3 us\): the event ends before it starts"),
        (lambda e: e.update(ts=10**300), r"further than 70369 s from the first event"),
        (lambda e: e.update(dur=1e18), r"further than 70369 s from the first event"),
        (lambda e: e.update(tid=[1]), r"expected a number or a text in 'tid', found a list"),
    ],
)
def test_a_broken_event_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = written(tmp_path, broken(change))
    with pytest.raises(FileError, match=message) as caught:
        read_events(str(path))
    assert str(caught.value).startswith(f"{path}: traceEvents[")
    assert "'kernel of aten::layer0'" in str(caught.value)


def test_events_that_are_not_needed_may_be_anything(tmp_path: Path) -> None:
    whole = Job().trace()
    whole["traceEvents"] += [
        {"ph": "X", "cat": "python_function", "name": 3, "ts": "x"},
        {"ph": "s", "cat": "ac2g", "ts": None},
        {"ph": "M"},
        {},
    ]
    assert (
        read_kineto(written(tmp_path, whole)).profile()
        == read_kineto(Job().write(tmp_path / "trace.json")).profile()
    )


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({}, "none of its 0 events"),
        ({"nodes": []}, r"no events in it .* found members 'nodes'; is this a profiler trace"),
        ({"traceEvents": 3}, "expected an array of events in 'traceEvents', found int"),
        ({"traceEvents": []}, "none of its 0 events"),
        ({"traceEvents": [3]}, r"traceEvents\[0\]: expected an object, found int"),
        (
            {"traceEvents": [{"ph": "X", "cat": "blink", "name": "a", "ts": 0, "dur": 1}]},
            r"none of its 1 events is an operator.* \(categories with spans: 'blink'\)",
        ),
        ({"distributedInfo": 3, **Job().trace()}, None),
        ({**Job().trace(), "distributedInfo": 3}, "expected an object in 'distributedInfo'"),
        (
            {**Job().trace(), "distributedInfo": {"rank": -1}},
            "rank must be a whole number from 0 to .*, found -1",
        ),
        (
            {**Job().trace(), "distributedInfo": {"rank": 2, "world_size": 2}},
            "rank must be a whole number from 0 to 1, found 2",
        ),
        (
            {**Job().trace(), "distributedInfo": {"rank": "0", "world_size": 2}},
            "found '0'",
        ),
    ],
)
def test_what_is_no_profiler_trace(tmp_path: Path, whole: Any, message: str | None) -> None:
    path = written(tmp_path, whole)
    if message is None:
        read_events(str(path))
        return
    with pytest.raises(FileError, match=message):
        read_events(str(path))


def test_an_unknown_schema_is_stated(tmp_path: Path) -> None:
    whole = Job().trace() | {"schemaVersion": 9}
    trace = read_kineto(written(tmp_path, whole))
    assert "schemaVersion 9 is not known here; read as version 1" in trace.notes


def test_device_tasks_without_a_launch_are_stated(tmp_path: Path) -> None:
    job = Job()
    kernel(job)["args"].pop("correlation")
    trace = read_kineto(job.write(tmp_path / "trace.json"))
    assert any("1 of " in n and "launched by no recorded call" in n for n in trace.notes)


def test_loader_processes_are_stated(tmp_path: Path) -> None:
    job = Job()
    for event in job.events:
        event["name"] = event["name"].replace("_SingleProcess", "_MultiProcessing")
    trace = read_kineto(job.write(tmp_path / "trace.json"))
    assert any("read by loader processes" in note for note in trace.notes)


@pytest.mark.parametrize("shift", [-7, 3, 200])
def test_overlapping_spans_do_no_harm(tmp_path: Path, shift: int) -> None:
    job = Job()
    for index, event in enumerate(job.events):
        if index % 5 == 0 and "ProfilerStep" not in event["name"]:
            event["ts"] += shift
    path = job.write(tmp_path / "trace.json")
    assert fuzz_target(path.read_bytes(), tmp_path) in (True, False)
    total_s = read_kineto(path).profile().computation_s
    assert 0 < total_s < 1


# --- mutations ---

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 1e18, -1e300, 1 << 70, "", "x", "Float", [], [[]], [[[1 << 40] * 9]], {}
)  # fmt: skip
KEYS = (
    "ts", "dur", "name", "cat", "tid", "ph", "args", "correlation", "Input Dims", "Input type",
    "Sequence number", "In msg nelems", "dtype", "Group size", "Record function id",
)  # fmt: skip
NAMES = (
    "ProfilerStep#3", "Optimizer.step#SGD.step", "torch::autograd::AccumulateGrad",
    "cudaStreamSynchronize", "Memcpy DtoH", "Memcpy HtoD", "nccl:all_reduce", "c10d::allreduce_",
    "gloo:all_reduce", "copy_bucket_to_grad", "enumerate(DataLoader)#x.__next__", "XBackward0",
    "ncclDevKernel_AllReduce_Sum", "ncclDevKernel_ReduceScatter",
)  # fmt: skip


def mutated(whole: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    events = whole["traceEvents"]
    for _ in range(generator.randint(1, 6)):
        if not events:
            break
        event = events[generator.randrange(len(events))]
        if not isinstance(event, dict):
            continue
        place = event if generator.random() < 0.6 else event.setdefault("args", {})
        action = generator.randrange(6)
        if not isinstance(place, dict):
            continue
        if action == 0:
            place[generator.choice(KEYS)] = generator.choice(VALUES)
        elif action == 1:
            event["name"] = generator.choice(NAMES)
        elif action == 2:
            events.remove(event)
        elif action == 3:
            events.insert(generator.randrange(len(events)), json.loads(json.dumps(event)))
        elif action == 4 and type(event.get("ts")) in (int, float):
            event["ts"] += generator.uniform(-2000, 2000)
        elif type(event.get("dur")) in (int, float):
            event["dur"] = generator.choice((0, event["dur"] * 10, event["dur"] / 3))
    if generator.random() < 0.1:
        whole[generator.choice(list(whole))] = generator.choice(VALUES)
    return whole


@some.many
@given(
    seed=st.integers(0, 1 << 32),
    schema=st.sampled_from(["2021", "2026"]),
    item=st.booleans(),
    messages=st.booleans(),
)
def test_mutated_traces_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int, schema: Any, item: bool, messages: bool
) -> None:
    whole = Job(schema=schema, steps=2, layers=3, item=item, messages=messages).trace()
    data = json.dumps(mutated(whole, random.Random(seed))).encode()
    fuzz_target(data, tmp_path_factory.getbasetemp())


@some.many
@given(data=st.data())
def test_mangled_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(Job(steps=1, layers=2).trace()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        if data.draw(st.booleans()):
            text[at] = data.draw(st.integers(0, 255))
        else:
            del text[at : at + data.draw(st.integers(1, 400))]
            text = text or bytearray(b"x")
    fuzz_target(bytes(text), tmp_path_factory.getbasetemp())


def test_more_events_than_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, Job(steps=1).trace())
    monkeypatch.setattr(kineto_events, "MOST_EVENTS", 10)
    with pytest.raises(FileError, match=r"trace.json: holds more than 10 operators, calls and dev"):
        read_events(str(path))
