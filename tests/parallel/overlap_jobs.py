"""What the workers of the overlap tests run."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel.features import features
from tests.parallel.overlap_plans import Style
from tests.parallel.overlap_rig import Ours, Stock, differences, holding


def beside_stock(rows: list[str], style: Style, let_through: float) -> list[dict[str, Any]]:
    """Run scripts under stock DDP and under the engine, and say how they differ."""
    results = []
    for row in rows:
        sides = Ours(style), Stock()
        for side in sides:
            torch.manual_seed(1)
            with holding(let_through), sides[0].observed():
                features()[row].script(side)
                side.close()
        results.append({"differences": differences(*sides), "happened": sides[0].happened})
    return results
