"""Horovod: tensor fusion up to a threshold, and what is ready at the end of a cycle."""

from __future__ import annotations

from typing import ClassVar

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.base import MergingPlanner, Planner
from syncline.plan.planners.slices import plan_of, whole_tensors
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S, require_time

FIRST_THRESHOLD_BYTES = 64 * 1024 * 1024  # fusion threshold of Horovod's first releases


class Buckets(MergingPlanner, frozen=True, kw_only=True):
    """Add tensors to a message while it stays within the threshold, unless one exceeds it alone."""

    NAME: ClassVar[str] = "buckets"

    threshold_bytes: int = FIRST_THRESHOLD_BYTES

    def __post_init__(self) -> None:
        self.require_at_least(0, "threshold_bytes")

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return where the next tensor would exceed the threshold."""
        last: list[int] = []
        held = 0
        for index, gradient in enumerate(profile.gradients):
            if index and held + gradient.size_bytes > self.threshold_bytes:
                last.append(index - 1)
                held = 0
            held += gradient.size_bytes
        last.append(len(profile.gradients) - 1)
        return last


class Horovod(Planner, frozen=True, kw_only=True):
    """At every tick, fuse what has become ready since the last, up to a threshold.

    Successive tensors join a message while it stays within the threshold; the rest of a tick's
    tensors form further messages at that tick. Ticks are counted from the start of the iteration.
    The update waits for all messages.

    Args:
        cycle_s: seconds between two ticks; 0: tensors leave as soon as they are ready.
        threshold_bytes: bytes of a message; a tensor that is larger goes by itself, and with 0
            every tensor does.

    Source: Horovod's ``FuseResponses`` and the defaults of its current code
    (``HOROVOD_CYCLE_TIME`` 1 ms, ``HOROVOD_FUSION_THRESHOLD`` 128 MiB). O(N).
    """

    NAME: ClassVar[str] = "horovod"

    cycle_s: float = 1e-3
    threshold_bytes: int = 128 * 1024 * 1024

    def __post_init__(self) -> None:
        require_time("horovod: cycle_s", self.cycle_s)
        if self.cycle_s and round(self.cycle_s * NS_PER_S) < 1:
            raise UserError(
                f"horovod: cycle_s must be 0 or at least a nanosecond, found {self.cycle_s}"
            )
        self.require_at_least(0, "threshold_bytes")

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        ready_ns = profile.ready_ns()
        cycle_ns = round(self.cycle_s * NS_PER_S)
        messages: list[Message] = []
        held_bytes = 0
        latest_ns = -1  # tick of the last message
        for tensor in whole_tensors(profile):
            own_ns = ready_ns[tensor.tensor]
            tick_ns = -(-own_ns // cycle_ns) * cycle_ns if cycle_ns else own_ns
            start = tensor.start
            held_bytes += tensor.size_bytes
            if tick_ns == latest_ns and held_bytes <= self.threshold_bytes:
                start = messages.pop().start
            else:
                held_bytes = tensor.size_bytes
            delay_s = (tick_ns - own_ns) / NS_PER_S
            messages.append(Message(start=start, stop=tensor.stop, delay_s=delay_s))
            latest_ns = tick_ns
        return plan_of(self.NAME, profile, network.workers, messages, wait="update")
