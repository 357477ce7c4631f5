"""Communication hooks for torch's own DistributedDataParallel.

from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model)
state = syncline.hooks.GTopKState(model, Recipe(density=0.001))
model.register_comm_hook(state, syncline.hooks.gtopk)
"""

# Annotations must be classes, not strings: torch compares those of a hook with its own.
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from syncline.plan.recipe import Recipe
from syncline.train.sparse.hook import GTopKState
from syncline.train.sparse.residuals import resharded

__all__ = ["GTopKState", "Recipe", "gtopk", "resharded"]


def gtopk(state: GTopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients sparsely: a communication hook, with one state for each model.

    The future's value is the bucket's buffer with the averages.

    Raises:
        SynclineError: an earlier exchange failed. ``backward()`` raises the errors of this one.
    """
    return state.exchanged(bucket)
