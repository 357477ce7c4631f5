"""``Profile``: what one training iteration costs on one worker.

A profile is a DAG of operations (dag-model, section IV), listed in the order in which the worker
runs them, and the gradient tensors to exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from syncline.errors import UserError, quoted
from syncline.plan.document import Document, Value
from syncline.plan.quantities import (
    LARGEST_BYTES,
    NS_PER_S,
    bytes_per_element,
    require_count,
    require_time,
)

Norm = Literal["1", "2", "inf"]
"""The order p of a norm ``(sum |x|^p)^(1/p)``; ``inf`` is the largest absolute value."""

WAIT = "wait for the slowest worker"
"""Name of the operation for the time that an exchange took beyond the cost of its messages."""
ACCUMULATING = "(earlier micro-batches)"
"""Name of the operation between the forward passes of the first and the last micro-batch."""
Phase = Literal["data", "copy", "forward", "backward", "finalize", "update"]
"""What an operation is part of.

``data``: reading the batch (t_io); ``copy``: host to device (t_h2d); ``forward`` (t_f);
``backward`` (t_b); ``finalize``: unpacking exchanged gradients, after the last message;
``update``: the optimizer (t_u). Symbols: dag-model, Table I.
"""
COMPUTING: tuple[Phase, ...] = ("forward", "backward")


Resource = Literal["device", "host", "stream 2", "stream 3", "stream 4", "peers", "waits"]
"""What runs an operation: the device's compute stream, or the host thread that launches work on it.

``peers`` is communication with other workers other than the gradient exchange, such as all-to-all.
``waits`` are waits for slower workers, and waits that a trace does not explain; any number of them
run at once. ``peers`` and ``waits`` overlap computing.
"""


STREAMS: tuple[Resource, ...] = ("device", "stream 2", "stream 3", "stream 4")
PEERS: Resource = "peers"
WAITS: Resource = "waits"
UNEXPLAINED = "unexplained wait"
"""Name of a wait that a trace does not explain, followed by what waited."""
NOT_COMPUTED = (PEERS, WAITS)  # resources whose operations take as long as measured on any device


class Operation(Value, frozen=True, kw_only=True):
    """One node of the computation DAG."""

    name: str
    phase: Phase
    duration_s: float  # median over the profiled iterations, without messages in flight
    after: tuple[int, ...] = ()
    """Indices of the operations whose results it needs; all smaller than its own."""
    resource: Resource = "device"
    """``host`` for launching kernels and other work of the CPU that overlaps a GPU's."""

    @property
    def duration_ns(self) -> int:
        """The duration on the simulator's clock."""
        return round(self.duration_s * NS_PER_S)

    @property
    def is_device_update(self) -> bool:
        """Whether the device runs it after the exchange."""
        return self.phase in ("finalize", "update") and self.resource != "host"

    @property
    def lane(self) -> str:
        """What runs it: ``"disk"``, ``"copy"`` or its resource."""
        if self.phase == "data":
            return "disk"
        return "copy" if self.phase == "copy" else self.resource


class Tensor(Value, frozen=True, kw_only=True):
    """A gradient tensor as the plan sees it."""

    name: str
    elements: int
    dtype: str = "float32"

    @property
    def size_bytes(self) -> int:
        """Bytes in its own dtype."""
        return self.elements * bytes_per_element(self.dtype)


class Gradient(Tensor, frozen=True, kw_only=True):
    """A gradient tensor as the profile sees it."""

    ready_after: int  # index of the operation after which the gradient is final
    needed_by: int | None = None
    """Index of the forward operation that first reads the parameter; None if none does."""


def require_tensors(where: str, kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise UserError for duplicate names, wrong types or impossible sizes in a list, ``where``."""
    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        wrong = None
        if tensor.name in seen:
            wrong = f"another {kind} has this name"
        elif tensor.elements < 0:
            wrong = f"elements must not be negative: {tensor.elements}"
        if wrong is not None:  # quoting every name would take longer than all the rest
            raise UserError(f"{where}[{index}] {quoted(tensor.name)}: {wrong}")
        seen.add(tensor.name)
        bytes_per_element(tensor.dtype)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    if size_bytes > LARGEST_BYTES:
        raise UserError(
            f"{where} hold {size_bytes} bytes in all; at most {LARGEST_BYTES} can be planned"
        )


class Baseline(Value, frozen=True, kw_only=True):
    """Iterations of the DDP baseline, measured along with the profile."""

    iteration_s: float  # median
    noise_s: float  # standard error of that median: 1.2533 sigma / sqrt(n), sigma from the MAD
    iterations: int

    def __post_init__(self) -> None:
        require_time("baseline: iteration_s", self.iteration_s)
        require_time("baseline: noise_s", self.noise_s)
        require_count("baseline: iterations", self.iterations)


class Profile(Document, frozen=True, kw_only=True):
    """What one iteration costs on one worker.

    Raises:
        UserError: on construction, if there is no gradient, a time or an index is out of range, two
            gradients share a name, or operations or gradients are listed out of order.
    """

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 1

    model: str
    device: str  # kind of the device that computed, such as ``"cpu"`` or ``"cuda"``
    workers: int  # workers over which the medians were taken
    iterations: int  # iterations over which the medians were taken
    operations: tuple[Operation, ...]  # in execution order
    gradients: tuple[Gradient, ...]  # in the order in which they become ready
    baseline: Baseline | None = None
    norm: Norm | None = None
    """The norm of the averaged gradients that every update waits for, as for clipping; None if
    updates wait for their own gradients only."""
    sharded: bool = False
    """Whether each worker updates its share of the parameters alone. The update's duration is then
    that of a share."""

    def __post_init__(self) -> None:
        require_count("profile: workers", self.workers)
        require_count("profile: iterations", self.iterations)
        for index, operation in enumerate(self.operations):
            where = f"profile: operations[{index}] {quoted(operation.name)}"
            require_time(f"{where}: duration_s", operation.duration_s)
            for before in operation.after:
                if not 0 <= before < index:
                    raise UserError(
                        f"{where} waits for operation {before}, which does not come before it; "
                        "the operations must form a DAG listed in execution order (no cycles)"
                    )
        if not self.gradients:
            raise UserError("profile: no gradient tensors; a model without them needs no exchange")
        require_tensors("profile: gradients", "gradient", self.gradients)
        for index, gradient in enumerate(self.gradients):
            for field in ("ready_after", "needed_by"):
                place = getattr(gradient, field)
                if place is not None and not 0 <= place < len(self.operations):
                    raise UserError(
                        f"profile: gradients[{index}] {quoted(gradient.name)}: {field} is "
                        f"{place}, but there are {len(self.operations)} operations"
                    )
        self._check_order()
        total_s = math.fsum(operation.duration_s for operation in self.operations)
        require_time("profile: all operations together", total_s)

    def _check_order(self) -> None:
        exchanged = self._first("finalize", "update")
        ready = [gradient.ready_after for gradient in self.gradients]
        if exchanged is not None and ready[-1] >= exchanged:
            late = next(g for g in self.gradients if g.ready_after >= exchanged)
            raise UserError(
                f"profile: gradient {quoted(late.name)} is ready after "
                f"operations[{late.ready_after}], but operations[{exchanged}] "
                f"{quoted(self.operations[exchanged].name)} already waits for all exchanged "
                "gradients; list finalize and update operations last"
            )
        for index, (before, after) in enumerate(itertools.pairwise(ready), start=1):
            if after < before:
                raise UserError(
                    f"profile: gradients[{index}] {quoted(self.gradients[index].name)} is ready "
                    "before the one listed ahead of it; list gradients in the order they become "
                    "ready"
                )

    def _first(self, *phases: Phase) -> int | None:
        """Return the first operation of the given phases."""
        return next((i for i, o in enumerate(self.operations) if o.phase in phases), None)

    @property
    def has_host(self) -> bool:
        """Whether any operation is the host's, which may run ahead of the device."""
        return any(operation.lane == "host" for operation in self.operations)

    @property
    def has_lanes(self) -> bool:
        """Whether an operation runs beside the compute stream, and so may overlap iterations."""
        return any(o.lane not in ("disk", "copy", "device") for o in self.operations)

    @property
    def is_one_round_after_another(self) -> bool:
        """Whether gradients are computed only after the forward pass, and by a device alone."""
        backward = self._first("backward")
        if backward is None or self.has_lanes:
            return False
        return all(gradient.ready_after >= backward for gradient in self.gradients)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The gradients as a plan sees them."""
        return tuple(
            Tensor(name=g.name, elements=g.elements, dtype=g.dtype) for g in self.gradients
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def computation_s(self) -> float:
        """Seconds of an iteration without communication: when its last operation ends."""
        return max(self.finish_ns(), default=0) / NS_PER_S

    def phase_s(self, *phases: Phase) -> float:
        """Seconds of the operations of the given phases."""
        return math.fsum(o.duration_s for o in self.operations if o.phase in phases)

    def finish_ns(self) -> list[int]:
        """When each operation ends in a single iteration without communication, from its start.

        Every lane runs one operation at a time in the listed order; only waits run all at once.
        Computing and copying wait for their batch: the data and copy operations listed before.
        Each duration is rounded by itself, as in the simulator.
        """
        finish: list[int] = []
        free: dict[str, int] = {}
        batch = read = 0
        for operation in self.operations:
            lane = operation.lane
            turn = 0 if lane == WAITS else free.get(lane, 0)
            start = max(turn, *(finish[before] for before in operation.after), 0)
            if lane != "disk":  # the host goes on while a batch is copied
                start = max(start, read if lane == "host" else batch)
            finish.append(start + operation.duration_ns)
            free[lane] = finish[-1]
            if lane in ("disk", "copy"):
                batch = max(batch, finish[-1])
                read = max(read, finish[-1]) if lane == "disk" else read
        return finish

    def ready_ns(self) -> list[int]:
        """When each gradient is ready, never decreasing; ``tau_b + t_b`` of MG-WFBP, Eq. 6."""
        finish = self.finish_ns()
        ready = (finish[gradient.ready_after] for gradient in self.gradients)
        return list(itertools.accumulate(ready, max))

    def ready_s(self) -> tuple[float, ...]:
        """Return :meth:`ready_ns` in seconds."""
        return tuple(ns / NS_PER_S for ns in self.ready_ns())

    def need_operations(self) -> list[int]:
        """Return the operation of the next iteration that must wait for each gradient.

        The forward operation that first reads the parameter or, at the latest, the first backward
        operation, which overwrites the gradient. Reading and copying a batch never wait.
        """
        backward = self._first("backward")
        needs = []
        for gradient in self.gradients:
            latest = gradient.ready_after if backward is None else backward
            needed = latest if gradient.needed_by is None else gradient.needed_by
            while needed < latest and self.operations[needed].phase in ("data", "copy"):
                needed += 1
            needs.append(min(needed, latest))
        return needs

    def deferred_updates_ns(self) -> dict[int, int]:
        """Return the update time before each operation if parameters are updated on need.

        The update's time is divided in proportion to the parameters' bytes. Keys are operations, in
        order.
        """
        total = self.gradient_bytes
        share_at: dict[int, float] = {}
        for gradient, operation in zip(self.gradients, self.need_operations(), strict=True):
            share = gradient.size_bytes / total if total else 1 / len(self.gradients)
            share_at[operation] = share_at.get(operation, 0) + share
        update_s = math.fsum(o.duration_s for o in self.operations if o.is_device_update)
        return {
            operation: round(update_s * NS_PER_S * share_at[operation])
            for operation in sorted(share_at)
        }
