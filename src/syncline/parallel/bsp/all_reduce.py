"""Algorithm 3: all ranks update, from all-reduced gradients."""

from __future__ import annotations

from syncline.parallel.bsp.algorithm import Algorithm, Job

__all__ = ["AllReduce"]


class AllReduce(Algorithm):
    """BSP-SGD with an all-reduce.

    The barrier of line 4 is the end of the all-reduce: no rank has the sum before all have given.
    The weights of the ranks may part by rounding, where their arithmetic differs; line 7 brings
    them together again.

    Args:
        job: what is trained.
        synchronise_every: updates from one broadcast of the weights to the next; 5 in the paper.

    Source: linear-pipeline, Algorithm 3.
    """

    def __init__(self, job: Job, synchronise_every: int) -> None:
        super().__init__(job)
        everything = range(len(job.parameters))
        self._gradients = job.gradients(everything)
        self._weights = job.weights(everything)
        self._synchronise_every = synchronise_every
        self._updates = 0

    def after_backward(self) -> None:
        """All-reduce the gradients (line 3)."""
        self._gradients.all_reduce(self.job.channel)

    def after_update(self) -> None:
        """Broadcast the weights now and then (lines 6 and 7)."""
        self._updates += 1
        if self._updates % self._synchronise_every == 0:
            self._weights.broadcast(self.job.channel)
