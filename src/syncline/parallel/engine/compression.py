"""Exchanging lossy messages, and what a compressed training keeps whatever plan runs."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import MismatchError, UserError
from syncline.measure.exchange import timeout_of
from syncline.model.plan import Plan
from syncline.model.recipe import Compression, Recipe, Rounded, compression_name
from syncline.model.run import Sent
from syncline.parallel.engine.dense_transport import Work
from syncline.planners.auto import Auto
from syncline.planners.compressed import compressed
from syncline.planners.wfbp import Single
from syncline.sparse.gradients import NamedGradient, device_of, require_exchangeable, shaped
from syncline.sparse.memory import Memory
from syncline.sparse.session import Scaler, Session
from syncline.sparse.sparse_transport import SparseTransport, own_group, ring_bytes
from syncline.sparse.torch_memory import memory_of
from syncline.torch_private import ignored_by_ddp

__all__ = ["Compressing", "Compressor", "refused_compression"]


class Compressor(ABC):
    """Exchanges a plan's lossy messages, one after the other in the order of the plan.

    :meth:`prepare` may be called for the next message while one is exchanged on another thread.
    """

    def __init__(self, plan: Plan, transport: SparseTransport, memory: Memory) -> None:
        self._transport = transport
        self._memory = memory
        sizes = zip(plan.messages, plan.message_bytes(), strict=True)
        self._dense_bytes = sum(size for message, size in sizes if message.payload == "dense")
        self._tensors = [
            [plan.tensors[index] for index in tensors] for tensors in plan.message_tensors()
        ]
        lossy = [n for n, message in enumerate(plan.messages) if message.payload != "dense"]
        self._last = lossy[-1]

    def send(self, number: int, buffer: torch.Tensor, after: Sequence[Any]) -> Work:
        """Begin to exchange a message: its gradients one after the other, averaged in place.

        Once it is complete, the device has done its work too: no stream need wait for it. The
        content of ``buffer`` is complete after the transport's marks ``after``.
        """
        parts = buffer.split([tensor.elements for tensor in self._tensors[number]])
        return Work(self._begun(number, parts, after))

    def prepare(self, number: int, gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Do what needs no other rank; return what is to be called to exchange the message.

        The gradients, each of shape (elements,), are in the order of the plan, and complete when
        the device's current stream is here.
        """
        return self._begun(number, gradients, [self._memory.mark()])

    def _begun(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        exchange = self._prepared(number, gradients, after)

        def carry_out() -> None:
            exchange()
            if number == self._last:
                # The transport's, which count with what the compressed step has sent.
                self._transport.sent_bytes += ring_bytes(self._dense_bytes, self._transport.ranks)
                self._end_step()

        return carry_out

    @abstractmethod
    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Call when all messages of a backward pass that waits for them have been exchanged."""

    @abstractmethod
    def _prepared(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        raise NotImplementedError

    @abstractmethod
    def _end_step(self) -> None:
        raise NotImplementedError


class _SparseCompressor(Compressor):
    """Exchanges the largest of a message's residuals and gradients."""

    def __init__(self, plan: Plan, session: Session) -> None:
        super().__init__(plan, session.transport, session.memory)
        self._session = session

    def _prepared(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any]
    ) -> Callable[[], None]:
        named = [
            NamedGradient(tensor.name, values)
            for tensor, values in zip(self._tensors[number], gradients, strict=True)
        ]
        return self._session.prepare(named, message=number, after=after)

    def _end_step(self) -> None:
        self._session.end_step()

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let all gradients be infinite where a scaler is to skip the step."""
        session = self._session
        if session.scaler is None:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        finite = [gradient.isfinite().all() for gradient in present]
        if not session.refused and all(torch.stack(finite).tolist()):
            return
        session.refused = True
        for gradient in present:
            gradient.fill_(math.inf)


class _RoundedCompressor(Compressor):
    """Exchanges every element in 16 bits, and adds up in float32."""

    def __init__(
        self,
        plan: Plan,
        transport: SparseTransport,
        memory: Memory,
        count: Callable[[], None],
    ) -> None:
        super().__init__(plan, transport, memory)
        self._count = count
        payloads = {m.payload for m in plan.messages} - {"dense"}
        self._dtype = getattr(torch, payloads.pop())

    def _prepared(
        self,
        number: int,  # noqa: ARG002
        gradients: Sequence[torch.Tensor],
        after: Sequence[Any],
    ) -> Callable[[], None]:
        with self._memory.after(after):
            rounded = torch.cat([values.to(self._dtype) for values in gradients]).cpu()

        def exchange() -> None:
            averages = self._transport.average_rounded(rounded)
            with self._memory.after(()):
                there = averages.to(self._memory.device)
                parts = there.split([gradient.numel() for gradient in gradients])
                for values, part in zip(gradients, parts, strict=True):
                    values.copy_(part)

        return exchange

    def _end_step(self) -> None:
        self._count()

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Do nothing: infinities have reached all ranks, and nothing is kept."""


class Compressing:
    """The residuals of a compressed training, and what exchanges its messages.

    Args:
        compression: what was asked for.
        parameters: the exchanged ones, by name.
        group: the wrapper's; all its ranks must call.
    """

    def __init__(
        self,
        compression: Compression,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self.compression = compression
        self._parameters = dict(parameters)
        self._session: Session | None = None
        if isinstance(compression, Recipe):
            self._session = Session(compression, parameters, group)
            self._transport = self._session.transport
            self._memory = self._session.memory
        else:
            self._transport = SparseTransport(own_group(group), timeout_of(group))
            self._memory = memory_of(device_of(parameters))
        self._rounded_steps = 0
        self._first_step = 0
        """The steps that had been made when this training went on from a checkpoint."""
        self._resumed = "not decided"
        self._takers: dict[str, Any] = {}
        """Of parameters, hooks that add what their residuals hold to their next gradient."""
        self._delivered: set[str] = set()
        """Those whose hooks have done so."""

    def compressor_for(self, plan: Plan) -> Compressor:
        """Return what exchanges the lossy messages of a plan."""
        self._keep_residuals()
        if self._session is not None:
            return _SparseCompressor(plan, self._session)
        return _RoundedCompressor(plan, self._transport, self._memory, self._count)

    def _count(self) -> None:
        self._rounded_steps += 1

    @property
    def steps(self) -> int:
        """Steps whose gradients were compressed."""
        return self._rounded_steps if self._session is None else self._session.step

    @property
    def sent(self) -> Sent:
        """What this rank has sent since the wrapper was made."""
        dense = sum(p.numel() * p.element_size() for p in self._parameters.values())
        steps = self.steps - self._first_step
        return Sent(steps=steps, sent_bytes=self._transport.sent_bytes, gradient_bytes=dense)

    def follow(self, scaler: Scaler) -> None:
        """Let a scaler skip steps; see :meth:`Session.follow`."""
        if self._session is not None:
            self._session.follow(scaler)

    def step_ahead(
        self, module: nn.Module, optimizer: Optimizer, *, settle: Callable[[], None]
    ) -> None:
        """Take gradients where residuals will bring the weights; see :class:`StepAhead`."""
        if self._session is None:
            raise UserError(
                f"step_ahead is for what sparse exchange leaves behind; {self.compression} leaves "
                "nothing: give compression=Recipe(...), or leave step_ahead out"
            )
        self._session.step_ahead(module, self._parameters, optimizer, settle=settle)

    def description(self) -> str:
        """Return what all ranks must have in common when training begins."""
        return f"{self._resumed} after {self.steps} steps"

    # ------------------------------------------------------------------ back to dense exchange

    def deliver_residuals(self) -> None:
        """Add what the residuals hold to the next gradients, which are exchanged densely.

        Each rank adds its own to its gradient, so the average delivers all of them. A parameter
        that gets no gradient keeps its residual until it does. With a scaler the residuals stay
        until gradients are compressed again.
        """
        if self._session is None or self._session.scaler is not None:
            return  # of a step that is skipped they would be lost
        self._session.residuals.are_delivered = True
        residuals = self._session.residuals
        for name, parameter in self._parameters.items():
            waits = name in residuals and bool(residuals.of(name).any())
            if waits and name not in self._takers:
                self._takers[name] = parameter.register_hook(self._taker(name))

    def forget_delivered(self) -> None:
        """Take off the hooks of the residuals that have gone out; outside a backward pass."""
        for name in self._delivered:
            self._takers.pop(name).remove()
        self._delivered.clear()

    def _taker(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        assert self._session is not None
        residuals = self._session.residuals
        strides = torch.empty_like(self._parameters[name], device="meta")
        delivered = self._delivered

        def take(gradient: torch.Tensor) -> torch.Tensor:
            if name in delivered:
                return gradient
            delivered.add(name)
            return gradient + shaped(residuals.taken(name), strides)

        return take

    def _keep_residuals(self) -> None:
        if self._session is not None:
            self._session.residuals.are_delivered = False
        for handle in self._takers.values():
            handle.remove()
        self._takers.clear()
        self._delivered.clear()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, plan: Plan | None, *, decided: bool) -> dict[str, Any]:
        """Return what this rank must save; nothing may be under way, ``plan`` is what runs."""
        if self._session is None:
            kept: dict[str, Any] = {"compression": self.compression, "steps": self._rounded_steps}
        else:
            kept = self._session.state_dict()
        return {
            **kept,
            "decided": decided,
            "plan": None if plan is None or not decided else plan.to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[bool, Plan | None]:
        """Go on from what this rank has saved; return whether it was decided, and the plan."""
        saved = state.get("compression") if "recipe" not in state else "a recipe"
        if saved != (self.compression if self._session is None else "a recipe"):
            raise MismatchError(
                f"the state is of a compression by {saved}, the wrapper's is "
                f"{compression_name(self.compression)}; give the wrapper the compression that it "
                "was saved with"
            )
        if self._session is not None:
            self._session.load_state_dict(state)
        else:
            self._rounded_steps = state["steps"]
        self._first_step = self.steps
        plan = state.get("plan")
        decided = bool(state.get("decided", False))
        if decided:
            digest = hashlib.sha256(str(plan).encode()).hexdigest()[:16]
            self._resumed = "dense" if plan is None else f"a plan with the SHA-256 {digest}"
        return decided, None if plan is None else Plan.from_json(plan)


def refused_compression(
    module: nn.Module,
    compression: Compression | None,
    plan: Plan | None,
    *,
    planner: str,
    check: bool,
) -> UserError | None:
    """Return the error for a compression that cannot be used, or None if it can."""
    if compression is None:
        if plan is not None and plan.is_lossy:
            return UserError(
                "the plan has lossy messages; that must be asked for: give compression too, the "
                "recipe or type that the plan was made for"
            )
        return None
    if not isinstance(compression, Recipe) and compression not in get_args(Rounded):
        return UserError(
            f"compression is a Recipe, {' or '.join(map(repr, get_args(Rounded)))}, found "
            f"{compression!r}"
        )
    if isinstance(compression, Recipe) and compression.momentum and check:
        return UserError(
            "a recipe with momentum replaces the optimizer's, which the dense steps of the check "
            "would lack; give check=False, so that every step is compressed"
        )
    whole = isinstance(compression, Recipe) and compression.unit == "model"
    if whole and plan is None and planner not in (Auto.NAME, Single.NAME):
        return UserError(
            "a recipe with unit 'model' selects from all gradients at once, so they travel in one "
            f"message; the planner {planner!r} makes several: take 'single', or leave it out"
        )
    ignored = ignored_by_ddp(module)
    exchanged = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    try:
        require_exchangeable(exchanged, module)
        if plan is not None:
            compressed(plan, compression)
    except UserError as error:
        return error
    return None
