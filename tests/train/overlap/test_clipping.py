"""What torch's functions ask of pending gradients, as far as no exchange is needed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.profile import Norm
from syncline.torch_private import foreach_mul_, foreach_norm, unscale_
from syncline.train.overlap.clipping import Change, clipped, make_changes


class Owner:
    """Has gradients whose norms are exchanged, and notes what is asked."""

    def __init__(self, norm: Norm | None = "2") -> None:
        self.norm = norm
        self.asked: list[Norm] = []
        self.changes: list[Change] = []
        self.finite = torch.tensor(True)

    def norms(self, indices: Sequence[int], norm: Norm) -> list[torch.Tensor] | None:
        self.asked.append(norm)
        return [torch.tensor(float(i)) for i in indices] if norm == self.norm else None

    def all_finite(self, indices: Sequence[int]) -> torch.Tensor | None:
        return self.finite if self.norm and indices else None

    def change(self, indices: list[int], change: Change) -> None:
        assert indices
        self.changes.append(change)


GRADIENTS = [torch.ones(3), torch.ones(2)]


def multiply(factor: Any) -> Change:
    return Change(foreach_mul_, (factor,), {}, True, factor)


def asks(owner: Owner, function: Any, *args: Any, **kwargs: Any) -> Any:
    def groups(gradients: Sequence[torch.Tensor]) -> Any:
        indices = [next(i for i, g in enumerate(GRADIENTS) if g is x) for x in gradients]
        return [(owner, indices, list(gradients))]

    return clipped(function, args, kwargs, groups)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "norm"),
    [
        (torch.linalg.vector_norm, (), {}, "2"),
        (torch.linalg.vector_norm, (1,), {}, "1"),
        (torch.linalg.vector_norm, (math.inf,), {}, "inf"),
        (torch.linalg.vector_norm, (), {"ord": 2.0}, "2"),
        (torch.norm, (), {"p": "fro"}, "2"),
        (torch.Tensor.norm, (2,), {}, "2"),
        (torch.norm, (), {"p": 1, "dim": None, "keepdim": False, "dtype": None}, "1"),
        (torch.linalg.vector_norm, (3,), {}, None),
        (torch.linalg.vector_norm, (2, 0), {}, None),
        (torch.linalg.vector_norm, (2,), {"dim": 0}, None),
        (torch.sum, (), {}, None),
    ],
)
def test_which_norms_are_seen(function: Any, args: Any, kwargs: Any, norm: Norm | None) -> None:
    owner = Owner()
    asks(owner, function, GRADIENTS[0], *args, **kwargs)
    assert owner.asked == ([norm] if norm else [])


def test_norms_of_a_list_come_in_its_order() -> None:
    (found,) = asks(Owner(), foreach_norm, GRADIENTS[::-1], 2)
    assert [float(norm) for norm in found] == [1, 0]
    assert asks(Owner("inf"), foreach_norm, GRADIENTS, 2) is None


@pytest.mark.parametrize(
    ("function", "args", "factor"),
    [
        (torch.Tensor.mul_, (0.5,), 0.5),
        (torch.Tensor.mul_, (torch.tensor(0.25),), 0.25),
        (torch.Tensor.div_, (4,), 0.25),
        (torch.Tensor.div_, (torch.tensor(-8.0),), -0.125),
        (torch.Tensor.div_, (3,), None),
        (torch.Tensor.div_, (0,), None),
        (torch.Tensor.clamp_, (-1, 1), None),
    ],
)
def test_elementwise_changes_are_made_later(function: Any, args: Any, factor: Any) -> None:
    owner = Owner()
    (result,) = asks(owner, function, GRADIENTS[0], *args)
    assert result is GRADIENTS[0]
    (change,) = owner.changes
    assert change.factor == factor
    value = torch.tensor([-3.0, 0.5])
    change.make([value])
    assert value.equal(function(torch.tensor([-3.0, 0.5]), *args))


def test_a_change_keeps_its_numbers() -> None:
    owner, factor = Owner(), torch.tensor(1.0)
    asks(owner, foreach_mul_, GRADIENTS, factor)
    factor.fill_(7.0)
    value = torch.ones(2)
    owner.changes[0].make([value])
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize(
    "args", [(torch.ones(3),), (torch.tensor(1.0, requires_grad=True),), ("x",)], ids=str
)
def test_others_are_not(args: Any) -> None:
    owner = Owner()
    assert asks(owner, torch.Tensor.mul_, GRADIENTS[0], *args) is None
    assert asks(owner, torch.Tensor.add_, GRADIENTS[0], 1) is None
    assert owner.changes == []


@pytest.mark.parametrize(
    ("factor", "exact"),
    [(1.0, True), (-0.5, True), (torch.tensor(2.0**-16), True)]
    + [(factor, False) for factor in (3.0, 0.0, math.nan, math.inf, None)],
    ids=str,
)
def test_norms_can_be_multiplied_with_powers_of_two_only(factor: Any, exact: bool) -> None:
    assert multiply(factor).is_exact is exact


@pytest.mark.parametrize("finite", [False, True])
def test_unscaling(finite: bool) -> None:
    owner, found, inverse = Owner(), torch.zeros(()), torch.tensor(0.5)
    owner.finite = torch.tensor(finite)
    assert asks(owner, unscale_, GRADIENTS, found, inverse) == (None,)
    assert bool(found) is not finite
    assert owner.changes[0].factor == inverse
    assert asks(Owner(None), unscale_, GRADIENTS, found, inverse) is None


@pytest.mark.parametrize(
    ("factors", "passes"),
    [
        ((2.0**-16, 0.3), 1),
        ((2.0**-16, 0.5, 0.3), 1),
        ((0.3, 2.0**-16), 2),
        ((0.3, 0.7), 2),
        ((1.0, 1.0), 0),
    ],
)
def test_a_power_of_two_goes_with_the_next_factor(
    factors: tuple[float, ...], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    monkeypatch.setattr(
        Change, "make", lambda change, _: change.factor == 1.0 or made.append(change.factor)
    )
    make_changes([multiply(torch.tensor(factor)) for factor in factors], [torch.ones(3)])
    assert len(made) == passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_changes_together_give_the_bits_of_one_after_another(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(10_000).to(dtype) * 1e4
    factors = [torch.tensor(2.0**-16), torch.tensor(0.123).to(torch.float32)]
    one, other = values.clone(), values.clone()
    make_changes([multiply(factor) for factor in factors], [one])
    for factor in factors:
        foreach_mul_([other], factor)
    assert torch.equal(one, other)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.5, 1.0, 2.0, 3.0, 0.3])), max_size=4))
def test_changes_have_the_bits_of_one_after_the_other(ways: list[tuple[bool, float]]) -> None:
    values = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.5
    owner, found, expected = Owner(), values.clone(), values.clone()
    for divides, number in ways:
        function = torch.Tensor.div_ if divides else torch.Tensor.mul_
        asks(owner, function, GRADIENTS[0], number)
        function(expected, number)
    make_changes(owner.changes, [found])
    assert found.equal(expected)
