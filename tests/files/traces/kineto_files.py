"""Synthetic profiler and execution traces of a job whose true costs are known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

COMPUTE_STREAM, SIDE_STREAM, MESSAGE_STREAM = 7, 9, 20
EVALUATE = "autograd::engine::evaluate_function: "
KINDS = ("op", "annotation", "call", "kernel", "copy", "external")
NAMES = {
    "2021": ("Operator", "Operator", "Runtime", "Kernel", "Memcpy", "external id"),
    "2026": ("cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "External id"),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Job:
    """A training job on a device, all times in microseconds, and the trace of one rank of it.

    Each step reads a batch, copies it (the host waits), launches a kernel for each layer forward
    and backward, sends a message for every two layers, launches an update for each layer and
    reads the loss (the host waits).
    """

    schema: Literal["2021", "2026"] = "2026"
    steps: int = 3
    layers: int = 4
    load_us: int = 500
    copy_us: int = 40
    host_us: int = 50  # launching one kernel, without the call itself, which takes 5
    kernel_us: int = 30
    message_us: int = 200
    late_us: int = 0  # how much longer messages last on this rank because it waits for another
    late_step: int | None = None  # the only step in which they do
    peers_us: int = 0
    """A point-to-point exchange after the forward pass, which the device waits for."""
    side_us: int = 0
    """A kernel on another stream, beside the forward pass, which the backward pass waits for."""
    idle_us: int = 0
    """How long the device idles before each forward kernel, for a reason that is not recorded."""
    ahead: bool = False  # the host never waits for the device
    generic: bool = False  # all collectives run the same kernel, as on ROCm
    elements: int = 1000  # of each layer's gradient
    undefined: tuple[int, ...] = ()  # layers whose gradient is accumulated without a tensor
    pid: int = 1
    shapes: bool = True
    sizes: bool = True
    messages: bool = True
    item: bool = True
    rank: int | None = 0
    workers: int | None = 2
    begin_us: float = 1_700_000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = dict(zip(KINDS, NAMES[self.schema], strict=True))
        self.host = self.begin_us
        self.stream = {COMPUTE_STREAM: 0.0, SIDE_STREAM: 0.0, MESSAGE_STREAM: 0.0}
        self.correlation = 0
        for step in range(self.steps):
            self._step(step)

    def trace(self) -> dict[str, Any]:
        """Return the trace as the profiler writes it."""
        whole: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}]}
        if self.schema == "2026":
            info = {"backend": "nccl", "rank": self.rank, "world_size": self.workers}
            whole["distributedInfo"] = {k: v for k, v in info.items() if v is not None}
            whole |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": 1_700_000_000_000_000_000}
        whole["traceEvents"] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}},
            *self.events,
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0},
        ]
        return whole

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.trace()))
        return path

    # One step

    def _step(self, number: int) -> None:
        self.number = number
        step = self._add("annotation", f"ProfilerStep#{number + 3}", self.host, 0)
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self._add("annotation", loader, self.host, self.load_us)
        self.host += self.load_us
        if not self.ahead:
            self._blocking_copy("HtoD", self.copy_us)
        if self.side_us:
            self._launch("kernel beside", SIDE_STREAM, self.side_us)
        for layer in range(self.layers):
            self._op(f"aten::layer{layer}", sequence=10 * number + layer)
        if self.peers_us:  # it sends what was computed
            name = "ncclDevKernel_SendRecv"
            self._launch(name, MESSAGE_STREAM, self.peers_us, after=[COMPUTE_STREAM])
        if self.side_us or self.peers_us:
            self.stream[COMPUTE_STREAM] = max(self.stream.values())
        for layer in reversed(range(self.layers)):
            self._backward(number, layer)
        start = self.host
        if self.messages:
            self.stream[COMPUTE_STREAM] = max(self.stream.values())
        for _ in range(self.layers):
            self._op("aten::add_")
        self._add("annotation", "Optimizer.step#SGD.step", start, self.host - start)
        if self.item and not self.ahead:
            self._blocking_copy("DtoH", 1)
        step["dur"] = self.host - step["ts"]
        self.step_us.append(step["dur"])

    def _backward(self, step: int, layer: int) -> None:
        self._op("LayerBackward0", sequence=10 * step + layer, thread=2)
        accumulating = self.host
        if self.messages and layer % 2 == 0:
            self._message(2)
        sized: dict[str, Any] = {"Record function id": 1000 * step + layer}
        if self.shapes and layer in self.undefined:
            sized |= {"Input Dims": [[]], "Input type": [""]}
        elif self.shapes:
            sized |= {"Input Dims": [[self.elements]], "Input type": ["float"]}
        name = "torch::autograd::AccumulateGrad"
        self._add("op", name, accumulating, 1, 2, sized)
        self.host = max(self.host, accumulating + 2)
        if self.schema == "2026":
            self._add("op", EVALUATE + name, accumulating, self.host - accumulating, 2)

    def _message(self, layers: int) -> None:
        start = self.host
        is_late = self.late_step is None or self.number == self.late_step
        sized: dict[str, Any] = {}
        if self.sizes:
            elements = layers * self.elements
            sized = {"Collective name": "allreduce", "In msg nelems": elements}
            sized |= {"dtype": "Float", "Group size": 2}
        name = "Generic(ncclDevKernelArgsStorage<4096ul>)" if self.generic else "AllReduce_Sum"
        lasting = self.message_us + self.late_us * is_late
        kernel = (f"ncclDevKernel_{name}", MESSAGE_STREAM, lasting)
        self._launch(*kernel, after=self.stream, thread=2, args=sized)
        if self.sizes and self.schema == "2026":
            self._add("op", "record_param_comms", start + 2, self.host - start - 2, 2, sized)

    def _op(self, name: str, *, sequence: int | None = None, thread: int = 1) -> None:
        start = self.host
        kernel = (f"kernel of {name}", COMPUTE_STREAM, self.kernel_us)
        idle_us = self.idle_us if name.startswith("aten::layer") else 0
        self._launch(*kernel, host_us=self.host_us, idle_us=idle_us, thread=thread)
        numbered = {} if sequence is None else {"Sequence number": sequence}
        self._add("op", name, start, self.host - start, thread, numbered)
        if thread == 2 and self.schema == "2026":
            self._add("op", EVALUATE + name, start, self.host - start, thread, numbered)

    def _launch(
        self,
        name: str,
        stream: int,
        lasting: int,
        *,
        after: Iterable[int] = (),
        host_us: int = 3,
        idle_us: int = 0,
        thread: int = 1,
        args: Mapping[str, Any] = NOTHING,
        blocks: bool = False,
    ) -> None:
        """Launch what waits for its stream and those that it comes after; the host may wait too."""
        call = self.host + host_us
        launched = call + (4 if blocks else 5)
        begun = max(launched, *(self.stream[each] for each in (stream, *after))) + idle_us
        self.host = begun + lasting + 3 if blocks else launched
        self.stream[stream] = begun + lasting
        self.correlation += 1
        linked = {"correlation": self.correlation, self.names["external"]: self.correlation}
        called = "cudaMemcpyAsync" if blocks else "cudaLaunchKernel"
        self._add("call", called, call, self.host - call, thread, linked)
        kind = "copy" if blocks else "kernel"
        event = self._add(kind, name, begun, lasting, stream, {**linked, **args})
        event |= {"pid": 0, "tid": f"stream {stream}" if self.schema == "2021" else stream}

    def _blocking_copy(self, direction: str, lasting: int) -> None:
        self._launch(f"Memcpy {direction}", COMPUTE_STREAM, lasting, host_us=0, blocks=True)

    def _add(
        self,
        kind: str,
        name: str,
        start: float,
        lasting: float,
        thread: int = 1,
        args: Mapping[str, Any] = NOTHING,
    ) -> dict[str, Any]:
        event = {"ph": "X", "cat": self.names[kind], "name": name, "pid": self.pid}
        event |= {"tid": str(thread) if self.schema == "2021" else thread}
        event |= {"ts": start, "dur": lasting, "args": dict(args)}
        self.events.append(event)
        return event


def execution_trace(
    *,
    schema: str = "1.1.1-chakra.0.0.4",
    iterations: int = 3,
    layers: int = 4,
    elements: int = 1000,
    workers: int | None = 2,
    first_record: int = 0,
    undefined: tuple[int, ...] = (),
    pid: int = 1,
) -> dict[str, Any]:
    """Return the execution trace of the same job."""
    nodes: list[dict[str, Any]] = []

    def add(name: str, shapes: Any, types: list[str], record: int, **attributes: Any) -> None:
        values = {"rf_id": record + first_record, **attributes}
        node: dict[str, Any] = {"id": len(nodes) + 1, "name": name}
        if schema.startswith("1.0") and "chakra" not in schema:
            node |= {"input_shapes": shapes, "input_types": types, **values}
        else:
            listed = [{"name": k, "type": "uint64", "value": v} for k, v in values.items()]
            node |= {"inputs": {"values": [], "shapes": shapes, "types": types}, "attrs": listed}
        nodes.append(node)

    group = {} if workers is None else {"pg_size": workers}
    for iteration in range(iterations):
        for layer in reversed(range(layers)):
            record = 1000 * iteration + layer
            shape, kind = [elements], "Tensor(float)"
            if layer in undefined:
                shape, kind = [], "Tensor(nullptr (uninitialized))"
            add("torch::autograd::AccumulateGrad", [shape], [kind], record)
            if layer % 2 == 0:
                bucket = [[[2 * elements]]], ["GenericList[Tensor(float)]"]
                add("c10d::allreduce_", *bucket, record + 500)
                add("record_param_comms", *bucket, record + 501, **group)
        add("Optimizer.step#SGD.step", [], [], 1000 * iteration + 900)
    return {"schema": schema, "pid": pid, "nodes": nodes}


def gloo_job(*, wait_us: int = 300, call_us: int = 20) -> tuple[dict[str, Any], int]:
    """Return the trace of a job on the CPU, and a step's microseconds.

    Each step waits for other workers in an all-to-all, computes two layers of 300 us forward and
    backward, launches a message of 250 us after each, by a call that returns after ``call_us``,
    waits for them, unpacks them, each in 10 us, and updates in 50 us.
    """
    events: list[dict[str, Any]] = []
    now = 1000

    def span(name: str, start: int, lasting: int, tid: int, **args: Any) -> int:
        annotation = "Step#" in name or "Optimizer" in name
        event = {"ph": "X", "cat": "user_annotation" if annotation else "cpu_op", "name": name}
        event |= {"pid": 7, "tid": tid, "ts": start, "dur": lasting, "args": args}
        events.append(event)
        return start + lasting

    sized = {"Input Dims": [[500]], "Input type": ["float"]}
    lasted = 0
    for step in range(3):
        begun = now
        launched = span("c10d::alltoall_", now, 20, 1)
        now = span("gloo:all_to_all", launched - 10, wait_us, 9)
        for layer in range(2):
            now = span("aten::linear", now, 300, 1, **{"Sequence number": 2 * step + layer})
        free = 0
        for layer in (1, 0):
            now = span("LinearBackward0", now, 300, 2, **{"Sequence number": 2 * step + layer})
            now = span("torch::autograd::AccumulateGrad", now, 5, 2, **sized)
            free = span("gloo:all_reduce", max(free, now + 10), 250, 9, **sized)
            now = span("c10d::allreduce_", now, call_us, 2, **sized)
        now = max(now, free)
        for _ in range(2):
            now = span("torch.distributed.ddp.reducer::copy_bucket_to_grad", now, 10, 2)
        updated = span("aten::add_", now, 50, 1)
        now = span("Optimizer.step#SGD.step", now, updated - now, 1)
        lasted = now - begun
        span(f"ProfilerStep#{step}", begun, lasted, 1)
    info = {"backend": "gloo", "rank": 0, "world_size": 2}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}, lasted
