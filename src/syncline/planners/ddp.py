"""The buckets of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from typing import ClassVar

from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.planners.base import Planner

__all__ = ["DEFAULT_BUCKET_BYTES", "DEFAULT_FIRST_BUCKET_BYTES", "Ddp"]

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024


class Ddp(Planner, frozen=True, kw_only=True):
    """Close a bucket once it holds at least its cap; the first cap is smaller.

    Source: ``torch.nn.parallel.DistributedDataParallel`` with its default arguments, after it has
    rebuilt its buckets in the order of the first backward pass. DDP keeps gradients of several
    dtypes in buckets of their own; they are counted as one here.
    """

    NAME: ClassVar[str] = "ddp"
    SUMMARY: ClassVar[str] = "PyTorch DDP's buckets (first 1 MiB, then 25 MiB)"

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return where DDP closes its buckets."""
        last: list[int] = []
        cap = self.first_bucket_bytes
        held = 0
        for index, gradient in enumerate(profile.gradients):
            held += gradient.size_bytes
            if held >= cap:
                last.append(index)
                cap = self.bucket_bytes
                held = 0
        final = len(profile.gradients) - 1
        if not last or last[-1] != final:
            last.append(final)
        return last
