"""Random generators that depend on what they are for, not on what was drawn before."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["generator", "seed_from"]


def seed_from(*parts: int) -> int:
    """Return a 63-bit seed that differs for different ``parts``, such as (seed, epoch, step)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int) -> torch.Generator:
    """Return a generator on the CPU, seeded by :func:`seed_from`."""
    return torch.Generator().manual_seed(seed_from(*parts))
