"""``Plan``: which gradients are exchanged together, and in what order.

A message is a contiguous slice of the gradients in the order in which they become ready, counted in
elements. Gradients of several dtypes are listed one dtype after another, so that each message holds
one. The order of the messages is the same on every rank, so ranks need not negotiate.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import msgspec

from syncline.errors import UserError, quoted
from syncline.plan.document import Document, Value
from syncline.plan.profile import Norm, Profile, Tensor, require_tensors
from syncline.plan.quantities import (
    LARGEST_BYTES,
    LARGEST_IN_FLIGHT,
    bytes_per_element,
    require_count,
    require_time,
)
from syncline.plan.recipe import Rounded

__all__ = ["Message", "MessageCollective", "Payload", "Plan", "Tensor", "Wait"]

MessageCollective = Literal["all-reduce", "reduce-scatter", "all-gather"]
"""``reduce-scatter`` sums a slice and leaves each worker a share; ``all-gather`` sends every share
to all. Together they are a decoupled all-reduce, whose parts may be sent at different times."""

Payload = Literal["dense", "sparse", "bfloat16", "float16", "int8"]
"""What is sent: every element unchanged; the largest elements, selected by the job's recipe; or
every element rounded to 16 or 8 bits. All but ``dense`` are lossy."""

Wait = Literal["update", "need"]
"""What waits for the messages. ``update``: the update waits for all of them, as in DDP. ``need``:
each forward operation of the next iteration waits for the messages with gradients of the parameters
that it reads; these are updated just before it."""

BYTES_PER_NORM = 8  # norms are sent as float64


class Message(Value, frozen=True, kw_only=True):
    """One exchange of the elements ``[start, stop)`` of the concatenated gradients."""

    start: int
    stop: int
    collective: MessageCollective = "all-reduce"
    delay_s: float = 0.0
    """Time from when its last gradient is ready until it may be sent (Horovod's cycle)."""
    payload: Payload = "dense"

    @property
    def wire(self) -> Rounded | None:
        """The type in which every element travels, if that is not its own."""
        return None if self.payload == "dense" or self.payload == "sparse" else self.payload


class Plan(Document, frozen=True, kw_only=True):
    """An ordered list of messages that covers every gradient element exactly once.

    Raises:
        UserError: on construction, if there is no tensor, two tensors share a name, the messages do
            not cover every element once, a scattered element is not gathered later, or a payload
            does not fit a message's collective, tensors or dtype.
    """

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 1

    planner: str
    model: str
    workers: int
    tensors: tuple[Tensor, ...]  # in the order in which their gradients become ready, by dtype
    messages: tuple[Message, ...]  # in the order in which they are sent
    wait: Wait = "update"
    in_flight: int = 1
    """How many messages may be in flight at once: with 2, the latency of one overlaps the
    transmission of another (ByteScheduler's credit, counted in messages)."""
    norm: Norm | None = None
    """The norm of the averaged gradients that every update waits for, as for clipping; None if none
    does. Each worker computes it for its share of the sums, and one more message after the last sum
    exchanges these norms: 8 bytes for each tensor."""
    sharded: bool = False
    """Each worker updates its share of the parameters once all sums are there, and the all-gathers
    carry parameters instead of gradients (ZeRO-1)."""

    def __post_init__(self) -> None:
        require_count("plan: workers", self.workers)
        if not self.tensors:
            raise UserError("plan: no tensors to exchange")
        require_tensors("plan: tensors", "tensor", self.tensors)
        require_count("plan: in_flight", self.in_flight, LARGEST_IN_FLIGHT)
        for index, message in enumerate(self.messages):
            require_time(f"plan: messages[{index}]: delay_s", message.delay_s)
        covered = 0
        summed = ((m.start, m.stop) for m in self.messages if m.collective != "all-gather")
        for start, stop in sorted(summed):
            if start != covered or stop < start:
                raise UserError(
                    f"plan: expected a message that starts at element {covered}, found "
                    f"[{start}, {stop}); messages must cover every gradient once"
                )
            covered = stop
        if covered != self.elements:
            raise UserError(
                f"plan: the messages cover {covered} of {self.elements} gradient elements"
            )
        self._check_gathering()
        if self.is_lossy:
            self._check_payloads()
        if self.sharded:
            if self.is_lossy:
                raise UserError(
                    "plan: a sharded plan gathers parameters, which must not be rounded; let its "
                    "messages be dense"
                )
            kinds = [message.collective for message in self.messages]
            if self.wait == "update" or "all-reduce" in kinds or kinds != sorted(kinds)[::-1]:
                raise UserError(
                    "plan: a sharded plan waits on need, and has all of its reduce-scatters before "
                    "its all-gathers"
                )
        if self.norm is not None and (self.wait == "update" or self.is_sparse):
            raise UserError(
                "plan: norms are exchanged only where updates wait on need and no message is sparse"
            )

    def _check_payloads(self) -> None:
        ends = {0, *self._ends()}
        sums = (m for m in self.messages if m.collective == "reduce-scatter")
        summed = {bound for m in sums for bound in (m.start, m.stop)}
        for index, (message, tensors) in enumerate(
            zip(self.messages, self.message_tensors(), strict=True)
        ):
            if message.payload == "dense":
                continue
            where = f"plan: messages[{index}] travels as {message.payload}"
            if message.payload == "sparse" and message.collective != "all-reduce":
                raise UserError(f"{where}, which no {message.collective} can; all-reduce it")
            if message.payload == "int8" and message.collective == "all-reduce":
                raise UserError(
                    f"{where} and is an all-reduce, whose partial sums would be rounded at every "
                    "hop; make it a reduce-scatter and an all-gather"
                )
            if message.payload == "int8" and not {message.start, message.stop} <= summed:
                raise UserError(
                    f"{where} and gathers a part of a reduce-scatter, whose blocks would be "
                    "rounded anew; let it gather whole ones"
                )
            if message.payload == "sparse" and not {message.start, message.stop} <= ends:
                raise UserError(
                    f"{where} and holds a part of a tensor; the largest are selected from whole "
                    "ones, so let it begin and end with a tensor"
                )
            for tensor in self.tensors[tensors.start : tensors.stop]:
                if tensor.dtype != "float32" and tensor.elements:
                    raise UserError(
                        f"{where} and holds {quoted(tensor.name)} of {tensor.dtype}; only float32 "
                        "can"
                    )
        # Otherwise workers would gather values that differ from the unrounded sums of their owner.
        kinds: tuple[MessageCollective, ...] = ("reduce-scatter", "all-gather")
        summed_as, gathered_as = (self._payloads(kind) for kind in kinds)
        if summed_as != gathered_as:
            payloads = sorted(summed_as.keys() | gathered_as.keys())
            raise UserError(
                f"plan: reduce-scatters and all-gathers travel as {' and '.join(payloads)}; let "
                "those of the same elements travel alike"
            )

    def _payloads(self, collective: MessageCollective) -> dict[Payload, list[tuple[int, int]]]:
        """Return the elements that a collective's messages send as each payload, in order."""
        spans: dict[Payload, list[tuple[int, int]]] = {}
        for message in sorted(self.messages, key=lambda m: (m.start, m.stop)):
            if message.collective == collective and message.start < message.stop:
                spans.setdefault(message.payload, []).append((message.start, message.stop))
        return {payload: _joined(some) for payload, some in spans.items()}

    def _check_gathering(self) -> None:
        scattered: list[tuple[int, int]] = []
        gathered: list[tuple[int, int]] = []
        for index, message in enumerate(self.messages):
            span = (message.start, message.stop)
            if message.collective == "reduce-scatter":
                bisect.insort(scattered, span)
            elif message.collective == "all-gather":
                if not _covers(scattered, span):
                    raise UserError(
                        f"plan: messages[{index}] gathers elements [{span[0]}, {span[1]}) that no "
                        "reduce-scatter before it has summed"
                    )
                bisect.insort(gathered, span)
        if _joined(scattered) != _joined(gathered):
            raise UserError(
                "plan: every element that a reduce-scatter sums must be all-gathered exactly once"
            )

    @classmethod
    def merging(
        cls, planner: str, profile: Profile, workers: int, last_tensors: Iterable[int]
    ) -> Plan:
        """Build the plan whose messages end with the tensors at these increasing indices."""
        ends = list(itertools.accumulate(g.elements for g in profile.gradients))
        stops = [ends[last] for last in last_tensors]
        return cls.cut(planner, profile.model, workers, profile.tensors, stops)

    @classmethod
    def cut(
        cls,
        planner: str,
        model: str,
        workers: int,
        tensors: tuple[Tensor, ...],
        stops: Sequence[int],
    ) -> Plan:
        """Build the plan whose messages end after ``stops`` elements, which do not decrease."""
        bounds = itertools.pairwise((0, *stops))
        messages = tuple(Message(start=a, stop=b) for a, b in bounds if a < b)
        return cls(
            planner=planner,
            model=model,
            workers=workers,
            tensors=tensors,
            messages=messages or (Message(start=0, stop=0),),
        )

    @property
    def elements(self) -> int:
        """Gradient elements in all."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def last_sum(self) -> int:
        """The index of the last message that sums gradients."""
        return max(
            (i for i, m in enumerate(self.messages) if m.collective != "all-gather"), default=-1
        )

    @property
    def norm_bytes(self) -> int:
        """Bytes of the all-gather that exchanges norms; 0 without one."""
        return 0 if self.norm is None else BYTES_PER_NORM * len(self.tensors) * self.workers

    @property
    def is_lossy(self) -> bool:
        """Whether any message leaves elements out or rounds them."""
        return any(message.payload != "dense" for message in self.messages)

    @property
    def wire(self) -> Rounded | None:
        """The type of the messages whose elements are rounded; None if there are none."""
        return next((message.wire for message in self.messages if message.wire), None)

    @property
    def is_sparse(self) -> bool:
        """Whether any message leaves elements out."""
        return any(message.payload == "sparse" for message in self.messages)

    def waiting_for_all(self) -> Plan:
        """Return the plan whose update waits for all messages, and so needs no norm."""
        return msgspec.structs.replace(self, wait="update", norm=None, sharded=False)

    def in_shards(self) -> Plan:
        """Return the sharded plan: all reduce-scatters in order, then the all-gathers."""
        if self.sharded:
            return self
        summed = (
            msgspec.structs.replace(m, collective="reduce-scatter")
            for m in self.messages
            if m.collective != "all-gather"
        )
        gathered = (
            msgspec.structs.replace(m, collective="all-gather", delay_s=0.0)
            for m in self.messages
            if m.collective != "reduce-scatter"
        )
        messages = (*summed, *gathered)
        return msgspec.structs.replace(self, messages=messages, wait="need", sharded=True)

    def _ends(self) -> list[int]:
        """Return the element after the last one of each tensor."""
        return list(itertools.accumulate(t.elements for t in self.tensors))

    def message_tensors(self) -> tuple[range, ...]:
        """Return, for each message, the indices of the tensors of which it holds elements.

        A tensor without elements belongs to the message that holds the element before it.
        """
        ends = self._ends()
        found = []
        for message in self.messages:
            first = bisect.bisect_right(ends, message.start) if message.start else 0
            stop = bisect.bisect_right(ends, message.stop)
            if (ends[stop - 1] if stop else 0) < message.stop:  # it ends inside the next tensor
                stop += 1
            found.append(range(first, max(stop, first)))
        return tuple(found)

    def message_bytes(self) -> tuple[int, ...]:
        """Return each message's bytes on the wire; a sparse one counts as if it were dense."""
        spans = [
            (end - tensor.elements, end, tensor.dtype)
            for tensor, end in zip(self.tensors, self._ends(), strict=True)
        ]
        return tuple(
            sum(
                max(min(message.stop, stop) - max(message.start, start), 0)
                * bytes_per_element(message.wire or dtype)
                for start, stop, dtype in spans[tensors.start : tensors.stop]
            )
            for message, tensors in zip(self.messages, self.message_tensors(), strict=True)
        )

    def label(self, tensors: range) -> str:
        """Return a short name for a message over ``tensors``, such as ``"fc.weight ... conv1"``."""
        names = [self.tensors[index].name for index in tensors]
        if not names:
            return "(empty)"
        if len(names) == 1:
            return names[0]
        return f"{names[0]} .. {names[-1]} ({len(names)})"

    def difference(self, tensors: Sequence[Tensor], workers: int, noun: str = "plan") -> str | None:
        """Return how a job's gradients, in any order, differ from the plan's; None: they agree.

        ``noun`` names what is compared: a profile is compared as a plan that is made from it.
        """
        if workers != self.workers:
            return f"the {noun} is for {self.workers} workers, this job has {workers}"
        planned = {t.name: t for t in self.tensors}
        present = {t.name: t for t in tensors}
        if len(planned) != len(present):
            extra = sorted(present.keys() - planned) or sorted(planned.keys() - present)
            return (
                f"the {noun} has {len(planned)} gradients of {quoted(self.model)}, this model has "
                f"{len(present)}; the first difference is {quoted(extra[0])}"
            )
        for name, tensor in present.items():
            if name not in planned:
                return (
                    f"the {noun} for {quoted(self.model)} has no gradient {quoted(name)}, this "
                    "model does"
                )
            expected = planned[name]
            if (tensor.elements, tensor.dtype) != (expected.elements, expected.dtype):
                return (
                    f"gradient {quoted(name)} has {expected.elements} elements of "
                    f"{expected.dtype} in the {noun}, {tensor.elements} of {tensor.dtype} in this "
                    "model"
                )
        return None


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans with touching ones joined; overlapping ones stay separate."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


def _covers(spans: list[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Return whether sorted, disjoint spans hold all of ``span``."""
    at = span[0]
    for start, stop in spans[max(bisect.bisect_right(spans, (at, LARGEST_BYTES)) - 1, 0) :]:
        if start > at or at >= span[1]:
            break
        at = max(at, stop)
    return at >= span[1]
