"""Small profiler and execution traces in the form that PyTorch writes, for fuzzing."""

from __future__ import annotations

import json

from tests.files.traces import kineto_files


def kineto(*, steps: int = 2) -> bytes:
    """Return a profiler trace of a data-parallel training with four gradients and two messages."""
    return json.dumps(kineto_files.Job(steps=steps).trace()).encode()


def kineto_of_host() -> bytes:
    trace, _ = kineto_files.gloo_job()
    return json.dumps(trace).encode()


def kineto_array() -> bytes:
    """Return the events alone, as the first releases wrote them."""
    return json.dumps(kineto_files.Job(schema="2021", steps=1).trace()["traceEvents"]).encode()


def execution_trace() -> bytes:
    return json.dumps(kineto_files.execution_trace(iterations=2)).encode()
