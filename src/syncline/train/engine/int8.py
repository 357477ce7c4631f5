"""Gradients as 8-bit integers, in blocks that share an exponent; rounding errors are kept.

The format is the idea of MXINT8 (OCP Microscaling Formats v1.0, section 5.3) in longer blocks.
Elements are integers from -127 to 127. The elements of a block are multiplied by one power of two,
so that the largest becomes 64 to 127. Values are exact multiples of that power, and what rounding
loses is exact in float32, too.

A worker adds its residual to its gradient before it rounds, and keeps what rounding loses for the
next one (error feedback: Karimireddy et al., ICML 2019, Algorithm 1).

On the CPU, native code does this in one pass; elsewhere operations of torch, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline import _native

BLOCK = 128  # Elements that share an exponent. Exponents add 1/128 to the bytes.
BIAS = 127  # the bias of exponents, as in float32
LEAST_EXPONENT = 6  # the largest element of a block is scaled to 2^6 or more
NOT_FINITE = 255  # The exponent of a block with an infinity or NaN. All of it arrives as NaN.


def encoded_bytes(values: torch.Tensor) -> int:
    """Return how many bytes encoded values take: one per element, and one per block."""
    return values.numel() + -(-values.numel() // BLOCK)


def space_for(values: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for encoded values: uint8, of shape ``(encoded_bytes(values),)``."""
    return torch.empty(encoded_bytes(values), dtype=torch.uint8, device=values.device)


def take(values: torch.Tensor, residual: torch.Tensor, factor: float) -> None:
    """Replace values by ``factor * values + residual``, and clear the residual.

    Zeros are left as they are, with their residuals: DDP discards the average for a parameter that
    no rank used. The residual of a block that becomes infinite or NaN is cleared. Both tensors are
    of float32 and shape (n,), contiguous.
    """
    if values.device.type == "cpu":
        _native.int8_take(values.data_ptr(), residual.data_ptr(), values.numel(), factor)
    else:
        take_by_torch(values, residual, factor)


def encode(values: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return ``factor * values + residual`` in 8 bits; see :func:`take` for zeros.

    Encoding what was encoded, with its residual, gives the same again. The values, float32 of shape
    (n,) and contiguous, become what the result decodes to; the residual becomes the rounding error.
    The result has the size of :func:`space_for`: n integers, then an exponent for each block.
    """
    encoded = space_for(values)
    if values.device.type == "cpu":
        addresses = values.data_ptr(), residual.data_ptr()
        _native.int8_encode(*addresses, values.numel(), factor, encoded.data_ptr())
    else:
        encode_by_torch(values, residual, factor, encoded)
    return encoded


def decode(encoded: torch.Tensor, values: torch.Tensor, *, add: bool = False) -> None:
    """Decode into values, float32 of shape (n,) and contiguous; with ``add``, add to them."""
    if values.device.type == "cpu":
        _native.int8_decode(encoded.data_ptr(), values.numel(), values.data_ptr(), add=add)
    else:
        decode_by_torch(encoded, values, add=add)


def take_by_torch(values: torch.Tensor, residual: torch.Tensor, factor: float) -> None:
    """Do the same as :func:`take`, on any device."""
    for rows, kept in zip(_blocks(values), _blocks(residual), strict=True):
        _add_residual(rows, kept, factor)


def encode_by_torch(
    values: torch.Tensor, residual: torch.Tensor, factor: float, encoded: torch.Tensor
) -> None:
    """Do the same as :func:`encode`, on any device; ``encoded`` takes the result."""
    integers, exponents = _parts(encoded, values)
    everything = zip(*map(_blocks, (values, residual, integers)), exponents, strict=True)
    for rows, kept, sent, exponent in everything:
        found = _add_residual(rows, kept, factor)
        exponent.copy_(found)
        not_finite = (found == NOT_FINITE)[:, None]
        rows.masked_fill_(not_finite, 0.0)
        sent.copy_((rows * _powers(2 * BIAS - found)).clamp_(-BIAS, BIAS).round_())
        rounded = sent * _powers(found)
        kept.add_((rows - rounded).masked_fill_(not_finite, 0.0))
        rows.copy_(rounded)


def decode_by_torch(encoded: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    """Do the same as :func:`decode`, on any device."""
    integers, exponents = _parts(encoded, values)
    for rows, sent, exponent in zip(_blocks(values), _blocks(integers), exponents, strict=True):
        found = sent * _powers(exponent.int())
        rows.copy_(rows + found if add else found)


def _parts(
    encoded: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return views of the integers, and of the exponents of each result of :func:`_blocks`."""
    elements = values.numel()
    exponents = encoded[elements:].split([len(rows) for rows in _blocks(values)])
    return encoded[:elements].view(torch.int8), exponents


def _blocks(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return views of shape (blocks, elements): of all whole blocks, and of a shorter last one."""
    whole = flat.numel() // BLOCK * BLOCK
    rows = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
    return [each for each in rows if each.numel()]


def _add_residual(rows: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
    """Add residuals to elements that are not zero; return the exponent of each block."""
    zeros = rows == 0
    rows.copy_(torch.where(zeros, rows, (rows * factor).add_(kept)))
    found = rows.abs().amax(dim=1).view(torch.int32) >> 23
    not_finite = found == NOT_FINITE
    kept.masked_fill_(~zeros | not_finite[:, None], 0.0)
    return (found - LEAST_EXPONENT).clamp_(min=1).masked_fill_(not_finite, NOT_FINITE)


def _powers(exponent: torch.Tensor) -> torch.Tensor:
    """Return powers of two by their biased exponents, one for each block; infinity for 255."""
    return (exponent << 23).view(torch.float32)[:, None]
