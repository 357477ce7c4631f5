"""BSP-SGD: a root that updates, or all ranks, over the collectives of linear-pipeline."""

from __future__ import annotations

from reproduce.bsp.wrapper import BspSgd, IterationProfile

__all__ = ["BspSgd", "IterationProfile"]
