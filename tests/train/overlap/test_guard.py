"""The guard: C++ code waits for pending tensors, and says so, or the reason why it does not."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline import torch_private
from syncline.train.overlap.guard import Guard
from syncline.train.overlap.pending import PendingParameter, finish, is_pending
from tests.train.overlap.overlap_blind_spots import BY_CPP
from tests.train.overlap.test_pending import Owner

READS = BY_CPP | {
    "torch.FloatTensor": torch.FloatTensor,
    "nn.Parameter": nn.Parameter,
    "_make_subclass": lambda t: torch.Tensor._make_subclass(torch.Tensor, t),
    "vmap": torch.vmap(lambda row: row * 1),
    "func.grad": torch.func.grad(lambda t: (t * t).sum() / 2),
    "TorchScript": lambda t: torch.jit.script(_product)(t, torch.ones(())),
}


def _product(t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return t * other


@pytest.fixture
def owner() -> Owner:
    return Owner(Guard())


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_cpp_code_waits(owner: Owner, kind: str, read: Callable[[Any], torch.Tensor]) -> None:
    tensor = getattr(owner, kind)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.tensor, nested and sparse tensors
        seen = read(tensor)
    assert torch.equal(seen.detach(), torch.ones(2, 3))
    assert owner.read == [0]
    assert type(tensor) is (nn.Parameter if kind == "parameter" else torch.Tensor)
    assert not any(name.startswith("_syncline") for name in tensor.__dict__)


def test_a_copy_of_one_deferred_again(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([lambda _: None])  # a step comes after this one
    monkeypatch.setattr("syncline.train.overlap.pending.finish", lambda t: next(waits, finish)(t))
    assert torch.equal(copy.deepcopy(owner.parameter()), torch.ones(2, 3))


def test_each_place_that_reads_is_said_once(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        torch.Tensor(owner.parameter())
    (said,) = caplog.messages
    assert f"{__file__}:" in said
    assert "reads a pending parameter in C++ (aten.alias.default)" in said


def test_a_graph_that_cpp_code_made_leads_to_the_parameter(owner: Owner) -> None:
    parameter = owner.parameter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_product)
    scripted(parameter, parameter).sum().backward()
    assert owner.read == [0]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((2, 3), 2.0))


def test_what_holds_the_stand_in_works_on_the_tensor(owner: Owner) -> None:
    other, gradient = nn.Parameter(torch.zeros(2, 3)), torch.zeros(2, 3)
    owner.suspend(gradient)
    other.grad = gradient
    finish([gradient])
    held = other.grad
    assert held is not None
    assert torch.equal(held + 1, torch.full((2, 3), 2.0))
    held.mul_(3)
    assert torch.equal(gradient, torch.full((2, 3), 3.0))


def test_hooks_wait(owner: Owner) -> None:
    parameter, calls = owner.parameter(), list[int]()
    parameter.register_hook(lambda _: calls.append(1))
    assert owner.read == [0]
    parameter.sum().backward()
    assert calls == [1]


def test_a_weak_reference_from_before_leaves_the_class_alone(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    reference = torch._C._WeakTensorRef(parameter)
    owner.suspend(parameter)
    assert type(parameter) is PendingParameter
    assert "C++ code does not wait" in caplog.text
    assert "weakref" in caplog.text
    assert torch.equal(parameter + 0, torch.ones(2, 3))
    assert not reference.expired()


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
def test_a_weak_reference_that_appears_meanwhile(
    owner: Owner, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = getattr(owner, kind)()
    reference = torch._C._WeakTensorRef(tensor)
    assert torch.equal(tensor + 0, torch.ones(2, 3))
    assert "keeps the stand-in" in caplog.text
    assert not is_pending(tensor)
    assert isinstance(tensor, nn.Parameter) == (kind == "parameter")

    # It works as any other, for Python and for C++, ...
    with torch.no_grad():
        assert tensor.add_(1) is tensor
        torch._foreach_mul_([tensor], 2)
    assert torch.equal(torch.Tensor(tensor.data), torch.full((2, 3), 4.0))
    assert torch.equal(torch.stack([tensor, tensor])[1], tensor)
    for copied in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert type(copied) is (nn.Parameter if kind == "parameter" else torch.Tensor)
        assert torch.equal(copied, tensor)
    if kind == "parameter":
        (tensor * tensor).sum().backward()
        assert torch.equal(tensor.grad, torch.full((2, 3), 8.0))

    # ... until it is pending again, when the reference has gone.
    del reference
    assert owner.guard is not None
    owner.guard.suspend(tensor, owner, 0)
    assert torch.equal(torch.Tensor(tensor), torch.full((2, 3), 5.0))
    assert type(tensor) is (nn.Parameter if kind == "parameter" else torch.Tensor)
    assert not any(name.startswith("_syncline") for name in tensor.__dict__)


def test_what_cannot_be_guarded(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    class Own(torch.Tensor):
        pass

    owner.suspend(torch.zeros(2, 3).as_subclass(Own))
    owner.suspend(torch.zeros(2, device="meta"))
    assert "it is a Own" in caplog.text
    assert "not tested for torch.strided tensors on meta" in caplog.text


def test_a_guarded_parameter_that_is_dropped_is_freed(owner: Owner) -> None:
    references = [weakref.ref(owner.parameter()), weakref.ref(owner.gradient())]
    owner.tensors.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_tensor_waits_before_it_has_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads it meanwhile would find one that nothing is known of."""
    waits: list[bool] = []
    swap = torch_private.swap_tensor_impl

    def noted(one: torch.Tensor, other: torch.Tensor) -> None:
        waits.append(is_pending(one))
        swap(one, other)

    monkeypatch.setattr(torch_private, "swap_tensor_impl", noted)
    Owner(Guard()).parameter()
    assert waits == [True]
