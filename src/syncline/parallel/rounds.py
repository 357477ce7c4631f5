"""``Rounds``: feeds the engine from backward passes; a round is one exchanged pass."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from syncline.errors import PeerError
from syncline.parallel.engine.compression import Compressor
from syncline.parallel.engine.dense_transport import bucket_elements
from syncline.parallel.engine.engine import Engine
from syncline.parallel.gradient_views import GradientViews
from syncline.parallel.overlap.deferral import Deferral
from syncline.sparse.gradients import flat
from syncline.torch_private import queue_callback

__all__ = ["GradientHooks", "Rounds", "accumulator", "thawed", "weakly"]


class _Backward(Enum):
    """Who exchanges the backward pass that runs."""

    NONE = auto()
    """None runs, or nothing exchanges it."""
    REDUCER = auto()
    ENGINE = auto()


class _Buckets(Enum):
    """The state of the reducer's buckets."""

    FIRST = auto()
    """No round is over: the reducer may make others."""
    UNKNOWN = auto()
    """Not all final ones were seen, or they are not those of the layout."""
    USABLE = auto()
    """They are final, and those of the layout."""


class Rounds:
    """Feeds the engine from the reducer's hooks, round after round.

    A round is one backward pass after a forward pass that :meth:`expect` was called for. In the
    first round the reducer learns the order of the gradients, in the second it has its final
    buckets: in both, backward waits, and the exchange is DDP's own. From the third on, the engine
    runs. Under a lossy plan the first two are exchanged message by message once the last gradient
    is there, so that every step is exchanged by the plan.

    Args:
        engine: runs the plan.
        compressor: exchanges the plan's messages while the engine does not, if the plan is lossy.
        deferral: takes over after a round.
        group: of the wrapper, for exchanges before the buckets are final.
        defer: leave the exchange running when backward ends; otherwise backward waits for it.
        by_tensor: report single tensors as ready. In a static graph, where a gradient may be
            accumulated more than once in a backward pass, only full buckets are reported.
        as_views: the user asked for gradients that are views of the buckets.
        roll: returns numbers that must be equal on all ranks when a round begins.
        is_final: says whether the reducer has its final buckets.
        finished: is called at the end of every round.
    """

    def __init__(
        self,
        engine: Engine,
        deferral: Deferral,
        group: dist.ProcessGroup,
        *,
        compressor: Compressor | None = None,
        defer: bool,
        by_tensor: bool,
        as_views: bool,
        roll: Callable[[], list[int]],
        is_final: Callable[[], bool],
        finished: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._deferral = deferral
        self._group = group
        self._compressor = compressor
        self._held: dict[int, torch.Tensor] = {}
        """Gradients held until the last one, by the index of their tensor."""
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        """Futures of their buckets, with the buckets."""
        self._share = 1.0 / dist.get_world_size(group)
        self.defer = defer
        self._by_tensor = by_tensor
        self._roll = roll
        self._is_final = is_final
        self._finished = finished
        self._views = GradientViews(deferral.parameters, as_views=as_views)
        self._hooks = GradientHooks()
        self._expected = False
        """Whether the next backward pass will be exchanged."""
        self._backward = _Backward.NONE
        self._buckets = _Buckets.FIRST
        self._seen: dict[int, list[int]] = {}
        """The parameters in each final bucket seen so far, by identity."""
        self._values: dict[int, int] = {}
        """How many values each of these buckets holds."""
        self.mismatch: str | None = None
        """How the reducer's buckets differ from the layout, once seen."""

    @property
    def first(self) -> bool:
        """Whether no round is over."""
        return self._buckets is _Buckets.FIRST

    def attach(self) -> None:
        """Register hooks on the gradients."""
        before, accumulated = weakly(self._before), weakly(self._accumulated)
        for index, parameter in enumerate(self._deferral.parameters):
            after = functools.partial(accumulated, index) if self._by_tensor else None
            self._hooks.add(parameter, before, after)

    def detach(self) -> None:
        """Remove them."""
        self._hooks.remove()
        self._views.leave()

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Return a context for the making of buckets, which happens in a forward pass too."""
        return nullcontext() if self._buckets is _Buckets.USABLE else self._views.kept()

    def expect(self) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        self._expected = True

    def hook(self) -> Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]:  # type: ignore[name-defined]
        """Return the function that takes full buckets, for ``register_comm_hook``."""
        reference = weakref.ref(self)  # as in weakly()

        def take_bucket(
            _: object,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            rounds = reference()
            assert rounds is not None
            return rounds._take_bucket(bucket)

        return take_bucket

    def _take_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        # In the first round of a static graph all buckets come when backward ends, unnumbered.
        unnumbered = not self._by_tensor and self.first
        if self._backward is not _Backward.NONE and (bucket.is_last() or unnumbered):
            # The reducer queues its own callback after its last bucket; a callback that is queued
            # by a callback runs after it. Not earlier: in a nested backward pass, as of reentrant
            # checkpointing, callbacks run when that ends.
            queue_callback(lambda: queue_callback(self._end))
        if self._backward is _Backward.ENGINE:
            self._engine.bucket_ready(bucket.index())
            return _done(buffer)
        if self._backward is _Backward.REDUCER and self._is_final():
            self._note(bucket)
        return self._exchange_now(bucket) if self._compressor is None else self._hold(bucket)

    def _hold(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Hold a bucket until the last one is there, then exchange the plan's messages."""
        future = _future_of(bucket.buffer())
        self._futures.append((future, bucket.buffer()))
        for parameter, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._held[self._deferral.index_of[id(parameter)]] = flat(values)
        if len(self._held) < len(self._deferral.parameters):
            return future
        try:
            self._exchange_held()
        except Exception as error:  # raised when backward ends
            self._engine.lose(error)
        self._held.clear()
        futures, self._futures = self._futures, []
        for each, buffer in futures:
            each.set_result(buffer)
        return future

    def _exchange_held(self) -> None:
        assert self._compressor is not None
        for number, message in enumerate(self._engine.plan.messages):
            gradients = [self._held[tensor] for tensor in self._engine.layout.tensors[number]]
            if message.payload != "dense":
                self._compressor.prepare(number, gradients)()
                continue
            together = torch.cat(gradients).mul_(self._share)
            dist.all_reduce(together, group=self._group)
            parts = together.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part)

    def _note(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Note a final bucket's content; with the last bucket, compare all with the layout.

        The reducer's order is rank 0's, so the answer is the same on every rank.
        """
        self._seen[bucket.index()] = [id(parameter) for parameter in bucket.parameters()]
        self._values[bucket.index()] = bucket_elements(bucket).numel()
        wanted = self._engine.layout.buckets
        if bucket.index() < len(wanted):
            self._engine.know(bucket.index(), bucket_elements(bucket))
        if not bucket.is_last():
            return
        parameters, names = self._deferral.parameters, self._deferral.names
        if len(self._seen) != len(wanted):
            self.mismatch = f"planned {len(wanted)} buckets, DDP made {len(self._seen)}"
            return
        for number, tensors in enumerate(wanted):
            expected, found = [id(parameters[t]) for t in tensors], self._seen[number]
            if expected != found:
                odd = next(
                    (t for t, f in zip(tensors, found, strict=False) if id(parameters[t]) != f),
                    tensors[-1],
                )
                self.mismatch = f"bucket {number} holds other gradients at {names[odd]!r}"
                return
            elements = sum(parameters[t].numel() for t in tensors)
            if self._values[number] != elements:
                self.mismatch = (
                    f"bucket {number} has {self._values[number]} values for the {elements} "
                    f"elements from {names[tensors[0]]!r} on"
                )
                return
        self._buckets = _Buckets.USABLE

    def _exchange_now(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()

        # An error is raised when backward ends: C++ code would wrap errors of futures and hooks in
        # its own messages.
        def first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return future.value()[0]
            except RuntimeError as error:
                self._engine.lose(error)
                return buffer

        bucket_elements(bucket).mul_(self._share)
        try:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
        except RuntimeError as error:
            self._engine.lose(error)
            return _done(buffer)
        assert work is not None
        done: torch.futures.Future[torch.Tensor] = work.get_future().then(first)
        return done

    def _before(self, *_: Any) -> None:
        """Finish what is pending of the round before, before a gradient is accumulated.

        Raises:
            PeerError: the backward pass before broke off; torch's own check, in the forward pass,
                finds this first wherever a gradient had reached the reducer.
        """
        if self._backward is not _Backward.NONE:
            if self._expected:
                raise PeerError(
                    "the last backward pass broke off while gradients were exchanged, so the ranks "
                    "have parted; resume all of them from the last checkpoint"
                )
            return
        if self._deferral.pending:
            self._deferral.settle()
        if not self._expected:
            return
        self._expected = False
        by_engine = self._buckets is _Buckets.USABLE
        self._backward = _Backward.ENGINE if by_engine else _Backward.REDUCER
        self._views.begin()
        if by_engine:
            self._engine.begin(self._roll())

    def _accumulated(self, index: int, *_: Any) -> None:
        # Python's hooks on a node run where the first of them was registered, which may be before
        # the present reducer's hook: so that may not have copied the gradient yet.
        if self._backward is _Backward.ENGINE and self._views.take(index):
            self._engine.tensor_ready(index)

    def _end(self) -> None:
        if self._backward is _Backward.NONE:
            return
        by_engine = self._backward is _Backward.ENGINE
        self._backward = _Backward.NONE
        if self._buckets is _Buckets.FIRST:
            self._buckets = _Buckets.UNKNOWN
        self._engine.check()
        if by_engine:
            self._engine.wait(self._views.foreign)
        self._views.end(known=self._buckets is _Buckets.USABLE)
        if by_engine and self.defer:
            self._deferral.suspend_gradients()
        else:
            if by_engine:
                self._deferral.wait_for_all()
            if self._compressor is not None:
                self._compressor.close([p.grad for p in self._deferral.parameters])
        self._finished()


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done = _future_of(buffer)
    done.set_result(buffer)
    return done


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] = (
        [buffer.device] if buffer.device.type == "cuda" else []
    )
    return torch.futures.Future(devices=devices)


def accumulator(parameter: nn.Parameter) -> Node:
    """Return the node that accumulates a parameter's gradient, also of one that is frozen now."""
    with thawed([parameter]):
        return get_gradient_edge(parameter).node


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object is alive, but does not keep it so.

    The garbage collector cannot see hooks on parameters and reducers. If these kept the object
    alive, the wrapper would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


class GradientHooks:
    """Hooks on the nodes that accumulate gradients, until they are removed or this is dropped."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []
        """The nodes with hooks; kept alive, since a node that is freed loses its hooks."""
        # Parameters outlive their wrapper: when it is dropped, its hooks are removed.
        weakref.finalize(self, _take_off, self._handles).atexit = False

    def add(
        self,
        parameter: nn.Parameter,
        before: Callable[..., None],
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call functions before and after a parameter's gradient is accumulated."""
        node = accumulator(parameter)
        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        if after is not None:
            self._handles.append(node.register_hook(after))

    def remove(self) -> None:
        """Remove them."""
        _take_off(self._handles)
        self._nodes.clear()


@contextmanager
def thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let frozen parameters require gradients for a moment."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _take_off(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
