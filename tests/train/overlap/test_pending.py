"""Pending tensors: what waits for them, and what does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UserError
from syncline.train.overlap.deferred_step import TorchState
from syncline.train.overlap.guard import Guard, lift
from syncline.train.overlap.pending import (
    PendingGradient,
    PendingParameter,
    finish,
    finish_all,
    hand_over,
    index_of,
    is_pending,
    release,
    suspend,
)
from tests.train.overlap.overlap_reads import READS

PLAIN = TorchState.now("cpu")


class Owner:
    """Adds one to whatever is read, and keeps count."""

    trains_here = True

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard
        self.tensors: list[torch.Tensor] = []
        self.read: list[int] = []
        self.zeroed: list[int] = []

    def suspend(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.guard is None:
            suspend(tensor, self, len(self.tensors))
        else:
            self.guard.suspend(tensor, self, len(self.tensors))
        self.tensors.append(tensor)
        return tensor

    def parameter(self) -> nn.Parameter:
        parameter = self.suspend(nn.Parameter(torch.zeros(2, 3)))
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def gradient(self) -> torch.Tensor:
        return self.suspend(torch.zeros(2, 3))

    def read_parameters(self, indices: list[int]) -> None:
        found = list(dict.fromkeys(indices))  # a tensor may be given twice: torch.equal(t, t)
        self.read += found
        with PLAIN.restored(), torch.no_grad():
            for index in found:
                lift(self.tensors[index])
                release(self.tensors[index])
                self.tensors[index].add_(1)

    read_gradients = read_parameters

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        self.zeroed += map(index_of, gradients)


@pytest.fixture(params=[None, Guard], ids=["", "guard"])
def owner(request: pytest.FixtureRequest) -> Owner:
    return Owner(request.param and request.param())


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_waits_once(owner: Owner, kind: str, read: Callable[[Any], Any]) -> None:
    tensor = getattr(owner, kind)()
    read(tensor)
    assert owner.read == [0]
    assert type(tensor) is (nn.Parameter if kind == "parameter" else torch.Tensor)
    assert torch.equal(tensor.detach(), torch.ones(2, 3))
    assert not any(name.startswith("_syncline") for name in tensor.__dict__)


METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(0), t.numel(), t.dim(), len(t)),
    "dtype": lambda t: (t.dtype, t.device, t.layout, t.is_floating_point()),
    "strides": lambda t: (t.stride(), t.is_contiguous(), t.storage_offset()),
    "gradient": lambda t: (t.grad, t.grad_fn, t.is_leaf, t.requires_grad),
    "likeness": lambda t: (torch.zeros_like(t), torch.empty_like(t), t.new_zeros(3)),
    "identity": lambda t: (hash(t), t is None, isinstance(t, torch.Tensor)),
}


@pytest.mark.parametrize("kind", ["parameter", "gradient"])
@pytest.mark.parametrize("look", METADATA.values(), ids=METADATA)
def test_metadata_does_not_wait(owner: Owner, kind: str, look: Callable[[Any], Any]) -> None:
    tensor = getattr(owner, kind)()
    plain = nn.Parameter(torch.zeros(2, 3)) if kind == "parameter" else torch.zeros(2, 3)
    seen, expected = str(look(tensor)), str(look(plain))
    assert seen == expected or look in (METADATA["likeness"], METADATA["identity"])
    assert is_pending(tensor)
    assert owner.read == []


def test_gradients_can_be_set_and_freezing_does_not_wait(owner: Owner) -> None:
    parameter = owner.parameter()
    parameter.grad = torch.ones(2, 3)
    parameter.requires_grad_(False)
    parameter.requires_grad = True
    assert torch.equal(parameter.grad, torch.ones(2, 3))
    parameter.grad = None
    del parameter.grad
    if owner.guard is None:
        parameter.register_hook(lambda g: g)
    assert owner.read == []


def test_classes(owner: Owner) -> None:
    assert type(torch.zeros_like(owner.parameter())) is torch.Tensor
    assert type(torch.ones_like(owner.gradient())) is torch.Tensor
    assert isinstance(owner.parameter(), nn.Parameter)
    assert isinstance(owner.parameter(), PendingParameter)
    assert isinstance(owner.gradient(), PendingGradient)
    assert not isinstance(owner.gradient(), nn.Parameter)


@pytest.mark.parametrize("zero", [torch.Tensor.zero_, torch.zero_], ids=["method", "function"])
def test_zeroing_a_gradient_is_left_to_its_owner(owner: Owner, zero: Callable[[Any], Any]) -> None:
    gradient = owner.gradient()
    assert zero(gradient) is gradient
    assert (owner.zeroed, owner.read) == ([0], [])


def test_zeroing_many_gradients_zeroes_plain_ones_at_once(owner: Owner) -> None:
    plain = torch.ones(2)
    torch._foreach_zero_([owner.gradient(), plain, owner.gradient()])
    assert (owner.zeroed, owner.read) == ([0, 1], [])
    assert torch.equal(plain, torch.zeros(2))


def test_what_zero_grad_does_does_not_wait(owner: Owner) -> None:
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = owner.suspend(torch.ones_like(parameter))
    layer.zero_grad(set_to_none=False)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.detach_() is parameter.grad
    assert (owner.zeroed, owner.read) == ([0, 1], [])


def test_zeroing_a_parameter_waits(owner: Owner) -> None:
    parameter = owner.parameter()
    with torch.no_grad():
        parameter.zero_()
    assert owner.read == [0]
    assert torch.equal(parameter.detach(), torch.zeros(2, 3))


def test_everything_in_one_call_is_read_together(owner: Owner) -> None:
    owner.parameter(), owner.gradient(), owner.parameter()
    other = Owner()
    other.parameter()
    torch.cat([*owner.tensors, *other.tensors])
    assert sorted(owner.read) == [0, 1, 2]
    assert other.read == [0]


def test_finish(owner: Owner) -> None:
    finish(owner.parameter())
    finish_all(({"a": [owner.gradient(), 1, "x"]}, owner.parameter(), torch.zeros(1), None))
    assert owner.read == [0, 1, 2]
    assert not any(map(is_pending, owner.tensors))


def test_a_gradient_does_not_keep_its_owner_alive_unless_handed_over() -> None:
    owner = Owner()
    gradient, kept = owner.gradient(), owner.gradient()
    owner.tensors = [torch.zeros(1)] * 2
    reference = weakref.ref(owner)
    new = Owner()
    new.tensors = [torch.zeros(1), kept]
    hand_over(kept, new)
    del owner, new
    gc.collect()
    assert reference() is None
    assert kept.sum() == 6
    with pytest.raises(UserError, match="its model was dropped"):
        gradient.sum()


def test_a_parameter_keeps_its_owner_alive() -> None:
    owner = Owner()
    parameter = owner.parameter()
    del owner
    gc.collect()
    assert torch.equal(parameter.detach(), torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo hides it
def test_reads_on_the_way_of_a_compiled_function(owner: Owner) -> None:
    torch._dynamo.reset()
    parameter = owner.parameter()

    @torch.compile(backend="eager")
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.T) * 2

    for number in range(1, 4):
        expected = torch.tanh(torch.ones(1, 3) @ torch.full((3, 2), float(number))) * 2
        assert torch.allclose(product(torch.ones(1, 3), parameter), expected)
        suspend(parameter, owner, 0)
    assert owner.read == [0, 0, 0]
