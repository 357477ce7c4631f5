"""``Computation``: the operations of a profile as one worker runs them, one iteration at a time."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from syncline.lab.replay.clock import DeviceClock
from syncline.plan.profile import NOT_COMPUTED, Operation, Profile
from syncline.plan.timeline import COMPUTE, Span, SpanKind, Timeline


def measured_timeline(name: str, begun_ns: int, ended_ns: int, spans: Iterable[Span]) -> Timeline:
    """Return the timeline of one iteration under the plan ``name``, with spans clipped to it.

    It lasts from ``begun_ns`` to ``ended_ns`` on the monotonic clock, on which the times of the
    spans are too; messages of the iteration before may reach into it.
    """
    length_ns = max(ended_ns - begun_ns, 0)
    inside = []
    for span in spans:
        start_ns = max(span.start_ns - begun_ns, 0)
        stop_ns = min(span.stop_ns - begun_ns, length_ns)
        ready_ns = span.ready_ns
        if ready_ns is not None:
            ready_ns = min(max(ready_ns - begun_ns, 0), start_ns)
        if start_ns < stop_ns:
            times = {"start_ns": start_ns, "stop_ns": stop_ns, "ready_ns": ready_ns}
            inside.append(msgspec.structs.replace(span, **times))
    return Timeline(name=name, source="measured", iteration_ns=length_ns, spans=tuple(inside))


class Computation:
    """The computation of a worker, put into the queues of an emulated device.

    It runs what the simulator's strategy ``loop`` does: every operation in the profile's order on
    its lane, reading and copying in the loop's own thread. The update is requested in shares,
    because an optimizer may be stepped parameter by parameter.
    """

    def __init__(self, profile: Profile, clock: DeviceClock) -> None:
        self.profile = profile
        self.clock = clock
        operations = profile.operations
        updates = [i for i, o in enumerate(operations) if o.phase in ("finalize", "update")]
        self._exchanged = updates[0] if updates else len(operations)
        """Index of the first operation that waits for the exchange."""
        backward = (i for i, o in enumerate(operations) if o.phase == "backward")
        self.first_backward = next(backward, self._exchanged)
        """Index of the first backward operation; if there is none, :attr:`_exchanged`."""
        self._device_update_ns = sum(
            operations[i].duration_ns for i in updates if operations[i].is_device_update
        )
        self._is_deferred = False
        self._launched_ns = 0
        self.begin()

    # An optimizer that is copied shares the device with its copy.
    def __copy__(self) -> Computation:
        return self

    def __deepcopy__(self, memo: object) -> Computation:
        return self

    def begin(self) -> None:
        """Begin an iteration."""
        self._end()
        self._finish_ns: dict[int, int] = {}
        self._batch_ns = self._read_ns = 0
        self._next = 0
        self.begun_ns = self.clock.free_ns()
        """When the iteration began: the device had done all of the one before."""
        self.ran: list[Span] = []  # what the lanes of the device did, in ns of the monotonic clock

    def forward(self, operation: int) -> None:
        """Run everything before an operation of the profile; wait until the device is free."""
        self._reach(operation)
        self.clock.wait()

    def arrived(self, operation: int) -> None:
        """Note that an operation's parameters or gradients have arrived by now."""
        awaited = self.profile.operations[operation]
        self._arrived(self._lane(awaited), awaited.name)

    def backward(self, operation: int | None) -> None:
        """Run everything up to an operation, or all before the update; wait for its end."""
        self._is_deferred = True
        if operation is None:
            self._reach(self._exchanged)
            self.clock.wait()
        else:
            self._reach(operation + 1)
            self.clock.wait(self._finish_ns[operation])

    def update(self, size_bytes: int, tensors: int) -> None:
        """Update some parameters, whose gradients have arrived.

        The update's time is divided by the bytes of gradients, or by tensors if the profile has no
        bytes at all.
        """
        operations = self.profile.operations
        asks = operations[min(self._next, len(operations) - 1)].name
        self._arrived("device", "all gradients" if self._is_deferred else asks)
        whole_bytes = self.profile.gradient_bytes
        share = size_bytes / whole_bytes if whole_bytes else tensors / len(self.profile.gradients)
        at_once = self._is_deferred  # else a pre-forward hook of the next iteration asks
        self._end()
        duration_ns = round(self._device_update_ns * share)
        if duration_ns:
            stop_ns = self.clock.run(duration_ns, not_before_ns=self._launched_ns if at_once else 0)
            self._note(COMPUTE, "update", "update", stop_ns - duration_ns, stop_ns)

    def _note(self, lane: str, label: str, kind: SpanKind, start_ns: int, stop_ns: int) -> None:
        span = Span(lane=lane, start_ns=start_ns, stop_ns=stop_ns, label=label, kind=kind)
        self.ran.append(span)

    def _arrived(self, lane: str, label: str) -> None:
        free_ns = self.clock.free_ns(lane)
        self.clock.arrived(lane)
        now_ns = self.clock.free_ns(lane)
        if now_ns > free_ns:
            self._note(_shown(lane), label, "wait", free_ns, now_ns)

    def _reach(self, operation: int) -> None:
        while self._next < min(operation, self._exchanged):
            self._run(self._next)
            self._next += 1

    def _end(self) -> None:
        """Run the rest of the iteration whose backward pass is over."""
        if not self._is_deferred:
            return
        self._is_deferred = False
        self._launched_ns = 0
        for index in range(self._exchanged, len(self.profile.operations)):
            operation = self.profile.operations[index]
            if operation.is_device_update:
                continue
            finish_ns = self._run(index)
            if operation.phase in ("finalize", "update"):
                self._launched_ns = finish_ns

    def _run(self, index: int) -> int:
        operation = self.profile.operations[index]
        waits_for = [self._finish_ns[i] for i in operation.after if i in self._finish_ns]
        if operation.phase != "data":  # the host goes on while a batch is copied
            waits_for.append(self._read_ns if operation.lane == "host" else self._batch_ns)
        finish_ns = self.clock.run(
            operation.duration_ns,
            lane=self._lane(operation),
            not_before_ns=max(waits_for, default=0),
        )
        if operation.phase == "data":
            self._read_ns = finish_ns
        if operation.phase in ("data", "copy"):
            self._batch_ns = finish_ns
        self._finish_ns[index] = finish_ns
        start_ns = finish_ns - operation.duration_ns
        lane = _shown(self._lane(operation))
        kind: SpanKind = "wait" if lane in NOT_COMPUTED else operation.phase
        self._note(lane, operation.name, kind, start_ns, finish_ns)
        return finish_ns

    def _lane(self, operation: Operation) -> str:
        if operation.phase == "data":
            return "host" if self.profile.has_host else "device"
        return "device" if operation.phase == "copy" else operation.resource


def _shown(lane: str) -> str:
    return COMPUTE if lane == "device" else lane
