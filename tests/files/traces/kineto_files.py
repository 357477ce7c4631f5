"""Synthetic profiler and execution traces of a job whose true costs are known."""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from syncline.errors import UserError
from syncline.files.traces.kineto import read_kineto
from syncline.files.traces.kineto_profile import make_timeline

Schema = Literal["2021", "2026"]
COMPUTE_STREAM, SIDE_STREAM, MESSAGE_STREAM = 7, 9, 20
NAMES = {
    "2021": {
        "op": "Operator",
        "annotation": "Operator",
        "call": "Runtime",
        "kernel": "Kernel",
        "copy": "Memcpy",
        "external": "external id",
    },
    "2026": {
        "op": "cpu_op",
        "annotation": "user_annotation",
        "call": "cuda_runtime",
        "kernel": "kernel",
        "copy": "gpu_memcpy",
        "external": "External id",
    },
}


@dataclass
class Job:
    """A training job on a device, all times in microseconds, and the trace of one rank of it.

    Each step reads a batch, copies it (the host waits), launches a kernel for each layer forward
    and backward, sends a message for every two layers, launches an update for each layer and
    reads the loss (the host waits).
    """

    schema: Schema = "2026"
    steps: int = 3
    layers: int = 4
    load_us: int = 500
    copy_us: int = 40
    host_us: int = 50
    """Launching one kernel, without the call itself, which takes 5."""
    kernel_us: int = 30
    message_us: int = 200
    late_us: int = 0
    """How much longer messages last on this rank because it waits for another."""
    late_step: int | None = None
    """The only step in which they do."""
    peers_us: int = 0
    """A point-to-point exchange after the forward pass, which the device waits for."""
    side_us: int = 0
    """A kernel on another stream, beside the forward pass, which the backward pass waits for."""
    idle_us: int = 0
    """How long the device idles before each forward kernel, for a reason that is not recorded."""
    ahead: bool = False
    """The host never waits for the device."""
    generic: bool = False
    """All collectives run the same kernel, as on ROCm."""
    elements: int = 1000
    """Of each layer's gradient."""
    undefined: tuple[int, ...] = ()
    """Layers whose gradient is accumulated without a tensor."""
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
        self.names = NAMES[self.schema]
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
            whole["displayTimeUnit"] = "ms"
            whole["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
        whole["traceEvents"] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}},
            *self.events,
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0},
        ]
        return whole

    def write(self, path: Path) -> Path:
        """Write the trace, packed if the name ends in ``.gz``."""
        data = json.dumps(self.trace()).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    # One step

    def _step(self, number: int) -> None:
        self.number = number
        begin = self.host
        place = len(self.events)
        name = "_SingleProcessDataLoaderIter.__next__"
        self._annotation(f"enumerate(DataLoader)#{name}", self.host, self.load_us)
        self.host += self.load_us
        if not self.ahead:
            self._blocking_copy("HtoD", self.copy_us)
        if self.side_us:
            self._beside("kernel beside", self.side_us, SIDE_STREAM)
        for layer in range(self.layers):
            self._op(f"aten::layer{layer}", sequence=10 * number + layer)
        if self.peers_us:
            self._beside("ncclDevKernel_SendRecv", self.peers_us, MESSAGE_STREAM)
        if self.side_us or self.peers_us:
            self.stream[COMPUTE_STREAM] = max(self.stream.values())
        for layer in reversed(range(self.layers)):
            self._backward(number, layer)
        start = self.host
        if self.messages:
            self.stream[COMPUTE_STREAM] = max(self.stream.values())
        for _ in range(self.layers):
            self._op("aten::add_")
        self._annotation("Optimizer.step#SGD.step", start, self.host - start)
        if self.item and not self.ahead:
            self._blocking_copy("DtoH", 1)
        self.step_us.append(self.host - begin)
        self.events.insert(
            place, self._event("annotation", f"ProfilerStep#{number + 3}", begin, self.host - begin)
        )

    def _backward(self, step: int, layer: int) -> None:
        start = self.host
        sequence = 10 * step + layer
        self._op("LayerBackward0", sequence=sequence, thread=2, enclosing=True)
        accumulating = self.host
        last = layer % 2 == 0
        if self.messages and last:
            self._message(2)
        arguments: dict[str, Any] = {"Record function id": 1000 * step + layer}
        if self.shapes and layer in self.undefined:
            arguments |= {"Input Dims": [[]], "Input type": [""]}
        elif self.shapes:
            arguments |= {"Input Dims": [[self.elements]], "Input type": ["float"]}
        name = "torch::autograd::AccumulateGrad"
        self._event_to_list("op", name, accumulating, 1, thread=2, args=arguments)
        self.host = max(self.host, accumulating + 2)
        if self.schema == "2026":
            evaluate = f"autograd::engine::evaluate_function: {name}"
            self._event_to_list("op", evaluate, accumulating, self.host - accumulating, thread=2)
        assert self.host > start

    def _message(self, layers: int) -> None:
        call = self.host + 3
        self.host = call + 5
        ready = max(self.host, *self.stream.values())
        late = self.late_step is None or self.number == self.late_step
        lasting = self.message_us + self.late_us * late
        arguments: dict[str, Any] = {}
        if self.sizes:
            arguments = {
                "Collective name": "allreduce",
                "In msg nelems": layers * self.elements,
                "dtype": "Float",
                "Group size": 2,
            }
        name = "Generic(ncclDevKernelArgsStorage<4096ul>)" if self.generic else "AllReduce_Sum"
        self._launched(f"ncclDevKernel_{name}", call, ready, lasting, 2, arguments)
        self.stream[MESSAGE_STREAM] = ready + lasting

    def _beside(self, name: str, lasting: int, stream: int) -> None:
        call = self.host + 3
        self.host = call + 5
        begun = max(self.host, self.stream[stream])
        if stream == MESSAGE_STREAM:  # it sends what was computed
            begun = max(begun, self.stream[COMPUTE_STREAM])
        self._launched(name, call, begun, lasting, 1, {})
        self.stream[stream] = begun + lasting

    def _op(
        self,
        name: str,
        *,
        sequence: int | None = None,
        thread: int = 1,
        enclosing: bool = False,
    ) -> None:
        start = self.host
        call = start + self.host_us
        self.host = call + 5
        idle_us = self.idle_us if name.startswith("aten::layer") else 0
        begun = max(self.host, self.stream[COMPUTE_STREAM]) + idle_us
        self._launched(f"kernel of {name}", call, begun, self.kernel_us, thread, {})
        self.stream[COMPUTE_STREAM] = begun + self.kernel_us
        arguments = {} if sequence is None else {"Sequence number": sequence}
        duration = self.host - start
        self._event_to_list("op", name, start, duration, thread=thread, args=arguments)
        if enclosing and self.schema == "2026":
            evaluate = f"autograd::engine::evaluate_function: {name}"
            self._event_to_list("op", evaluate, start, duration, thread=thread, args=arguments)

    def _blocking_copy(self, direction: str, lasting: int) -> None:
        call = self.host
        begun = max(call + 4, self.stream[COMPUTE_STREAM])
        self.stream[COMPUTE_STREAM] = begun + lasting
        self.host = begun + lasting + 3
        self._launched(
            f"Memcpy {direction}",
            call,
            begun,
            lasting,
            1,
            {},
            kind="copy",
            called="cudaMemcpyAsync",
        )

    # Events

    def _launched(
        self,
        name: str,
        call: float,
        begun: float,
        lasting: float,
        thread: int,
        arguments: dict[str, Any],
        *,
        kind: str = "kernel",
        called: str = "cudaLaunchKernel",
    ) -> None:
        self.correlation += 1
        linked = {"correlation": self.correlation, self.names["external"]: self.correlation}
        self._event_to_list(
            "call", called, call, self.host - call, thread=thread, args=dict(linked)
        )
        stream = MESSAGE_STREAM if "nccl" in name else COMPUTE_STREAM
        if "beside" in name:
            stream = SIDE_STREAM
        event = self._event(kind, name, begun, lasting, thread=stream, args={**linked, **arguments})
        event["pid"] = 0
        if self.schema == "2021":
            event["tid"] = f"stream {stream}"
        self.events.append(event)

    def _annotation(self, name: str, start: float, lasting: float) -> None:
        self._event_to_list("annotation", name, start, lasting)

    def _event_to_list(self, *arguments: Any, **more: Any) -> None:
        self.events.append(self._event(*arguments, **more))

    def _event(
        self,
        kind: str,
        name: str,
        start: float,
        lasting: float,
        *,
        thread: int = 1,
        args: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": self.names[kind],
            "name": name,
            "pid": self.pid,
            "tid": str(thread) if self.schema == "2021" else thread,
            "ts": start,
            "dur": lasting,
            "args": args or {},
        }


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
                types = ["GenericList[Tensor(float)]"]
                add("c10d::allreduce_", [[[2 * elements]]], types, record + 500)
                add("record_param_comms", [[[2 * elements]]], types, record + 501, **group)
        add("Optimizer.step#SGD.step", [], [], 1000 * iteration + 900)
    return {"schema": schema, "pid": pid, "nodes": nodes}


def fuzz_target(data: bytes, folder: Path) -> bool:
    """Read bytes as a profiler trace and use all of it; False where that is refused.

    Anything but an error of ours is a bug of the reader.
    """
    path = folder / "input"
    path.write_bytes(data)
    try:
        trace = read_kineto(path)
        for step in trace.steps:
            assert make_timeline(step).iteration_ns >= 0
        profile = trace.profile()
        plan = trace.plan()
        assert plan is None or plan.elements == sum(g.elements for g in profile.gradients)
        assert profile.computation_s >= 0
        trace.trace()
    except UserError:
        return False
    with contextlib.suppress(UserError):  # messages of one size make no curve
        trace.trace().network()
    return True


def gloo_job(path: Path, *, wait_us: int, call_us: int, message_us: int = 250) -> tuple[Path, int]:
    """Write the trace of a job on the CPU, and return its path and a step's microseconds.

    Each step waits for other workers in an all-to-all, computes two layers of 300 us forward and
    backward, launches a message after each, by a call that returns after ``call_us``, waits for
    them, unpacks them, each in 10 us, and updates in 50 us.
    """
    events: list[dict[str, Any]] = []
    now = 1000

    def span(name: str, start: int, stop: int, tid: int, **args: Any) -> int:
        annotation = "Step#" in name or "Optimizer" in name
        event = {"ph": "X", "cat": "user_annotation" if annotation else "cpu_op", "name": name}
        event |= {"pid": 7, "tid": tid, "ts": start, "dur": stop - start, "args": args}
        events.append(event)
        return stop

    sized = {"Input Dims": [[500]], "Input type": ["float"]}
    lasted = 0
    for step in range(3):
        begun = now
        launched = span("c10d::alltoall_", now, now + 20, 1)
        now = span("gloo:all_to_all", launched - 10, launched - 10 + wait_us, 9)
        for layer in range(2):
            now = span("aten::linear", now, now + 300, 1, **{"Sequence number": 2 * step + layer})
        free = 0
        for layer in (1, 0):
            number = {"Sequence number": 2 * step + layer}
            now = span("LinearBackward0", now, now + 300, 2, **number)
            now = span("torch::autograd::AccumulateGrad", now, now + 5, 2, **sized)
            called = now
            now = span("c10d::allreduce_", now, now + call_us, 2, **sized)
            free = max(free, called + 10)
            free = span("gloo:all_reduce", free, free + message_us, 9, **sized)
        now = max(now, free)
        for _ in range(2):
            now = span("torch.distributed.ddp.reducer::copy_bucket_to_grad", now, now + 10, 2)
        updated = span("aten::add_", now, now + 50, 1)
        now = span("Optimizer.step#SGD.step", now, updated, 1)
        span(f"ProfilerStep#{step}", begun, now, 1)
        lasted = now - begun
    info = {"backend": "gloo", "rank": 0, "world_size": 2}
    whole = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
    path.write_text(json.dumps(whole))
    return path, lasted
