"""Small profiler and execution traces in the form that PyTorch writes, for fuzzing."""

from __future__ import annotations

import json
from typing import Any

PARAMETERS: tuple[tuple[int, ...], ...] = ((8, 3, 3, 3), (8,), (10, 8))
"""Shapes, in the order in which the gradients become ready reversed."""


class _Events:
    """Events of one rank, on a clock that moves on with each."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now_us = 1000.0
        self._correlation = 0

    def span(
        self, category: str, name: str, start: float, stop: float, tid: int | str, **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 7,
                "tid": tid,
                "ts": start,
                "dur": round(stop - start, 3),
                "args": args,
            }
        )

    def launched(self, name: str, kernel: str, took: float, tid: int, **args: Any) -> None:
        """Add an operator that launches a kernel."""
        self._correlation += 1
        start = self.now_us
        self.span("cpu_op", name, start, start + 20, tid, **args)
        self.span(
            "cuda_runtime",
            "cudaLaunchKernel",
            start + 5,
            start + 9,
            tid,
            correlation=self._correlation,
        )
        stream = "stream 20" if "nccl" in kernel else "stream 7"
        self.span(
            "kernel", kernel, start + 12, start + 12 + took, stream, correlation=self._correlation
        )
        self.now_us += max(21.0, took)

    def step(self, number: int, *, device: bool) -> None:
        began = self.now_us
        loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.span("user_annotation", loading, began + 1, began + 90, 1)
        self.now_us += 100
        for shape in PARAMETERS[::2]:
            self.launched(
                "aten::conv2d", "conv_kernel<float>", 50, 1, **{"Input Dims": [list(shape)]}
            )
        for index, shape in enumerate(reversed(PARAMETERS)):
            evaluate = "autograd::engine::evaluate_function: "
            start = self.now_us
            self.launched("ConvolutionBackward0", "wgrad<float>", 90, 2)
            accumulate = "torch::autograd::AccumulateGrad"
            sized = {"Input Dims": [list(shape)], "Input type": ["float"]}
            self.span("cpu_op", accumulate, self.now_us, self.now_us + 5, 2, **sized)
            self.now_us += 6
            if index:
                self._message((88, 216)[index - 1], device=device)
            self.span("cpu_op", evaluate + accumulate, start, self.now_us, 2)
            self.now_us += 4
        self.launched("aten::_foreach_add_", "multi_tensor_apply_kernel", 40, 1)
        self.span("user_annotation", "Optimizer.step#SGD.step", self.now_us - 45, self.now_us, 1)
        self.now_us += 60
        self.span("user_annotation", f"ProfilerStep#{number}", began, self.now_us, 1)

    def _message(self, elements: int, *, device: bool) -> None:
        payload = {
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": 2,
            "dtype": "Float",
        }
        start = self.now_us
        if not device:
            sized = {"Input Dims": [[elements]], "Input type": ["float"]}
            self.span("cpu_op", "gloo:all_reduce", start, start + 80, 9, **sized)
            self.now_us += 5
            return
        self._correlation += 1
        self.span("cpu_op", "record_param_comms", start, start + 20, 2, **payload)
        self.span("cuda_runtime", "cudaLaunchKernel", start + 4, start + 8, 2,
                  correlation=self._correlation)  # fmt: skip
        self.span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", start + 10, start + 90,
                  "stream 20", correlation=self._correlation, **payload)  # fmt: skip
        self.now_us += 21


def kineto(*, device: bool = True, steps: int = 2) -> bytes:
    """Return a profiler trace of a data-parallel training with three gradients and two messages."""
    events = _Events()
    for number in range(3, 3 + steps):
        events.step(number, device=device)
    if not device:
        events.events = [e for e in events.events if e["cat"] not in ("kernel", "cuda_runtime")]
    return json.dumps(
        {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "A GPU"}] if device else [],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
            "traceEvents": events.events,
        }
    ).encode()


def kineto_array() -> bytes:
    """Return the events alone, as the first releases wrote them."""
    return json.dumps(json.loads(kineto(steps=1))["traceEvents"]).encode()


def execution_trace() -> bytes:
    """Return an execution trace with three gradients and two messages an iteration."""
    nodes: list[dict[str, Any]] = []

    def node(name: str, shapes: list[Any], types: list[str], **attributes: Any) -> None:
        listed = {"rf_id": len(nodes) + 1, "tid": 2, **attributes}
        nodes.append(
            {
                "id": len(nodes) + 2,
                "name": name,
                "ctrl_deps": 1,
                "inputs": {"values": [[1, 2, 0]], "shapes": shapes, "types": types},
                "outputs": {"values": [], "shapes": [], "types": []},
                "attrs": [{"name": k, "type": "uint64", "value": v} for k, v in listed.items()],
            }
        )

    node("[pytorch|profiler|execution_trace|thread]", [], [])
    for shape in reversed(PARAMETERS):
        node("torch::autograd::AccumulateGrad", [list(shape)], ["Tensor(float)"])
    for elements in (88, 216):
        bucket = [[[elements]]], ["GenericList[Tensor(float)]"]
        node("c10d::allreduce_", *bucket, pg_size=2)
        node("record_param_comms", *bucket, pg_size=2)
    node("Optimizer.step#SGD.step", [], [])
    return json.dumps(
        {"schema": "1.1.0-chakra.0.0.4", "pid": 1, "start_ts": 4, "nodes": nodes, "finish_ts": 9}
    ).encode()
