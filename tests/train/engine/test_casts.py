"""Scaling, adding and rounding in one pass: the bits of torch's operations, one after the other."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from syncline.train.engine.casts import add_scaled, scaled

same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def values_of(elements: int, seed: int) -> torch.Tensor:
    """Return numbers of all sizes, among them zeros, subnormal numbers and infinities."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-150, 128, (elements,), generator=generator).double()
    values = (torch.randn(elements, generator=generator).double() * exponents.exp2()).float()
    values[::11], values[5::17], values[7::19] = 0.0, math.inf, -0.0
    return values


@pytest.mark.parametrize("elements", [0, 1, 9, 1000])
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("wire", TYPES, ids=str)
def test_bits_of_torch(elements: int, factor: float, wire: torch.dtype) -> None:
    values, arrived = values_of(elements, 0), values_of(elements, 1).to(wire)
    rounded = (values * factor).to(wire)
    same(scaled(values.clone(), factor, wire), rounded)
    total = (values * factor + arrived.float()).to(wire)
    for last in (False, True):
        own = values.clone()
        found = add_scaled(own, arrived.clone(), factor=factor, last=last)
        same(found, total)
        if last:
            same(own, total.float())


def test_other_types_are_added_by_torch() -> None:
    values, arrived = torch.tensor([1 + 2j]), torch.tensor([2 - 1j])
    assert add_scaled(values, arrived, factor=0.5, last=True).equal(torch.tensor([2.5 + 0j]))
    assert values.equal(torch.tensor([2.5 + 0j]))
