"""Ranges of the profiler around operations of the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled as profiling
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import record_function

from syncline.parallel.work import Work

__all__ = ["profiled", "profiling"]

OPERATORS = {
    "all_reduce": "allreduce_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "barrier": "barrier",
    "all_gather": "allgather_",
    "_all_gather_base": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_",
    "send": "send",
    "recv": "recv_",
}
"""Torch's own operators, which it calls only for backends that are written in C++, by the name
that backends give to what they do for them."""


def profiled(name: str, tensors: Sequence[Any], begin: Callable[[], Work]) -> Work:
    """Begin an operation under two ranges of the profiler that runs.

    They are as for Gloo: ``c10d::allreduce_`` is the call, with the sizes of its tensors, and
    ``syncline:all_reduce`` lasts until the results are in place.
    """
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    with _RecordFunctionFast(f"c10d::{OPERATORS[name]}", given):
        until_done = record_function(f"syncline:{name}")
        until_done.__enter__()
        work = begin()
        until_done._call_end_callbacks_on_future(work.get_future())
    return work
