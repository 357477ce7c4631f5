"""Which memory a device has, and that work of a GPU is in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.train.sparse.memory import HostMemory, Tracked, future_on
from syncline.train.sparse.torch_memory import CudaMemory, TorchMemory, memory_of
from tests.streams import recorded_streams
from tests.train.sparse.test_memory import require_same

needs_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"no GPU here (torch {torch.__version__}): nothing is run on CUDA",
)


def test_the_host_is_done_when_it_answers() -> None:
    memory = memory_of(torch.device("cpu"))
    assert type(memory) is HostMemory
    with memory.after([memory.mark()]):
        pass
    future = future_on(memory.device)
    future.set_result(torch.ones(2))
    assert future.wait().tolist() == [1, 1]


@pytest.mark.parametrize("marked", [True, False])
def test_a_gpu_s_stream_waits_for_marks_and_the_host_for_the_stream(marked: bool) -> None:
    with recorded_streams() as recorder:
        memory = memory_of(torch.device("cuda:1"))
        assert type(memory) is CudaMemory
        gradient = torch.zeros(4).add_(1)  # by the backward pass
        mark = memory.mark()
        with memory.after([mark] if marked else []):
            gradient.mul_(2)
        assert gradient.tolist() == [2] * 4
    assert bool(recorder.races) != marked


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
    generator = np.random.default_rng(elements)
    rows = [generator.standard_normal(elements, np.float32).round(2) for _ in range(3)]
    require_same(TorchMemory("cuda"), [[rows]], [max(1, elements // 1000)], 0.9)
