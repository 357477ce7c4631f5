from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import FileError, UserError
from syncline.files.traces.execution_trace import ExecutionTrace, read_execution_trace
from tests.files.traces.kineto_files import execution_trace
from tests.files.traces.seeds import written

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "et"


def read(tmp_path: Path, whole: Any) -> ExecutionTrace:
    return read_execution_trace(written(tmp_path, whole, "et.json"))


@pytest.mark.parametrize(
    "schema",
    ["1.0.0", "1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4",
     "1.1.1-chakra.0.0.4"],
)  # fmt: skip
def test_gradients_and_messages_of_all_schemas(tmp_path: Path, schema: str) -> None:
    trace = read(tmp_path, execution_trace(schema=schema))
    assert trace.workers == 2
    assert len(trace.iterations) == 3
    last = trace.iterations[-1]
    assert [(g.elements, g.dtype) for g in last.gradients] == [(1000, "float32")] * 4
    assert [m.elements for m in last.messages] == [2000] * 2
    assert "no durations" in trace.notes[0]
    found = trace.trace()
    assert found.profile is None
    assert found.plan == trace.plan()
    assert found.plan.message_bytes() == (8000, 8000)


def test_a_gradient_without_a_tensor_takes_the_rest_of_its_message(tmp_path: Path) -> None:
    plan = read(tmp_path, execution_trace(undefined=(1,))).plan()
    assert [t.elements for t in plan.tensors] == [1000] * 4
    assert plan.message_bytes() == (8000, 8000)


def test_messages_outside_of_the_backward_pass_hold_no_gradients(tmp_path: Path) -> None:
    whole = execution_trace(iterations=1)
    nodes = whole["nodes"]
    average = copy.deepcopy(next(n for n in nodes if n["name"] == "c10d::allreduce_"))
    begin = {"id": 0, "name": "autograd::engine::evaluate_function: AddmmBackward0", "attrs": []}
    whole["nodes"] = [{**average, "id": -1}, begin, *nodes, {**average, "id": 99}]
    trace = read(tmp_path, whole)
    assert [len(i.messages) for i in trace.iterations] == [2]
    assert trace.plan().message_bytes() == (8000, 8000)


def test_without_worker_count(tmp_path: Path) -> None:
    trace = read(tmp_path, execution_trace(workers=None))
    assert (trace.workers, trace.trace().plan) == (None, None)
    assert trace.notes[-1] == "the trace does not say how many workers there were"


def test_the_worker_count_is_that_of_the_process_group(tmp_path: Path) -> None:
    whole = execution_trace(workers=None)
    groups = json.dumps([{"pg_name": "0", "group_size": 8}, {"pg_name": "1", "group_size": 4}])
    made = {"id": 0, "name": "## process_group:init ##", "inputs": {"values": [groups]}}
    whole["nodes"].insert(0, made)
    assert read(tmp_path, whole).plan().workers == 8
    for broken in ("{", "[" * 100_000, "9" * 5_000):
        made["inputs"] = {"values": [broken]}
        with pytest.raises(FileError, match="process groups are not JSON"):
            read(tmp_path, whole)


def test_without_gradients(tmp_path: Path) -> None:
    nodes = [{"id": 1, "name": "aten::add", "attrs": []}]
    trace = read(tmp_path, {"schema": "1.1.1", "nodes": nodes})
    assert (trace.iterations, trace.plan()) == ((), None)
    assert "no gradients and no messages are in it" in trace.notes


def test_messages_that_are_not_made_of_the_gradients(tmp_path: Path) -> None:
    whole = execution_trace()
    whole["nodes"] = [
        n for n in whole["nodes"] if n["id"] != 1 and ("Accum" not in n["name"] or n["id"] <= 20)
    ]
    with pytest.raises(UserError, match="the messages hold"):
        read(tmp_path, whole).plan()


STEP = "Optimizer.step#SGD.step"


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({}, "no 'schema' in it"),
        ({"nodes": []}, "no 'schema' in it"),
        ({"schema": "2.0.0", "nodes": []}, "schema '2.0.0' of execution traces is not known"),
        ({"schema": 1, "nodes": []}, "schema 1 of execution traces is not known"),
        ({"schema": "1.1.1", "nodes": []}, "no nodes in it"),
        ({"schema": "1.1.1", "nodes": {}}, "'nodes': expected an array, found dict"),
        ({"schema": "1.1.1", "nodes": [1]}, r"nodes\[0\]: expected an object, found int"),
        ({"schema": "1.1.1", "nodes": [{}]}, r"nodes\[0\]: expected a text in 'name'"),
        (
            {"schema": "1.1.1", "nodes": [{"name": STEP, "id": "x"}]},
            rf"nodes\[0\] '{STEP}': expected a whole number in 'id', found 'x'",
        ),
    ],
    ids=str,
)
def test_what_is_no_execution_trace(tmp_path: Path, whole: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read(tmp_path, whole)


@pytest.mark.parametrize("shape", [[-1], ["x"], [1 << 70], [1 << 40, 1 << 40]])
def test_impossible_shapes_are_named(tmp_path: Path, shape: list[Any]) -> None:
    whole = execution_trace()
    whole["nodes"][0]["inputs"]["shapes"] = [shape]
    with pytest.raises(FileError, match=r"nodes\[0\] 'torch::autograd::AccumulateGrad': a tensor"):
        read(tmp_path, whole)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the project")
def test_the_shared_execution_trace() -> None:
    trace = read_execution_trace(SHARED / "pytorch_et_resnet50_ddp_rank1of2.json.gz")
    assert trace.workers == 2
    assert [(len(i.gradients), len(i.messages)) for i in trace.iterations] == [(161, 5)] * 3
    assert trace.plan().message_bytes() == (8196000, 31502336, 26255360, 26550272, 9724160)
