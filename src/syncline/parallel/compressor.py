"""Exchanging lossy messages: what stands beside the carrier of dense ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.model.plan import Plan
from syncline.parallel.carrier import Flight
from syncline.sparse.courier import Courier, ring_bytes
from syncline.sparse.gradients import Gradient
from syncline.sparse.session import Session
from syncline.sparse.side import Side

__all__ = ["Compressor", "RoundedCompressor", "SparseCompressor"]


class Compressor(ABC):
    """Exchanges a plan's lossy messages, one after the other in the order of the plan.

    :meth:`prepare` may be called for the next message while one is exchanged on another thread.
    """

    def __init__(self, plan: Plan, courier: Courier, side: Side) -> None:
        self._courier = courier
        self._side = side
        sizes = zip(plan.messages, plan.message_bytes(), strict=True)
        self._dense_bytes = sum(size for message, size in sizes if message.payload == "dense")
        self._tensors = [
            [plan.tensors[index] for index in tensors] for tensors in plan.message_tensors()
        ]
        lossy = [n for n, message in enumerate(plan.messages) if message.payload != "dense"]
        self._last = lossy[-1]

    def send(self, number: int, buffer: torch.Tensor, after: Sequence[Any]) -> Flight:
        """Begin to exchange a message.

        Once it has landed, the device has done its work too: no stream need wait for it.

        Args:
            number: of the message in the plan.
            buffer: its gradients one after the other, averaged in place.
            after: the carrier's marks after which its content is complete.
        """
        parts = buffer.split([tensor.elements for tensor in self._tensors[number]])
        return Flight(self._begun(number, parts, after), _nothing)

    def prepare(self, number: int, gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Do what needs no other rank; return what is to be called to exchange the message.

        Args:
            number: of the message in the plan.
            gradients: of its tensors in the order of the plan, each of shape (elements,); complete
                when the device's current stream is here.
        """
        return self._begun(number, gradients, [self._side.mark()])

    def _begun(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        exchange = self._prepared(number, gradients, after)

        def carry_out() -> None:
            exchange()
            if number == self._last:
                # The carrier's, which count with what the compressed step has sent.
                self._courier.sent_bytes += ring_bytes(self._dense_bytes, self._courier.ranks)
                self._end_step()

        return carry_out

    @abstractmethod
    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Call when all messages of a backward pass that waits for them have been exchanged.

        Args:
            gradients: of all tensors of the plan, in its order.
        """

    @abstractmethod
    def _prepared(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        raise NotImplementedError

    @abstractmethod
    def _end_step(self) -> None:
        raise NotImplementedError


class SparseCompressor(Compressor):
    """Exchanges the largest of a message's residuals and gradients."""

    def __init__(self, plan: Plan, session: Session) -> None:
        super().__init__(plan, session.reducer.courier, session.side)
        self._session = session

    def _prepared(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        named = [
            Gradient(tensor.name, values)
            for tensor, values in zip(self._tensors[number], gradients, strict=True)
        ]
        return self._session.prepare(named, message=number, after=after)

    def _end_step(self) -> None:
        self._session.end_step()

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let all gradients be infinite where a scaler is to skip the step."""
        session = self._session
        if not session.has_scaler:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        finite = [gradient.isfinite().all() for gradient in present]
        if not session.refused and all(torch.stack(finite).tolist()):
            return
        session.refuse()
        for gradient in present:
            gradient.fill_(math.inf)


class RoundedCompressor(Compressor):
    """Exchanges every element in 16 bits, and adds up in float32."""

    def __init__(self, plan: Plan, courier: Courier, side: Side, count: Callable[[], None]) -> None:
        super().__init__(plan, courier, side)
        self._count = count
        payloads = {m.payload for m in plan.messages} - {"dense"}
        self._dtype = getattr(torch, payloads.pop())

    def _prepared(
        self,
        number: int,  # noqa: ARG002
        gradients: Sequence[torch.Tensor],
        after: Sequence[Any],
    ) -> Callable[[], None]:
        with self._side.after(after):
            rounded = torch.cat([values.to(self._dtype) for values in gradients]).cpu()

        def exchange() -> None:
            averages = self._courier.average_rounded(rounded)
            with self._side.after(()):
                there = averages.to(self._side.device)
                parts = there.split([gradient.numel() for gradient in gradients])
                for values, part in zip(gradients, parts, strict=True):
                    values.copy_(part)

        return exchange

    def _end_step(self) -> None:
        self._count()

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Do nothing: infinities have reached all ranks, and nothing is kept."""


def _nothing() -> None:
    pass
