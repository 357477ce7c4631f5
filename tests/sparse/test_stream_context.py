"""Where an exchange does its work: what it asks of the device in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from syncline.sparse.memory import HostMemory, Tracked
from syncline.sparse.stream_context import CudaStreamContext, StreamContext, stream_context_for
from syncline.sparse.torch_memory import TorchMemory
from syncline.sparse.vector import SparseVector
from tests.sparse.vectors import assert_same

needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"no GPU here (torch {torch.__version__}): nothing is run on CUDA",
)


def test_the_host_is_done_when_it_answers() -> None:
    context = stream_context_for(torch.device("cpu"))
    assert type(context) is StreamContext
    assert isinstance(context.memory, HostMemory)
    with context.after([context.mark()]):
        pass
    future = context.future()
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
    context = stream_context_for(torch.device("cuda:1"))
    assert isinstance(context, CudaStreamContext)
    assert isinstance(context.memory, TorchMemory)
    with context.after([context.mark(), context.mark()]):
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
    context = stream_context_for(device)
    gradient, residual = torch.zeros(100_000, device=device), torch.zeros(100_000, device=device)
    torch.cuda._sleep(200_000_000)  # the backward pass is busy with another gradient
    gradient[7] = -3.0
    mark = context.mark()
    with context.after([mark]):
        found = context.memory.take([[Tracked(residual, gradient)]], [5], momentum=0.0)
    assert isinstance(found, SparseVector)
    assert found.indices.tolist() == [7]
    assert found.values.tolist() == [-3.0]
    with context.after(()):
        context.memory.write([gradient], found)
    torch.cuda.default_stream(device).wait_event(context.mark())
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
