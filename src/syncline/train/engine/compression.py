"""Exchanges sparse messages, and keeps the state of compressed training from plan to plan."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.errors import MismatchError, UserError
from syncline.plan.plan import Plan
from syncline.plan.planners.auto import Auto
from syncline.plan.planners.compressed import compressed
from syncline.plan.planners.wfbp import Single
from syncline.plan.recipe import Compression, Recipe, Rounded, compression_name
from syncline.plan.run import Sent
from syncline.torch_private import ignored_by_ddp
from syncline.train.engine import int8
from syncline.train.engine.dense_transport import Work
from syncline.train.measure.gradient_hooks import take_off
from syncline.train.measure.profiler import trainable_parameters
from syncline.train.sparse.gradients import NamedGradient, device_of, require_exchangeable, shaped
from syncline.train.sparse.residuals import Residuals
from syncline.train.sparse.session import Scaler, Session, require_own_state, state_of
from syncline.train.sparse.sparse_transport import ring_bytes
from syncline.train.sparse.torch_memory import memory_of


class _Rounding:
    """Stands in for a :class:`Session` in 16 or 8 bits: counts steps, keeps residuals of 8 bits."""

    def __init__(
        self, compression: Rounded, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        self.step = 0
        self.sent_bytes = 0
        self.scaler: Scaler | None = None
        self.residuals: Residuals | None = None
        if compression == "int8":
            elements = {name: parameter.numel() for name, parameter in parameters.items()}
            self.residuals = Residuals(None, elements, memory_of(device_of(parameters)))
        self._compression = compression
        self.group = group

    def follow(self, scaler: Scaler) -> None:
        """Keep the residuals at the scale of the gradients that they are added to."""
        self.scaler = scaler

    def begin_round(self) -> None:
        """Call before residuals are added to the gradients of a round."""
        if self.scaler is not None and self.residuals is not None:
            scale = float(self.scaler.get_scale())
            # A skipped step: its rounding errors may be as large as its gradients.
            if scale < self.residuals.scale:
                self.residuals.clear()
            self.residuals.rescale(scale)

    def count(self, plan: Plan) -> None:
        """Count a step under a plan."""
        self.step += 1
        for message, size in zip(plan.messages, plan.message_bytes(), strict=True):
            if message.collective != "all-gather":
                exponents = size // int8.BLOCK if message.wire == "int8" else 0
                self.sent_bytes += ring_bytes(size + exponents, plan.workers)

    def state_dict(self) -> dict[str, Any]:
        if self.residuals is None:
            return {"compression": self._compression, "steps": self.step}
        return state_of(self._compression, self.step, self.group, self.residuals)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.residuals is None:
            self.step = state["steps"]
            return
        require_own_state(state, self.group)
        self.residuals.load_state_dict(state)
        self.step = state["step"]


class Compressor:
    """Exchanges a plan's sparse messages in order; the next may be prepared on another thread."""

    def __init__(self, plan: Plan, exchange: Session) -> None:
        self._exchange = exchange
        sizes = zip(plan.messages, plan.message_bytes(), strict=True)
        self._dense_bytes = sum(size for message, size in sizes if message.payload == "dense")
        self._tensors = [
            [plan.tensors[index] for index in tensors] for tensors in plan.message_tensors()
        ]
        self._last = max(n for n, m in enumerate(plan.messages) if m.payload == "sparse")

    def send(self, number: int, buffer: torch.Tensor, after: Sequence[Any]) -> Work:
        """Begin to average a message's gradients in place; for ``after`` see :meth:`prepare`."""
        parts = buffer.split([tensor.elements for tensor in self._tensors[number]])
        # No stream need wait for it: the work of the device ends before the exchange does.
        return Work(self.prepare(number, parts, after))

    def prepare(
        self, number: int, gradients: Sequence[torch.Tensor], after: Sequence[Any] | None = None
    ) -> Callable[[], None]:
        """Do the work that needs no other rank; return a function that exchanges the message.

        The gradients, each of shape (elements,), are in the order of the plan, and complete after
        the marks ``after``; by default, once the device's current stream reaches this point.
        """
        if after is None:
            after = [self._exchange.memory.mark()]
        tensors = self._tensors[number]
        named = [NamedGradient(t.name, g) for t, g in zip(tensors, gradients, strict=True)]
        exchange = self._exchange.prepare(named, message=number, after=after)

        def carry_out() -> None:
            exchange()
            if number == self._last:
                # The step's dense messages count as sent, too.
                transport = self._exchange.transport
                transport.sent_bytes += ring_bytes(self._dense_bytes, transport.ranks)
                self._exchange.end_step()

        return carry_out

    def close(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Call after a backward pass that waits; make all infinite if a scaler skips the step."""
        session = self._exchange
        if session.scaler is None:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        finite = [gradient.isfinite().all() for gradient in present]
        if session.refused or not all(torch.stack(finite).tolist()):
            session.refused = True
            for gradient in present:
                gradient.fill_(math.inf)


class Compressing:
    """The residuals, sparse exchange and sent bytes of compressed training; all ranks make one."""

    def __init__(
        self,
        compression: Compression,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self.compression = compression
        self._gradient_bytes = sum(p.nbytes for p in parameters.values())
        self._parameters = parameters = of_float32(parameters)
        self._session: Session | None = None  # the session of a sparse exchange; None otherwise
        self._exchange: Session | _Rounding
        if isinstance(compression, Recipe):
            self._exchange = self._session = Session(compression, parameters, group)
        else:
            self._exchange = _Rounding(compression, parameters, group)
        self._first_step = 0  # the steps already made when this training resumed from a checkpoint
        self._resumed = "not decided"
        self._takers: dict[str, RemovableHandle] = {}  # hooks that add residuals to gradients
        self._delivered: set[str] = set()  # parameters whose hooks have done so
        # Parameters outlive their wrapper.
        weakref.finalize(self, _remove, self._takers).atexit = False

    def compressor_for(self, plan: Plan) -> Compressor | None:
        """Return a compressor for a plan's sparse messages, if any; it sends the residuals."""
        if not plan.is_sparse:
            return None
        assert self._session is not None
        self._keep_residuals()
        return Compressor(plan, self._session)

    def residual_for(self, plan: Plan) -> torch.Tensor | None:
        """Return the residuals of a plan's float32 in 8 bits, in its order; None for others."""
        if plan.wire != "int8":
            return None
        assert self._residuals is not None
        self._keep_residuals()
        return self._residuals.together([t.name for t in plan.tensors if t.dtype == "float32"])

    @property
    def _residuals(self) -> Residuals | None:
        """What was not sent yet; None in 16 bits, which leave nothing."""
        return self._exchange.residuals

    def _keep_residuals(self) -> None:
        """Stop adding residuals to dense gradients."""
        assert self._residuals is not None
        self._residuals.are_delivered = False
        _remove(self._takers)
        self._delivered.clear()

    def begin_round(self) -> None:
        """Call before a backward pass whose gradients a lossy plan exchanges."""
        if isinstance(self._exchange, _Rounding):
            self._exchange.begin_round()

    def end_round(self, plan: Plan) -> None:
        """Call after a backward pass whose gradients a lossy plan exchanges."""
        if isinstance(self._exchange, _Rounding):
            self._exchange.count(plan)

    @property
    def sent(self) -> Sent:
        """What this rank has sent since the wrapper was made."""
        return Sent(
            steps=self._exchange.step - self._first_step,
            sent_bytes=self._exchange.sent_bytes,
            gradient_bytes=self._gradient_bytes,
        )

    def follow(self, scaler: Scaler) -> None:
        """Let a scaler skip steps; see :meth:`Session.follow`."""
        self._exchange.follow(scaler)

    def step_ahead(
        self, module: nn.Module, optimizer: Optimizer, *, synchronize: Callable[[], None]
    ) -> None:
        """Compute gradients at the weights with residuals applied; see :class:`StepAhead`."""
        if self._session is None:
            raise UserError(
                f"step_ahead is for sparse exchange, found compression {self.compression!r}; give "
                "compression=Recipe(...), or leave step_ahead out"
            )
        self._session.step_ahead(module, self._parameters, optimizer, synchronize=synchronize)

    def description(self) -> str:
        """Return a text that must be the same on all ranks when training begins."""
        return f"{self._resumed} after {self._exchange.step} steps"

    def deliver_residuals(self) -> None:
        """Add what the residuals hold to the next gradients, which are exchanged densely.

        Each rank adds its own to its gradient, so the average delivers all of them. A parameter
        that gets no gradient keeps its residual until it does.
        """
        residuals = self._residuals
        # With a scaler they stay here until gradients are compressed again: a skipped step would
        # lose what was added to its gradients.
        if residuals is None or (self._session is not None and self._session.scaler is not None):
            return
        residuals.are_delivered = True
        for name, parameter in self._parameters.items():
            waits = name in residuals and bool(residuals.of(name).any())
            if waits and name not in self._takers:
                self._takers[name] = parameter.register_hook(self._taker(name))

    def forget_delivered(self) -> None:
        """Remove the hooks of delivered residuals; call outside a backward pass."""
        for name in self._delivered:
            self._takers.pop(name).remove()
        self._delivered.clear()

    def _taker(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        residuals = self._residuals
        assert residuals is not None
        strides = torch.empty_like(self._parameters[name], device="meta")
        delivered, exchange = self._delivered, self._exchange

        def take(gradient: torch.Tensor) -> torch.Tensor:
            if name in delivered:
                return gradient
            delivered.add(name)
            if isinstance(exchange, Session):
                return gradient + shaped(residuals.taken(name), strides)
            # These are parts of the average, and the exchange will divide by the number of ranks.
            exchange.begin_round()
            return gradient + exchange.group.size() * shaped(residuals.taken(name), strides)

        return take

    def state_dict(self, plan: Plan | None, *, decided: bool) -> dict[str, Any]:
        """Return what this rank must save under ``plan``; nothing may be in flight."""
        return {
            **self._exchange.state_dict(),
            "decided": decided,
            "plan": None if plan is None or not decided else plan.to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[bool, Plan | None]:
        """Resume from this rank's saved state; return whether a plan was decided on, and which."""
        saved = state.get("compression", state.get("recipe"))
        saved = "a recipe" if isinstance(saved, Mapping) else saved
        if saved != (self.compression if self._session is None else "a recipe"):
            raise MismatchError(
                f"the state's compression is {saved}, the wrapper's is "
                f"{compression_name(self.compression)}; give the wrapper the compression that the "
                "state was saved with"
            )
        self._exchange.load_state_dict(state)
        self._first_step = self._exchange.step
        plan = state.get("plan")
        decided = bool(state.get("decided", False))
        if decided:
            digest = hashlib.sha256(str(plan).encode()).hexdigest()[:16]
            self._resumed = "dense" if plan is None else f"a plan with the SHA-256 {digest}"
        return decided, None if plan is None else Plan.from_json(plan)


def of_float32(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are compressed; others travel as they are."""
    return {name: p for name, p in parameters.items() if p.dtype == torch.float32}


def _remove(takers: dict[str, RemovableHandle]) -> None:
    take_off(list(takers.values()))
    takers.clear()


def require_compression(
    module: nn.Module,
    compression: Compression | None,
    plan: Plan | None,
    *,
    planner: str,
    check: bool,
) -> None:
    """Raise a UserError for a compression that cannot be used."""
    if compression is None:
        if plan is not None and plan.is_lossy:
            raise UserError(
                "the plan has lossy messages, which must be asked for: give compression too, the "
                "recipe or type that the plan was made for"
            )
        return
    if not isinstance(compression, Recipe) and compression not in get_args(Rounded):
        raise UserError(
            f"compression is a Recipe or one of {', '.join(map(repr, get_args(Rounded)))}, found "
            f"{compression!r}"
        )
    if isinstance(compression, Recipe) and compression.momentum and check:
        raise UserError(
            "a recipe with momentum replaces the optimizer's momentum, which the check's dense "
            "steps would lack; give check=False, so that every step is compressed"
        )
    whole = isinstance(compression, Recipe) and compression.unit == "model"
    if whole and plan is None and planner not in (Auto.NAME, Single.NAME):
        raise UserError(
            "a recipe with unit 'model' selects from all gradients at once, so they travel in one "
            f"message; the planner {planner!r} makes several: take 'single', or leave planner out"
        )
    ignored = ignored_by_ddp(module)
    exchanged = {name: p for name, p in trainable_parameters(module).items() if name not in ignored}
    require_exchangeable(of_float32(exchanged) or exchanged, module)
    if plan is not None:
        compressed(plan, compression)
