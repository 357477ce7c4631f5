"""What was in force at the step is in force at the deferred update."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from syncline.train.overlap.deferred_step import TorchState


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ones else result


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


PLAIN = TorchState.now("cpu")


def test_gradients_and_inference() -> None:
    for switch in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with switch:
            inside = TorchState.now("cpu")
            with PLAIN.restored():
                assert TorchState.now("cpu") == PLAIN
                assert not torch.ones(1).is_inference()
            assert TorchState.now("cpu") == inside
    with torch.no_grad():
        stepped = TorchState.now("cpu")
    with stepped.restored():
        assert not torch.is_grad_enabled()


def test_autocast_both_ways() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stepped = TorchState.now("cpu")
        with PLAIN.restored():
            assert (a @ b).dtype is torch.float32
        assert (a @ b).dtype is torch.bfloat16
    with stepped.restored():
        assert (a @ b).dtype is torch.bfloat16


def test_function_modes_both_ways() -> None:
    with torch.device("meta"), Doubling():
        stepped = TorchState.now("cpu")
        with PLAIN.restored():
            assert torch.ones(1) == 1
        assert torch.ones(1).is_meta
        assert TorchState.now("cpu") == stepped
    with Doubling():
        doubling = TorchState.now("cpu")
    with doubling.restored():
        assert torch.ones(1) == 2
    assert torch.ones(1) == 1


def test_dispatch_modes_see_nothing() -> None:
    with Counting() as counting, FlopCounterMode(display=False) as flops:
        before = counting.calls
        with PLAIN.restored():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counting.calls == before
        assert flops.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert counting.calls > before


def test_transformations_do_not_see_changes() -> None:
    kept = torch.zeros(3)

    def changing(x: torch.Tensor) -> torch.Tensor:
        with PLAIN.restored():
            kept.add_(1)
        return (x * kept).sum()

    assert torch.equal(torch.func.grad(changing)(torch.ones(3)), torch.ones(3))
    assert torch.equal(torch.vmap(changing)(torch.ones(2, 3)), torch.full((2,), 6.0))
    assert torch.equal(kept, torch.full((3,), 2.0))


def test_modes_come_back_after_an_error() -> None:
    with Doubling(), torch.no_grad():
        inside = TorchState.now("cpu")
        with suppress(ArithmeticError), PLAIN.restored():
            raise ArithmeticError
        assert TorchState.now("cpu") == inside
