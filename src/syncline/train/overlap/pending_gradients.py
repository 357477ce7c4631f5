"""``PendingGradients``: the gradients of a model that are still being exchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from syncline.plan.profile import Norm
from syncline.torch_private import current_graph_task
from syncline.train.engine.engine import Engine
from syncline.train.engine.message_threads import Round
from syncline.train.overlap import pending
from syncline.train.overlap.clipping import Change, Owner, make_changes
from syncline.train.overlap.deferred_step import DeferredStep
from syncline.train.overlap.guard import Guard, lift, lifted
from syncline.train.overlap.pending import UPDATES, index_of, is_pending, release
from syncline.train.overlap.waits import Waits
from syncline.train.sparse.gradients import flat

T = TypeVar("T")


class PendingGradients(Owner):
    """Knows which gradients are pending, their norms, and the changes to make to them.

    A gradient is pending from the end of the backward pass until its messages have arrived, or
    until its deferred update is made (:class:`~syncline.train.overlap.deferral.Deferral`).

    The parameters are the exchanged ones, by name, in the order of the plan's tensors.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], engine: Engine, guard: Guard | None
    ) -> None:
        self.engine = engine
        self.guard = guard
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.index_of = {id(p): index for index, p in enumerate(self.parameters)}
        self._everything = range(len(self.parameters))
        self.waits = Waits()
        pending.keep_updates_whole_in_forks()
        self._trainer = threading.get_ident()
        """The training thread. Reads by others must not affect anything that ranks agree on."""
        self.stream: Any = None  # on CUDA, the stream it trains on
        self._gradients: dict[int, torch.Tensor] = {}  # pending gradients, as views of the buckets
        self._deferred: dict[int, DeferredStep] = {}  # by parameter: the step to update it
        self._read: set[int] = set()  # pending gradients that have arrived; see ``own_class``
        self._changes: dict[int, list[Change]] = {}  # by gradient: to be made before its update
        self._norms: torch.Tensor | None = None  # the norms of this round, once asked for
        self._zeroed: set[int] = set()  # pending gradients that are set to zero after their update

    @property
    def trains_here(self) -> bool:
        """Whether this is the training thread, or one of autograd's threads."""
        return threading.get_ident() == self._trainer or current_graph_task() >= 0

    def train_here(self) -> None:
        """Note that this thread trains."""
        self._trainer = threading.get_ident()
        device = self.parameters[0].device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """On CUDA, put work of another stream, as of another thread's, on the training stream."""
        if not self._on_other_stream:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
        self.wait_for_stream()

    @property
    def _on_other_stream(self) -> bool:
        stream = self.stream
        return stream is not None and bool(torch.cuda.current_stream(stream.device) != stream)

    def wait_for_stream(self) -> None:
        """On CUDA, let work on another stream follow what was put on the training stream."""
        if self._on_other_stream:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def suspend_gradients(self) -> None:
        """Make the gradients pending: the backward pass is over, their exchange is not."""
        engine = self.engine
        self.waits.end_round()
        self._norms = None
        with UPDATES:
            for index, parameter in enumerate(self.parameters):
                gradient = parameter.grad
                if gradient is None or is_pending(gradient):
                    continue
                # With norms even those that have arrived: all ranks must compute norms in the same
                # way, and ranks differ in what has arrived.
                if engine.plan.norm is None and engine.arrived(index):
                    continue
                self._suspend(gradient, index)
                if self.guard is not None:
                    parameter.grad = gradient  # refers to the C++ tensor, which may have changed
                self._gradients[index] = gradient

    def _suspend(self, tensor: torch.Tensor, index: int) -> None:
        if self.guard is None:
            pending.suspend(tensor, self, index)
        else:
            self.guard.suspend(tensor, self, index)

    @property
    def pending_gradients(self) -> bool:
        """Whether any gradient is being exchanged."""
        return bool(self._gradients)

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Say whether a parameter's gradient is being exchanged."""
        gradient = self._gradients.get(self.index_of.get(id(parameter), -1))
        return gradient is not None and gradient is parameter.grad

    def wait_for(self, tensors: Sequence[int]) -> None:
        """Return once the gradients of some tensors are in place."""
        if tensors:
            self._wait(tensors)

    def wait_for_all(self) -> None:
        """Return once all gradients are in place, at the end of a backward pass that waits."""
        self.waits.end_backward()
        self._wait_for_gradients()

    def _wait_for_gradients(self) -> None:
        began_ns = time.perf_counter_ns()
        self._wait(self._everything)
        arrived_ns = time.perf_counter_ns()
        self.waits.note("all gradients", began_ns, arrived_ns, arrived_ns)

    def _wait(self, tensors: Sequence[int], of: Round | None = None) -> None:
        self._stalled_by(lambda: self.engine.wait(tensors, of))

    def _stalled_by(self, wait: Callable[[], T]) -> T:
        """Run a wait, and count its time if the training thread waits."""
        began_ns = time.perf_counter_ns()
        found = wait()
        if self.trains_here:
            self.waits.stalling_ns += time.perf_counter_ns() - began_ns
        return found

    def deliver(self, indices: Iterable[int]) -> None:
        """Give the program gradients that have arrived."""
        with UPDATES:
            if self.engine.plan.norm is None:
                self._release_gradients(indices)
                return
            for index in indices:
                if index in self._gradients and index not in self._read:
                    lift(self._gradients[index], self.parameters[index])
                    self._make_changes([index])
                    self._read.add(index)

    def release_read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Turn gradients that have been read into plain tensors; call under the lock."""
        indices = [self.index_of.get(id(parameter), -1) for parameter in parameters]
        self._release_gradients(self._read.intersection(indices))

    def _release_gradients(self, indices: Iterable[int]) -> None:
        """Turn gradients that have arrived into plain tensors; call under the lock."""
        found = [index for index in indices if index in self._gradients]
        for index in found:
            lift(self._gradients[index], self.parameters[index])
        self._make_changes(found)
        for index in found:
            release(self._gradients.pop(index))
        self._read.difference_update(found)

    def norms(self, indices: Sequence[int], norm: Norm) -> list[torch.Tensor] | None:
        """Return the norms of pending gradients, in their dtype; None if they are not exchanged."""
        if not (self._deferred.keys().isdisjoint(indices) and self._gradients.keys() >= {*indices}):
            return None
        if self.engine.plan.norm != norm:
            self.waits.asked_norm = norm
            return None
        changed = [c for index in indices for c in self._changes.get(index, ())]
        if not all(change.is_exact for change in changed):
            self.read_gradients(list(indices))
        exchanged = () if self._read.issuperset(indices) else self._exchanged_norms()
        share_norms = self.engine.share_norms
        assert share_norms is not None
        found = []
        read = self._read.intersection(indices)
        with UPDATES, lifted([(self._gradients[index], None) for index in read]):
            for index in indices:
                gradient = self._gradients[index]
                if index in self._read:  # computed as the exchange does, for ranks that have not
                    value = share_norms.local(index, flat(gradient))
                else:
                    value = exchanged[index]
                    for change in self._changes.get(index, ()):
                        assert change.factor is not None
                        value = value * abs(float(change.factor))
                found.append(value.to(gradient.dtype.to_real()))
        return found

    def all_finite(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return whether pending gradients are finite throughout; None if they must be read."""
        if self.engine.plan.norm is None:
            self.waits.asked_norm = self.waits.asked_norm or "2"
            return None
        # The square of a float64 may overflow float64.
        if any(
            i in self._deferred
            or i in self._read
            or i not in self._gradients
            or self._changes.get(i)
            or self._gradients[i].dtype.to_real() == torch.float64
            for i in indices
        ):
            return None
        norms = self._exchanged_norms()
        return norms[torch.tensor(indices, device=norms.device)].isfinite().all()

    def _exchanged_norms(self) -> torch.Tensor:
        if self._norms is None:
            began_ns = time.perf_counter_ns()
            self._norms = self.engine.norms()
            ended_ns = time.perf_counter_ns()
            self.waits.stalling_ns += ended_ns - began_ns
            self.waits.note("norms", began_ns, ended_ns, ended_ns)
        return self._norms

    def change(self, gradients: list[torch.Tensor], change: Change) -> None:
        """Change gradients once they arrive; if their update is already deferred, make it first."""
        with UPDATES:
            indices = [index_of(gradient) for gradient in filter(is_pending, gradients)]
            deferred = not self._deferred.keys().isdisjoint(indices)
        if deferred:
            self.read_gradients(indices)
        with UPDATES:
            present = []
            for gradient in gradients:
                if not is_pending(gradient) or index_of(gradient) in self._read:
                    present.append(gradient)
                else:
                    self._changes.setdefault(index_of(gradient), []).append(change)
            with lifted([(gradient, None) for gradient in present]):
                change.make(present)

    def _make_changes(self, indices: Iterable[int]) -> None:
        """Make the deferred changes of gradients that have arrived; call under the lock."""
        deferred: dict[tuple[int, ...], tuple[list[Change], list[torch.Tensor]]] = {}
        for index in indices:
            changes = self._changes.pop(index, [])
            if changes:
                alike = deferred.setdefault(tuple(map(id, changes)), (changes, []))
                alike[1].append(self._gradients[index])
        with torch.no_grad():
            for changes, gradients in deferred.values():
                with lifted([(gradient, None) for gradient in gradients]):
                    make_changes(changes, gradients)

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Set gradients to zero: now, or after their update if that is deferred."""
        with UPDATES:
            indices = [index_of(gradient) for gradient in gradients if is_pending(gradient)]
            deferred = self._deferred.keys() & set(indices)
            self._zeroed |= deferred
            unused = [index for index in indices if index not in deferred]
            now = [g for g in gradients if not is_pending(g) or index_of(g) not in deferred]
        if unused:
            self.read_gradients(unused)
            with UPDATES:
                self._release_gradients(unused)
        for gradient in now:
            gradient.zero_()
