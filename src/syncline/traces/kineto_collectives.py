"""The exchange of gradients in a profiler trace: which messages, how large, when under way."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncline.model.dtypes import bytes_per_element
from syncline.model.limits import LARGEST_BYTES
from syncline.traces.kineto_events import Call, DeviceTask, HostOp
from syncline.traces.kineto_steps import Outline

__all__ = [
    "Collective",
    "element_dtype",
    "elements_of",
    "find_collectives",
    "is_gradient_kernel",
]

KERNEL = re.compile(r"(nccl|rccl|oneccl).*?(all_?reduce|reduce_?scatter)", re.IGNORECASE)
LAUNCHED_BY = re.compile(r"record_param_comms|(c10d::|nccl:)_?(all_?reduce|reduce_?scatter)")
ON_HOST = re.compile(r"(gloo|mpi|ucc):(all_?reduce|reduce_?scatter)")
LAUNCH_ON_HOST = re.compile(r"c10d::_?(all_?reduce|reduce_?scatter)")

LARGEST_ELEMENTS = LARGEST_BYTES >> 4
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "c10::half": "float16",
    "c10::bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "float16": "float16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}


class Collective(NamedTuple):
    """One exchange of gradients."""

    launch_ns: int
    """When the host had launched it."""
    start_ns: int
    stop_ns: int
    """On the device, or on the thread of the host that exchanges: includes waiting for peers."""
    elements: int | None
    dtype: str | None
    group_size: int | None
    record_id: int | None
    kernel: DeviceTask | None = None

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the message, where the trace tells its elements and their type."""
        if self.elements is None or self.dtype is None:
            return None
        return self.elements * bytes_per_element(self.dtype)


def element_dtype(name: str | None) -> str | None:
    """Return the gradient dtype that a trace calls ``name``; None if gradients have no such."""
    return DTYPES.get(name.lower()) if name else None


def elements_of(shapes: Sequence[Sequence[int]]) -> int | None:
    """Return the elements of tensors together; None for more than there can be."""
    elements = sum(math.prod(shape) for shape in shapes)
    return elements if elements <= LARGEST_ELEMENTS else None


def is_gradient_kernel(task: DeviceTask) -> bool:
    """Say whether a kernel sums gradients over workers, as far as its name and arguments tell."""
    if not KERNEL.search(task.name):
        return False
    return task.payload is None or element_dtype(task.payload.dtype) is not None


def find_collectives(
    step: Outline, launched: Mapping[int, Sequence[DeviceTask]]
) -> list[Collective]:
    """Return the messages of a step in the order in which they were launched.

    Those that were launched from the beginning of the backward pass until the optimizer's step.
    """
    if not math.isfinite(step.backward_ns):
        return []
    found: list[Collective] = []
    around = [op for op in (*step.ops, *step.others) if LAUNCHED_BY.match(op.name)]
    around.sort(key=lambda op: op.start_ns)
    seen: set[int] = set()
    for call in step.calls:
        if call.correlation is None or call.correlation in seen:
            continue
        seen.add(call.correlation)
        if step.backward_ns <= call.start_ns < step.optimizer_ns:
            kernels = filter(is_gradient_kernel, launched.get(call.correlation, ()))
            found.extend(filter(None, (_of_kernel(call, task, around) for task in kernels)))
    if not found and not launched:
        found = _on_host(step)
    return sorted(found, key=lambda c: c.launch_ns)


def _of_kernel(call: Call, task: DeviceTask, around: Sequence[HostOp]) -> Collective | None:
    """Return a message, or None if what it sums is no gradient."""
    index = bisect.bisect_right(around, call.start_ns, key=lambda op: op.start_ns)
    enclosing = [
        op
        for op in reversed(around[max(index - 8, 0) : index])
        if op.thread == call.thread and op.stop_ns >= call.stop_ns
    ]
    elements, dtype, group = _payload(task, enclosing)
    if dtype and not element_dtype(dtype):
        return None
    return Collective(
        launch_ns=call.stop_ns,
        start_ns=task.start_ns,
        stop_ns=task.stop_ns,
        elements=elements,
        dtype=element_dtype(dtype),
        group_size=group,
        record_id=enclosing[0].record_id if enclosing else None,
        kernel=task,
    )


def _payload(
    task: DeviceTask | None, enclosing: Sequence[HostOp]
) -> tuple[int | None, str | None, int | None]:
    """Return elements, type as the trace calls it, and group size.

    From the kernel, else from what launched it.
    """
    payloads = [task.payload if task else None, *(op.payload for op in enclosing)]
    for payload in payloads:
        if payload is not None:
            return payload.elements, payload.dtype, payload.group_size
    for op in enclosing:
        if op.shapes:
            elements = elements_of([shape for shape in op.shapes if shape])
            return elements, next((t for t in op.types if t), None), None
    return None, None, None


def _on_host(step: Outline) -> list[Collective]:
    """Return messages that a thread of the host exchanges (Gloo): launches joined in order."""
    launches = [
        op
        for op in step.ops
        if LAUNCH_ON_HOST.match(op.name) and step.backward_ns <= op.start_ns < step.optimizer_ns
    ]
    spans = [
        op
        for op in sorted((*step.ops, *step.others), key=lambda op: op.start_ns)
        if ON_HOST.match(op.name) and op.start_ns >= step.backward_ns
    ]
    found = []
    for launch, span in zip(launches, spans, strict=False):
        elements, dtype, group = _payload(None, [span, launch])
        if dtype and not element_dtype(dtype):
            continue
        found.append(
            Collective(
                launch_ns=launch.stop_ns,
                start_ns=span.start_ns,
                stop_ns=span.stop_ns,
                elements=elements,
                dtype=element_dtype(dtype),
                group_size=group,
                record_id=launch.record_id,
            )
        )
    return found
