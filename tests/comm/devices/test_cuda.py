"""``CudaDevice``: what can be said without a GPU, and, where there is one, processes that share it.

Processes may share one GPU, so one is enough for everything but copies between two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from syncline.comm.devices import CudaDevice, cuda
from syncline.comm.devices.control import decoded
from syncline.errors import PeerError, UserError
from tests.comm.devices import jobs
from tests.streams import recorded_streams
from tests.workers import WorkerPool

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_a_gpu = pytest.mark.skipif(
    GPUS == 0, reason=f"no GPU here (torch {torch.__version__}): nothing is run on CUDA"
)
needs_no_gpu = pytest.mark.skipif(GPUS > 0, reason="says what is said where there is no GPU")

SENT = {
    "storage_handle": b"\0handle\xff",
    "storage_size_bytes": 64,
    "storage_offset_bytes": 512,
    "ref_counter_handle": b"counter",
    "ref_counter_offset": 3,
    "event_handle": b"event",
    "event_sync_required": True,
    "tensor_offset": 0,
}
MEMORY = cuda.MemoryHandle(gpu="gpu-1", size_bytes=64, **SENT)
WRONG = {"storage_handle": 7, "size_bytes": "64", "event_sync_required": 1, "gpu": None, "new": 0}


@needs_no_gpu
def test_no_gpu_is_said() -> None:
    with pytest.raises(
        UserError, match=r"cuda:0 cannot be used: torch .* finds no GPU here; check"
    ):
        CudaDevice(0)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UserError, match="expected a CUDA device such as 'cuda:0', found 'cpu'"):
        CudaDevice("cpu")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """The second of two GPUs that are not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    return CudaDevice("cuda:1")


@pytest.mark.usefixtures("pretended")
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="expected one of 2 GPUs, found cuda:2"):
        CudaDevice(2)


@pytest.mark.usefixtures("pretended")
def test_torch_rebuilds_memory_from_the_fields_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters) == cuda.FIELDS
    assert {"tensor_size", "storage_device", *cuda.TAKEN_OVER, *cuda.FIXED} == set(cuda.FIELDS)
    monkeypatch.setattr(cuda, "rebuild_cuda_tensor", lambda novel: novel)
    with pytest.raises(UserError, match=r"by other fields than Syncline expects .*novel"):
        CudaDevice(0)
    monkeypatch.setattr(cuda, "rebuild_cuda_tensor", lambda *args, **kwargs: (args, kwargs))
    CudaDevice(0)  # torch's own, as far as can be seen: a tracer wraps it


@pytest.mark.parametrize(("field", "value"), WRONG.items())
def test_a_handle_of_another_form_is_refused(field: str, value: object) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(MEMORY)) | {field: value}
    with pytest.raises(PeerError, match="sent no valid MemoryHandle"):
        decoded(msgspec.json.encode(fields), cuda.MemoryHandle)


def test_a_gpu_that_this_process_does_not_see(pretended: CudaDevice) -> None:
    handle = msgspec.json.encode(msgspec.structs.replace(MEMORY, gpu="gpu-7"))
    with pytest.raises(UserError, match=r"gpu-7 .* which sees gpu-0, gpu-1; let all ranks see"):
        pretended.open(handle)


def test_memory_is_rebuilt(pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SENT | {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([64]),
        "tensor_stride": (1,),
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 1,
        "requires_grad": False,
    }
    rebuilt = []

    @wraps(rebuild_cuda_tensor)
    def rebuild(**values: object) -> None:
        rebuilt.append(values)

    in_order = tuple(said[name] for name in inspect.signature(rebuild_cuda_tensor).parameters)
    monkeypatch.setattr(cuda, "reduce_tensor", lambda _: (rebuild, in_order))
    monkeypatch.setattr(cuda, "rebuild_cuda_tensor", rebuild)
    pretended.open(pretended.share(torch.zeros(64, dtype=torch.uint8)))
    assert rebuilt == [said]


def test_what_cuda_refuses_is_said(pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: operation not supported")
    monkeypatch.setattr(cuda, "reduce_tensor", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r"cuda:1: memory cannot be .*: CUDA error: .*; CUDA IPC"):
        pretended.share(torch.zeros(64, dtype=torch.uint8))


def test_events_order_streams(pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """On recorded streams, and with memory that the current stream has used before."""
    pretended.device = torch.device("cpu")
    with recorded_streams() as recorder:
        here = pretended.current_stream()
        copying, reducing = pretended.stream(), pretended.stream()
        source = torch.full((4,), 3.0)
        monkeypatch.setattr(torch, "empty", torch.zeros)
        memory = pretended.allocate(16, [copying, reducing]).view(torch.float32)
        result = torch.full((4,), 5.0)
        given, copied, reduced = (torch.cuda.Event() for _ in range(3))
        given.record(here)
        reducing.wait_event(given)
        pretended.copy(copying, source, memory)
        copied.record(copying)
        reducing.wait_event(copied)
        pretended.combine(reducing, "sum", memory, result)
        pretended.divide(reducing, result, 2)
        reduced.record(reducing)
        here.wait_event(reduced)
        assert result.tolist() == [4.0] * 4
        pretended.copy(copying, source, memory)
        del memory  # while a stream uses it
    assert recorder.races == []


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        *((jobs.results, ranks) for ranks in (1, 2, 3, 4)),
        *((job, 3) for job in (jobs.bits, jobs.busy_streams, jobs.leaves)),
        (jobs.on_the_cpu, 2),
    ],
)
def test_gpus(workers: WorkerPool, tmp_path: Path, job: Callable[..., None], ranks: int) -> None:
    workers.run(job, ranks, str(tmp_path), "cuda")
