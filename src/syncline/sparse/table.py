"""The algorithms by name."""

from __future__ import annotations

from syncline.sparse.butterfly import butterfly
from syncline.sparse.exchange import Algorithm
from syncline.sparse.gather import top_k
from syncline.sparse.naive import naive
from syncline.sparse.tree import tree

__all__ = ["ALGORITHMS"]

ALGORITHMS: dict[str, Algorithm] = {
    "top-k": top_k,
    "gtop-k-naive": naive,
    "gtop-k": tree,
    "gtop-k-butterfly": butterfly,
}
"""Those with a cost in ``syncline.model.sparse_costs`` have the same name there."""
