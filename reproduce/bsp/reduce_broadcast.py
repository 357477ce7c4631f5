"""Algorithm 2: gradients are reduced to the root, which updates and broadcasts the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from reproduce.bsp.algorithm import Algorithm, Job
from syncline.plan.fit import fit_cost_curve
from syncline.plan.network import Measurement, Network
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.train.measure.profiler import dtype_name
from syncline.train.measure.statistics import lower_quartile, median


class ReduceBroadcast(Algorithm):
    """BSP-SGD with a reduce and a broadcast.

    The barrier of line 7 is the end of the broadcast, which no rank passes without the new weights.

    As published, computation forks and joins: one message after the backward pass. With a planner
    the root is the parameter server of MG-WFBP, section 4.3: messages of merged gradients are
    pushed during the backward pass, and the weights pulled in the same messages.

    It plans from what the first iterations measure.

    Source: linear-pipeline, Algorithm 2.
    """

    def __init__(self, job: Job, planner: MergingPlanner | None) -> None:
        super().__init__(job)
        self._observation = None if planner is None else _Observation(job, planner)
        self._sent = 0
        """Messages sent in the present backward pass."""

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
        """Push every message that is ready, in order."""
        if self._observation is not None:
            self._observation.gradient_ready(index)
        if self._message_of[index] < self._sent:
            raise self.job.sent_before(index)
        self._ready.add(index)
        # A single message is sent after the backward pass: algorithm 2 as published.
        while 1 < self.messages > self._sent and self._members[self._sent] <= self._ready:
            self._push_next(blocking=False)

    def _push_next(self, *, blocking: bool) -> None:
        self._gradients[self._sent].start_reduce(blocking=blocking)
        self._sent += 1

    def after_backward(self) -> None:
        """Reduce the gradients to the root (line 3)."""
        while self._sent < self.messages:
            self._push_next(blocking=True)
        for gradients in self._gradients:
            gradients.finish_reduce()
        self._ready.clear()
        self._sent = 0

    def after_update(self) -> None:
        """Broadcast the weights that the root has updated (line 6)."""
        for gradients in self._gradients:
            gradients.forget()
        for weights in self._weights:
            weights.start_broadcast(blocking=True)
        for weights in self._weights:
            weights.finish()
        if self._observation is not None and self._observation.update_ends():
            messages = self._observation.planned_messages()
            self._observation = None
            self._arrange(messages)


WARM_UP = 3
OBSERVED = 10
"""Iterations: enough for a median, as nothing is in flight while they compute."""
SMALLEST_BYTES = 4096
REPETITIONS = 9


class _Observation:
    """Times of the first iterations, in which gradients are sent after the backward pass.

    So communication does not disturb the measured computation. The cost of a push is measured on
    the group itself. All ranks take part; the root plans from its own times, for all.

    Source: MG-WFBP, sections 4.3 and 5.1.
    """

    def __init__(self, job: Job, planner: MergingPlanner) -> None:
        self._job = job
        self._planner = planner
        self._iterations = 0
        self._began_s = self._forward_s = 0.0
        self._ready_s: dict[int, float] = {}
        self._forwards_s: list[float] = []
        self._readies_s: list[list[float]] = [[] for _ in job.parameters]

    def forward_begins(self) -> None:
        self._ready_s = {}
        self._began_s = time.perf_counter()

    def forward_ends(self) -> None:
        self._forward_s = time.perf_counter()

    def gradient_ready(self, index: int) -> None:
        # Of a gradient that comes in parts, the last one counts.
        self._ready_s[index] = time.perf_counter() - self._forward_s

    def update_ends(self) -> bool:
        """End an iteration; say whether that was the last to be observed."""
        self._iterations += 1
        if self._iterations > WARM_UP:
            self._forwards_s.append(self._forward_s - self._began_s)
            for index, ready_s in self._ready_s.items():
                self._readies_s[index].append(ready_s)
        return self._iterations == WARM_UP + OBSERVED

    def planned_messages(self) -> list[list[int]]:
        """Return the parameters of each message, the first to be sent first; on all ranks alike."""
        network = self._network()
        message_of = torch.zeros(len(self._job.parameters), dtype=torch.int64)
        if self._job.channel.is_root:
            came = [index for index, times in enumerate(self._readies_s) if times]
            order = sorted(came, key=lambda index: median(self._readies_s[index]))
            plan = self._planner.plan(self._profile(order), network)
            # Gradients that never came go with the last message.
            message_of.fill_(len(plan.messages) - 1)
            for number, tensors in enumerate(plan.message_tensors()):
                message_of[[order[tensor] for tensor in tensors]] = number
        self._job.channel.start("broadcast", message_of).wait()
        numbers = message_of.tolist()
        return [
            [index for index, number in enumerate(numbers) if number == message]
            for message in range(max(numbers) + 1)
        ]

    def _profile(self, order: list[int]) -> Profile:
        job = self._job
        ready_s = [0.0, *(median(self._readies_s[index]) for index in order)]
        forward_s = median(self._forwards_s)
        operations = [Operation(name="forward", phase="forward", duration_s=forward_s)]
        gradients = []
        for number, index in enumerate(order, 1):
            name, parameter = job.names[index], job.parameters[index]
            duration_s = ready_s[number] - ready_s[number - 1]
            operations.append(
                Operation(name=name, phase="backward", duration_s=duration_s, after=(number - 1,))
            )
            gradients.append(
                Gradient(
                    name=name,
                    elements=parameter.numel(),
                    dtype=dtype_name(parameter.dtype),
                    ready_after=number,
                )
            )
        return Profile(
            model=type(job.module).__name__,
            device="cpu",
            workers=job.channel.group.ranks,
            iterations=len(self._forwards_s),
            operations=tuple(operations),
            gradients=tuple(gradients),
        )

    def _network(self) -> Network:
        """Time pushes of several sizes; MG-WFBP's Eq. 10, of one direction."""
        points = [
            Measurement(
                size_bytes=size_bytes,
                time_s=lower_quartile(list(self._pushes_s(size_bytes))),
                repetitions=REPETITIONS,
            )
            for size_bytes in self._sizes_bytes()
        ]
        return Network(
            name="push",
            workers=self._job.channel.group.ranks,
            all_reduce=fit_cost_curve(points).curve,
            backend="syncline",
            points=tuple(points),
        )

    def _sizes_bytes(self) -> list[int]:
        whole_bytes = sum(parameter.nbytes for parameter in self._job.parameters)
        sizes = [SMALLEST_BYTES]
        while sizes[-1] * 4 < whole_bytes:
            sizes.append(sizes[-1] * 4)
        return [*sizes, max(whole_bytes, 2 * SMALLEST_BYTES)]

    def _pushes_s(self, size_bytes: int) -> Iterator[float]:
        channel = self._job.channel
        buffer = torch.zeros(-(-size_bytes // 4))
        for repetition in range(REPETITIONS + 1):
            channel.start("all-reduce", torch.zeros(1)).wait()  # all ranks begin a push together
            start_s = time.perf_counter()
            channel.start("reduce", buffer).wait()
            if repetition:  # the first warms up
                yield time.perf_counter() - start_s
