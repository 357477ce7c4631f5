"""Algorithm 2: gradients are reduced to the root, which updates and broadcasts the weights."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import UserError
from syncline.parallel.bsp.algorithm import Algorithm, Job
from syncline.parallel.bsp.planning import Observation
from syncline.planners.base import MergingPlanner

__all__ = ["ReduceBroadcast"]


class ReduceBroadcast(Algorithm):
    """BSP-SGD with a reduce and a broadcast.

    The barrier of line 7 is the end of the broadcast, which no rank passes without the new weights.

    As published, computation forks and joins: one message after the backward pass. With a planner
    the root is the parameter server of MG-WFBP, section 4.3: messages of merged gradients are
    pushed during the backward pass, and the weights pulled in the same messages.

    Args:
        job: what is trained.
        planner: merges gradients, from what the first iterations measure; None: all of them.

    Source: linear-pipeline, Algorithm 2.
    """

    def __init__(self, job: Job, planner: MergingPlanner | None) -> None:
        super().__init__(job)
        self._observation = None if planner is None else Observation(job, planner)
        self._arrange([range(len(job.parameters))])

    def _arrange(self, messages: Sequence[Sequence[int]]) -> None:
        self._members = [frozenset(message) for message in messages]
        self._message_of = {i: number for number, message in enumerate(messages) for i in message}
        self._gradients = [self.job.gradients(message) for message in messages]
        self._weights = [self.job.weights(message) for message in messages]
        self._ready: set[int] = set()
        self._sent = 0

    @property
    def messages(self) -> int:
        """Into how many messages the gradients go."""
        return len(self._members)

    @property
    def measuring(self) -> bool:
        """Whether the planner still waits for measurements."""
        return self._observation is not None

    def before_forward(self) -> None:
        """Note the time."""
        if self._observation is not None:
            self._observation.forward_begins()

    def after_forward(self) -> None:
        """Note the time."""
        if self._observation is not None:
            self._observation.forward_ends()

    def gradient_ready(self, index: int) -> None:
        """Push every message whose turn it is."""
        if self._observation is not None:
            self._observation.gradient_ready(index)
        if self._message_of[index] < self._sent:
            raise UserError(
                f"the gradient of {self.job.names[index]!r} came again after it was sent; a "
                "parameter that is shared between reentrant checkpoints does this: take "
                "use_reentrant=False"
            )
        self._ready.add(index)
        # One message alone has all of the backward pass: algorithm 2 as published.
        while 1 < self.messages > self._sent and self._members[self._sent] <= self._ready:
            self._push_next(attended=False)

    def _push_next(self, *, attended: bool) -> None:
        self._gradients[self._sent].start_reduce(self.job.channel, attended=attended)
        self._sent += 1

    def after_backward(self) -> None:
        """Reduce the gradients to the root (line 3)."""
        while self._sent < self.messages:
            self._push_next(attended=True)
        for gradients in self._gradients:
            gradients.finish_reduce(self.job.channel)
        self._ready.clear()
        self._sent = 0

    def after_update(self) -> None:
        """Broadcast the weights that the root has updated (line 6)."""
        for gradients in self._gradients:
            gradients.forget()
        for weights in self._weights:
            weights.start_broadcast(self.job.channel, attended=True)
        for weights in self._weights:
            weights.finish(self.job.channel)
        if self._observation is not None and self._observation.update_ends():
            messages = self._observation.planned_messages()
            self._observation = None
            self._arrange(messages)
