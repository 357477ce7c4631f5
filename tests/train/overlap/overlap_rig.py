"""The same training script under DDP and under the engine, and what came of it."""

from __future__ import annotations

import hashlib
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from syncline.errors import UserError
from syncline.train import engine_executor
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.engine.dense_transport import DenseTransport, Work
from syncline.train.engine.engine import Engine
from syncline.train.engine.message_threads import Round
from syncline.train.overlap.deferral import Deferral
from tests.timeouts import DEADLINE_S
from tests.train.overlap.overlap_plans import Style, plan_of, ready_order

STEADY = 3  # steps after which the engine runs: the first two under new buckets are DDP's own
STEPS = STEADY + 20
OVERLAPS = "overlaps"
SYNCHRONIZES = "synchronizes"
SYNCHRONOUS = "synchronous"
READER_PAUSE_S = 0.0005
"""Between two reads of a thread, so that it does not starve the training of the interpreter."""
OBSERVED = 15
"""The step from which on is counted what happens: some scripts change their ways at the tenth."""

Script = Callable[["Side"], None]
Loss = Callable[[nn.Module], torch.Tensor]


class Side:
    """What a script is given: how to wrap its model and optimizer, and where to note results.

    This one wraps in torch's own class, with a hook where gradients are to travel in another type.
    """

    def __init__(self, wire: str | None = None) -> None:
        self._wire = wire
        self.trace: list[tuple[str, Any]] = []
        self.wrapped: list[Any] = []
        self.step = 0
        self.plans: dict[str, Any] = {}
        """Arguments of our wrapper that choose a plan; one is made by hand where there are none."""
        self.length = STEPS
        self.guard = False  # whether optimizers are overlapped with the guard
        self.shard = False
        """Whether optimizers are sharded: gradients cannot be read after a step then."""
        self.near = False
        """Whether values may differ from those of the other side, relatively by :attr:`within`."""
        self.within = torch.finfo(getattr(torch, wire)).eps / 32 if wire else 1e-6
        """In 16 bits, what differs in the last bit of float32 now and then rounds otherwise."""
        self.error = ""  # the traceback of what the script raised, where that is part of the result
        self._stopping = threading.Event()
        self._readers: list[threading.Thread] = []
        self._raised: list[str] = []  # by readers

    @property
    def steps(self) -> Iterator[int]:
        for step in range(self.length):
            self.step = step
            yield step

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def wrap(self, module: nn.Module, loss: Loss, **arguments: Any) -> Any:  # noqa: ARG002 - as ours
        """Wrap a model; ``loss`` runs it and so tells in which order its gradients become ready."""
        ddp = TorchDDP(module, **arguments)
        if self._wire is not None:
            wire = getattr(torch, self._wire)
            ddp.register_comm_hook(wire, lambda state, bucket: rounded(state, bucket))
        self.wrapped.append(ddp)
        return ddp

    def overlap(self, ddp: Any, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ARG002 - as ours
        return optimizer

    def synchronize(self, ddp: Any) -> None:
        """Call ``synchronize``, where there is such a thing."""

    def average(self, ddp: Any, averages: Iterable[torch.Tensor], weight: float) -> None:
        """Call ``average``, or do the same where there is no such thing."""
        with torch.no_grad():
            for mean, parameter in zip(averages, ddp.module.parameters(), strict=True):
                mean.lerp_(parameter, weight)

    def note(self, label: str, *values: Any) -> None:
        """Note values, which must be the same on both sides."""
        self.trace.append((label, Near(values, self.within) if self.near else fingerprint(values)))

    def read_in_thread(self, read: Callable[[], object]) -> None:
        """Read in a thread again and again until the script ends; what it raises is noted."""

        def go_on() -> None:
            while not self._stopping.wait(READER_PAUSE_S):
                try:
                    read()
                except Exception as error:
                    # DDP raises this too, where a step makes the first state of a parameter.
                    if "changed size during iteration" not in str(error):
                        self._raised.append("".join(traceback.format_exception(error)))

        self._readers.append(threading.Thread(target=go_on, daemon=True))
        self._readers[-1].start()

    def _stop_readers(self) -> None:
        self._stopping.set()
        for thread in self._readers:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a thread waits for ever"
        self._readers.clear()

    def finish(self, ddp: Any, *optimizers: torch.optim.Optimizer) -> None:
        self._stop_readers()
        self.note("raised in threads", self._raised[:1])
        for name, parameter in ddp.module.named_parameters() if not self.shard else ():
            self.note(f"gradient of {name}", parameter.grad)
        for name, value in ddp.module.state_dict().items():
            self.note(name, value)
        for number, optimizer in enumerate(optimizers):
            state = self.state_dict(ddp, optimizer)
            if self.shard and not self.rank:  # whole on rank 0, in the order of the parameters
                state = {**state, "state": dict(sorted(state["state"].items()))}
            for key, value in state.items() if not (self.shard and self.rank) else ():
                self.note(f"optimizer {number} {key}", value)

    def state_dict(self, ddp: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:  # noqa: ARG002 - as ours
        """Return an optimizer's whole state; of sharded ones on rank 0 alone."""
        return optimizer.state_dict()

    def close(self) -> None:
        self._stop_readers()


Stock = Side


def rounded(wire: torch.dtype, bucket: Any) -> Any:
    """Average a bucket in another type; torch's own hook divides after the cast."""
    buffer = bucket.buffer()
    wire = wire if bucket.parameters()[0].dtype == torch.float32 else buffer.dtype
    sent = buffer.mul_(1 / dist.get_world_size()).to(wire)
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda _: buffer.copy_(sent))


class Ours(Side):
    """Ours, under a plan made for the model."""

    def __init__(self, style: Style, *, guard: bool = False, shard: bool = False) -> None:
        super().__init__(style.wire)
        self.style, self.guard, self.shard = style, guard, shard
        self.deferred = self.under_forward = 0
        """Updates of single parameters in the last steps: put off, and made by a forward pass."""

    @property
    def happened(self) -> str:
        if not self.deferred:
            return SYNCHRONOUS
        return OVERLAPS if self.under_forward > 0.5 * self.deferred else SYNCHRONIZES

    @contextmanager
    def observed(self) -> Iterator[None]:
        defer, apply, begin = Deferral.defer, Deferral.apply, Deferral.begin_forward
        side, trains = self, False

        def noted_begin(self: Deferral) -> None:
            nonlocal trains
            trains = torch.is_grad_enabled()
            begin(self)

        def counted_defer(self: Deferral, step: Any, parameters: Iterable[Any]) -> None:
            chosen = list(parameters)
            side.deferred += len(chosen) * (side.step >= OBSERVED)
            defer(self, step, chosen)

        def counted_apply(self: Deferral, indices: Iterable[int]) -> None:
            chosen = list(indices)
            counts = side.step >= OBSERVED and self.in_forward and trains
            side.under_forward += len(chosen) * counts
            apply(self, chosen)

        counted = {"defer": counted_defer, "apply": counted_apply, "begin_forward": noted_begin}
        with patched({(Deferral, name): function for name, function in counted.items()}):
            yield

    def wrap(self, module: nn.Module, loss: Loss, **arguments: Any) -> Any:
        plans = self.plans
        if not plans:
            order = ready_order(module, loss)
            plan = plan_of(module, order, dist.get_world_size(), self.style)
            plans = {"plan": plan, "check": False, "compression": self.style.wire}
        ddp = DistributedDataParallel(module, **plans, **arguments)
        self.wrapped.append(ddp)
        return ddp

    def overlap(self, ddp: Any, optimizer: torch.optim.Optimizer) -> Any:
        return ddp.overlap(optimizer, guard=self.guard, shard=self.shard)

    def state_dict(self, ddp: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return ddp.full_state_dict(optimizer) if self.shard else optimizer.state_dict()

    def synchronize(self, ddp: Any) -> None:
        ddp.synchronize()

    def average(self, ddp: Any, averages: Iterable[torch.Tensor], weight: float) -> None:
        ddp.average(averages, weight)

    def close(self) -> None:
        super().close()
        for ddp in self.wrapped:
            try:
                planned = planned_training(ddp)
            except UserError:
                continue  # it is not planned
            planned.reducer.executor.stop()


def fingerprint(value: Any) -> Any:
    """Return plain data that is equal exactly where values are equal to the last bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1).contiguous().view(torch.uint8)
        digest = hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()[:16]
        return (str(value.dtype), tuple(value.shape), digest, value.detach().flatten()[:3].tolist())
    if isinstance(value, dict):
        return {repr(key): fingerprint(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    return repr(value)


class Near:
    """Values that equal others within a relative difference: of a tensor, in its norm."""

    def __init__(self, values: Any, within: float) -> None:
        self.within = within
        self.values = [_real(v) if isinstance(v, torch.Tensor) else v for v in tree_leaves(values)]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Near)
        pairs = zip(self.values, other.values, strict=True)
        return all(_is_near(mine, theirs, self.within) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.values)


def _real(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).double().clone()


def _is_near(mine: Any, theirs: Any, within: float) -> bool:
    if isinstance(mine, float):
        return math.isclose(mine, theirs, rel_tol=within)
    if not isinstance(mine, torch.Tensor):
        return bool(mine == theirs)
    finite = mine.isfinite()
    same = torch.equal(finite, theirs.isfinite())
    difference = torch.linalg.vector_norm((mine - theirs)[finite])
    return same and bool(difference <= within * torch.linalg.vector_norm(theirs[finite]))


def differences(ours: Side, theirs: Side) -> list[str]:
    found = []
    if len(ours.trace) != len(theirs.trace):
        found.append(f"{len(ours.trace)} notes, not {len(theirs.trace)}")
    for number, (mine, other) in enumerate(zip(ours.trace, theirs.trace, strict=False)):
        if mine != other:
            found.append(f"note {number} {mine[0]}: {mine[1]} instead of {other[0]}: {other[1]}")
    return [text[:400] for text in found[:4]]


MOST_MESSAGES = 64  # that are under way at the same time


class HeldTransport:
    """Lets messages complete only once the training thread waits for them.

    What is pending when ``step`` is called would otherwise be a matter of luck. More messages under
    way than the plan lets are an error.
    """

    def __init__(self, inner: DenseTransport) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(MOST_MESSAGES)
        self._sent = self._allowed = self._under_way = self._most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, allowed: int, in_flight: int) -> None:
        with self._changed:
            self._sent, self._allowed, self._most = 0, allowed, in_flight

    def allow(self, messages: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, messages)
            self._changed.notify_all()

    def send(self, *args: Any) -> Work:
        work = self._inner.send(*args)
        with self._changed:
            number, self._sent = self._sent, self._sent + 1
            self._under_way += 1
            assert self._under_way <= self._most, f"{self._under_way} messages under way"

        # Elsewhere, because the peers may need this rank's part in it before they can go on.
        done = self._threads.submit(work.wait)

        def wait() -> None:
            with self._changed:
                over = self._changed.wait_for(lambda: number < self._allowed, DEADLINE_S)
            assert over, "nobody waited for a message"
            done.result()
            with self._changed:
                self._under_way -= 1

        return Work(wait, work.wait_on_stream)


class HeldEngine(Engine):
    let_through = 0.0  # the part of each round's messages that lands before ``backward`` ends

    def __init__(self, plan: Any, layout: Any, transport: DenseTransport, **others: Any) -> None:
        self.held = HeldTransport(transport)
        super().__init__(plan, layout, self.held, **others)  # type: ignore[arg-type]

    @property
    def at_first(self) -> int:
        return round(self.let_through * len(self.plan.messages))

    def begin(self, numbers: Iterable[int] = ()) -> None:
        self.held.begin(self.at_first, self.plan.in_flight)
        super().begin(numbers)

    def exchange(self, number: int, elements: torch.Tensor) -> None:
        self.held.begin(1, 1)
        super().exchange(number, elements)

    def wait(self, tensors: Iterable[int], of: Round | None = None) -> None:
        tensors = list(tensors)
        messages = [m for tensor in tensors for m in self.layout.completing[tensor]]
        if self.plan.norm is not None:
            messages.append(self.plan.last_sum)
        self.held.allow(max(messages, default=-1) + 1)
        super().wait(tensors, of)

    def wait_all(self, *, on_host: bool = False) -> None:
        self.held.allow(len(self.plan.messages))
        super().wait_all(on_host=on_host)

    def norms(self) -> torch.Tensor:
        self.held.allow(self.plan.last_sum + 1)
        return super().norms()

    def wait_for_sums(self) -> bool:
        self.held.allow(self.plan.last_sum + 1)
        return super().wait_for_sums()


@contextmanager
def holding(let_through: float) -> Iterator[None]:
    """Hold messages back while nobody waits for them, but a part of each round's messages."""
    suspend = Deferral.suspend_gradients

    def held_suspend(self: Deferral) -> None:
        engine: Any = self.engine
        completing = enumerate(engine.layout.completing)
        engine.wait(t for t, some in completing if all(m < engine.at_first for m in some))
        suspend(self)

    patches = {(HeldEngine, "let_through"): let_through, (engine_executor, "Engine"): HeldEngine}
    with patched({**patches, (Deferral, "suspend_gradients"): held_suspend}):
        yield


@contextmanager
def patched(patches: dict[tuple[Any, str], Any]) -> Iterator[None]:
    before = {(owner, name): getattr(owner, name) for owner, name in patches}
    for (owner, name), value in patches.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
