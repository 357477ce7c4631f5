"""Sizes of element types."""

from __future__ import annotations

import pytest

from syncline.errors import UserError
from syncline.plan.quantities import BYTES_PER_ELEMENT, bytes_per_element


@pytest.mark.parametrize("dtype", BYTES_PER_ELEMENT)
def test_sizes_are_torchs(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    assert bytes_per_element(dtype) == getattr(torch, dtype).itemsize


def test_an_unknown_type_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown gradient dtype 'bfloat61'; did you mean 'bfloat"):
        bytes_per_element("bfloat61")
