"""``CudaDevice``: what can be said without a GPU, and, where there is one, processes that share it.

Processes may share one GPU, so one is enough for everything but copies between two.
"""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

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

MEMORY = cuda.MemoryHandle(
    gpu="one",
    size_bytes=64,
    tensor_offset=0,
    storage_handle=b"\0handle\xff",
    storage_size_bytes=64,
    storage_offset_bytes=512,
    ref_counter_handle=b"counter",
    ref_counter_offset=3,
    event_handle=b"event",
    event_sync_required=True,
)

# ---------------------------------------------------------------------- without a GPU


@needs_no_gpu
def test_no_gpu_is_said() -> None:
    with pytest.raises(
        UserError, match=r"cuda:0 cannot be used: torch .* finds no GPU here; check"
    ):
        CudaDevice(0)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UserError, match="expected a CUDA device such as 'cuda:0', found 'cpu'"):
        CudaDevice("cpu")


def test_a_gpu_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="expected one of 2 GPUs, found cuda:2"):
        CudaDevice(2)


def test_this_torch_rebuilds_memory_from_the_fields_that_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda._require_known_torch()
    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters) == cuda.FIELDS
    assert {"tensor_size", "storage_device", *cuda.TAKEN_OVER, *cuda.FIXED} == set(cuda.FIELDS)
    monkeypatch.setattr(cuda, "rebuild_cuda_tensor", lambda novel: novel)
    with pytest.raises(UserError, match=r"by other fields than Syncline expects .*novel"):
        cuda._require_known_torch()
    monkeypatch.setattr(cuda, "rebuild_cuda_tensor", lambda *args, **kwargs: (args, kwargs))
    cuda._require_known_torch()  # torch's own, as far as can be seen: a tracer wraps it


def test_handles_come_back_as_they_were_sent() -> None:
    assert decoded(msgspec.json.encode(MEMORY), cuda.MemoryHandle) == MEMORY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("storage_handle", 7),
        ("size_bytes", "64"),
        ("event_sync_required", 1),
        ("gpu", None),
        ("strange", 0),
    ],
)
def test_a_handle_of_another_form_is_refused(field: str, value: object) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(MEMORY)) | {field: value}
    with pytest.raises(PeerError, match="sent no valid MemoryHandle"):
        decoded(msgspec.json.encode(fields), cuda.MemoryHandle)


def test_gpus_are_known_by_their_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    assert cuda._number_of("gpu-1") == 1
    with pytest.raises(UserError, match=r"gpu-7 .* which sees gpu-0, gpu-1; let all ranks see"):
        cuda._number_of("gpu-7")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """The second of two GPUs that are not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    return CudaDevice("cuda:1")


def test_memory_is_rebuilt_from_what_torch_says_of_it(
    pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([64]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 1,
        "storage_handle": b"\0handle\xff",
        "storage_size_bytes": 64,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 3,
        "event_handle": b"event",
        "event_sync_required": True,
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


def test_what_cuda_says_against_sharing_is_passed_on(
    pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(cuda, "reduce_tensor", refuse)
    with pytest.raises(UserError, match=r"cuda:1: memory cannot be .*: CUDA error: .*; CUDA IPC"):
        pretended.share(torch.zeros(64, dtype=torch.uint8))


def test_work_on_streams_is_ordered_by_events(
    pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_memory_is_for_streams_after_the_current_one(
    pretended: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.device = torch.device("cpu")
    monkeypatch.setattr(torch, "empty", torch.zeros)
    with recorded_streams() as recorder:
        stream = pretended.stream()
        memory = pretended.allocate(16, [stream])
        with torch.cuda.stream(stream):
            memory.fill_(1)
        del memory
    assert recorder.races == []


# ---------------------------------------------------------------------- on GPUs


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_are_right(workers: WorkerPool, tmp_path: Path, ranks: int) -> None:
    for wrong in workers.run(jobs.results, ranks, str(tmp_path), "cuda"):
        assert wrong == []


@pytest.mark.gpu
@needs_a_gpu
def test_all_ranks_have_the_same_bits(workers: WorkerPool, tmp_path: Path) -> None:
    first, *others = workers.run(jobs.bits, 3, str(tmp_path), "cuda")
    assert len(set(first)) == len(first)
    assert all(other == first for other in others)


@pytest.mark.gpu
@needs_a_gpu
def test_the_caller_stream_is_waited_for_and_waits(workers: WorkerPool, tmp_path: Path) -> None:
    for found in workers.run(jobs.busy_streams, 3, str(tmp_path)):
        assert found == [3.0 * number for number in range(10)]


@pytest.mark.gpu
@needs_a_gpu
def test_a_rank_that_leaves_is_heard_of(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(jobs.leaves_on_a_gpu, 3, str(tmp_path))
    assert found[1] == ("PeerError", "an error of rank 1")
    for rank in (0, 2):
        assert found[rank][0] == "PeerError"
        assert "rank 1" in found[rank][1]


@pytest.mark.gpu
@needs_a_gpu
def test_tensors_elsewhere_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    for kind, text in workers.run(jobs.on_the_cpu, 2, str(tmp_path)):
        assert kind == "UserError"
        assert "found one on cpu; move it there" in text
