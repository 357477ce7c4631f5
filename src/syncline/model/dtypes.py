"""Sizes of the element types that gradients can have."""

from __future__ import annotations

from syncline.errors import UserError, did_you_mean, quoted

__all__ = ["BYTES_PER_ELEMENT", "bytes_per_element"]

BYTES_PER_ELEMENT = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}


def bytes_per_element(dtype: str) -> int:
    """Return the bytes that one element of ``dtype`` takes.

    Raises:
        UserError: ``dtype`` is not a type that gradients can have.
    """
    try:
        return BYTES_PER_ELEMENT[dtype]
    except KeyError:
        known = ", ".join(BYTES_PER_ELEMENT)
        hint = did_you_mean(dtype, BYTES_PER_ELEMENT)
        raise UserError(f"unknown gradient dtype {quoted(dtype)}{hint} (known: {known})") from None
