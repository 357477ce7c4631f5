"""Which memory a device has, and what is asked of a GPU in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from syncline.train.sparse.memory import HostMemory, Tracked
from syncline.train.sparse.torch_memory import CudaMemory, TorchMemory, memory_of
from syncline.train.sparse.vector import SparseVector
from tests.train.sparse.vectors import assert_same

needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"no GPU here (torch {torch.__version__}): nothing is run on CUDA",
)


def test_the_host_is_done_when_it_answers() -> None:
    memory = memory_of(torch.device("cpu"))
    assert type(memory) is HostMemory
    with memory.after([memory.mark()]):
        pass
    future = memory.future()
    future.set_result(torch.ones(2))
    assert future.wait().tolist() == [1, 1]


def test_what_is_asked_of_a_gpu_and_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            asked.append(f"a stream on {device}")

        def wait_event(self, event: Event) -> None:
            asked.append(f"wait for {event.at}")

        def synchronize(self) -> None:
            asked.append("the host waits")

    class Event:
        at = ""

        def record(self, stream: str) -> None:
            self.at = stream

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        asked.append("its stream")
        yield
        asked.append("the stream before")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: f"the backward pass on {device}"
    )
    memory = memory_of(torch.device("cuda:1"))
    assert type(memory) is CudaMemory
    with memory.after([memory.mark(), memory.mark()]):
        asked.append("work")
    assert asked == [
        "a stream on cuda:1",
        "its stream",
        *["wait for the backward pass on cuda:1"] * 2,
        "work",
        "the host waits",
        "the stream before",
    ]


@pytest.mark.gpu
@needs_a_gpu
def test_work_on_a_gpu_comes_after_its_marks_and_before_what_follows() -> None:
    device = torch.device("cuda", 0)
    memory = memory_of(device)
    gradient, residual = torch.zeros(100_000, device=device), torch.zeros(100_000, device=device)
    torch.cuda._sleep(200_000_000)  # the backward pass is busy with another gradient
    gradient[7] = -3.0
    mark = memory.mark()
    with memory.after([mark]):
        found = memory.take([[Tracked(residual, gradient)]], [5], momentum=0.0)
    assert isinstance(found, SparseVector)
    assert found.indices.tolist() == [7]
    assert found.values.tolist() == [-3.0]
    with memory.after(()):
        memory.write([gradient], found)
    torch.cuda.default_stream(device).wait_event(memory.mark())
    assert float(gradient.sum()) == -3.0
    assert not bool(residual.any())


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("elements", [1, 1000, 1 << 20])
def test_a_gpu_takes_the_same_as_the_native_core(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    rows = [torch.randn(elements, generator=generator).round(decimals=2) for _ in range(3)]
    native, there = Tracked(*(row.clone() for row in rows)), Tracked(*(row.cuda() for row in rows))
    k = max(1, elements // 1000)
    expected = HostMemory().take([[native]], [k], momentum=0.9)
    found = TorchMemory().take([[there]], [k], momentum=0.9)
    assert isinstance(found, SparseVector)
    assert isinstance(expected, SparseVector)
    assert_same(found, expected)
    for ours, theirs in zip(there, native, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.cpu(), theirs)
