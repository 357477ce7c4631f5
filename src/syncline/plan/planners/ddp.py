"""The buckets of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.profile import Profile

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024


class Ddp(MergingPlanner, frozen=True, kw_only=True):
    """Close a bucket once it holds at least its cap; the first cap is smaller.

    Source: ``torch.nn.parallel.DistributedDataParallel`` with its default arguments, after it has
    rebuilt its buckets. DDP keeps gradients of several dtypes apart; they are counted as one here.
    """

    NAME: ClassVar[str] = "ddp"

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES
    from_the_last: bool = False
    """Cut from the gradient that is ready last. With ``find_unused_parameters`` DDP keeps its
    initial buckets, which it filled from the first parameter on."""

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return where DDP closes its buckets."""
        sizes = [gradient.size_bytes for gradient in profile.gradients]
        if not self.from_the_last:
            return self._cuts(sizes)
        final = len(sizes) - 1
        # A bucket that ends before index i from the back begins at final - i from the front.
        return [final - 1 - cut for cut in reversed(self._cuts(sizes[::-1])[:-1])] + [final]

    def _cuts(self, sizes: Sequence[int]) -> list[int]:
        last: list[int] = []
        cap, held = self.first_bucket_bytes, 0
        for index, size_bytes in enumerate(sizes):
            held += size_bytes
            if held >= cap or index == len(sizes) - 1:
                last.append(index)
                cap, held = self.bucket_bytes, 0
        return last
