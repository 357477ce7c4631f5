"""Elements, and the native core's numbers of dtypes, reductions and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import UserError, did_you_mean, require_known

SIZES_BYTES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""In the order of the native core's ``Dtype``."""
DTYPES = {name: code for code, name in enumerate(SIZES_BYTES)}
_REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
REDUCTIONS = {name: code for code, name in enumerate(_REDUCTIONS)}
"""In the order of the native core's ``Reduction``."""
_WHOLE = ("all-reduce", "broadcast", "reduce", "reduce-scatter", "all-gather")
_OF_MESSAGES = ("exchange", "gather", "scatter", "all-to-all")
COLLECTIVES = {name: code for code, name in enumerate((*_WHOLE, *_OF_MESSAGES))}
"""In the order of the native core's names."""


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Elements:
    """Contiguous elements somewhere in memory."""

    address: int
    count: int
    dtype: str
    owner: object = None  # keeps the memory alive as long as it is needed

    @property
    def size_bytes(self) -> int:
        """How many bytes they take; 0 for a dtype that is not known."""
        return self.count * SIZES_BYTES.get(self.dtype, 0)


FLOATING = ("float32", "float64", "bfloat16", "float16")


def dtype_code(dtype: str) -> int:
    """Return the native core's number of a dtype; raise :class:`UserError` if it has none."""
    if dtype not in DTYPES:
        raise UserError(
            f"elements of {dtype} cannot be exchanged{did_you_mean(dtype, DTYPES)} "
            f"(known: {', '.join(DTYPES)})"
        )
    return DTYPES[dtype]


def reduction_code(reduction: str, dtype: str) -> int:
    """Return the native core's number of a reduction; raise UserError if none is for ``dtype``."""
    require_known("reduction", reduction, REDUCTIONS)
    bitwise = reduction in ("band", "bor", "bxor")
    if (bitwise and dtype in FLOATING) or (reduction == "avg" and dtype == "bool"):
        kind = "integers and booleans" if bitwise else "numbers"
        raise UserError(f"the reduction {reduction!r} is for {kind}, not for {dtype}")
    return REDUCTIONS[reduction]
