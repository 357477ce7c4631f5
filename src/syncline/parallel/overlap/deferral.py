"""``Deferral``: the gradients that are still being exchanged, and the updates that are due."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from syncline.errors import SynclineError
from syncline.model.profile import Norm
from syncline.parallel.engine.engine import Engine, Round
from syncline.parallel.engine.recording import GateTimes
from syncline.parallel.overlap.clipping import Change, make_changes
from syncline.parallel.overlap.deferred_step import DeferredStep, TorchState
from syncline.parallel.overlap.guard import Guard, lift, lifted
from syncline.parallel.overlap.pending import (
    UPDATES,
    hand_over,
    index_of,
    is_pending,
    keep_updates_whole_in_forks,
    release,
    suspend,
)
from syncline.sparse.gradients import flat
from syncline.torch_private import current_graph_task, foreach_zero_, without_torch_function

KEPT_GATES = 4096
"""Gates whose times are kept: an iteration has at most one for each module."""


AverageUpdate = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Updates some averages with their parameters, each by itself."""


class Deferral:
    """Knows which gradients and parameters of a model are pending, and finishes them.

    A gradient is pending from the end of the backward pass until its messages have arrived; a
    parameter from the optimizer's ``step`` until that update has been made. Each is finished where
    it is first read: by the gate of the module that owns it, or by any other use, on any thread
    (:mod:`.pending` says how).

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
        keep_updates_whole_in_forks()
        self._trainer = threading.get_ident()
        """The thread that trains. What others read counts for nothing that ranks must agree on."""
        self._stream: Any = None
        """On CUDA, the stream it trains on."""
        self.in_forward = False
        """Whether the model's forward pass runs: it reads parameters one after the other."""
        self._rounds = self._early_reads = self._flushes = 0
        self._read_early = self._flushed = False
        """Whether that happened in the present round."""
        self._gradients: dict[int, torch.Tensor] = {}
        """Pending gradients, each the view of its bucket."""
        self._due: dict[int, DeferredStep] = {}
        """By parameter: the update that was asked for and is not complete yet."""
        self._maker = 0
        """The thread that makes some, for which they are plain tensors; 0 if none does."""
        self._averages: dict[int, list[tuple[AverageUpdate, torch.Tensor]]] = {}
        """By parameter: averages to be updated after its due update, in this order."""
        self._read: set[int] = set()
        """Pending gradients that have arrived; see :func:`own_class`."""
        self._changes: dict[int, list[Change]] = {}
        """By pending gradient: changes to be made before its update, in this order."""
        self._norms: torch.Tensor | None = None
        """The norms of this round, once asked for."""
        self.asked_norm: Norm | None = None
        """The norm that was asked for last and that the plan does not have."""
        self._zeroed: set[int] = set()
        """Pending gradients that are set to zero after their update."""
        self._compiled: set[int] = set()
        """Parameters that compiled code reads."""
        self._stalling_ns = 0
        self.stall_ns = 0
        """How long computation waited for gradients of the last round."""
        self._gates: deque[GateTimes] = deque(maxlen=KEPT_GATES)

    @property
    def trains_here(self) -> bool:
        """Whether this thread trains, be it one of autograd's."""
        return threading.get_ident() == self._trainer or current_graph_task() >= 0

    @property
    def _makes_here(self) -> bool:
        return threading.get_ident() == self._maker

    def train_here(self) -> None:
        """Note that this thread trains."""
        self._trainer = threading.get_ident()
        device = self.parameters[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """On CUDA, put work of a thread that does not train into the stream of the training."""
        if self._stream is None or self.trains_here:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @property
    def pending(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._gradients or self._due) or self.engine.exchanging

    @property
    def anything_due(self) -> bool:
        """Whether any update was asked for and is not complete yet."""
        return bool(self._due)

    def take_gates(self) -> list[GateTimes]:
        """Return the times of the gates since the last call."""
        taken = list(self._gates)
        self._gates.clear()
        return taken

    def take_counts(self) -> tuple[int, int, int]:
        """Return counts since the last call: of rounds, of early reads and of flushes.

        Those are rounds whose gradients were read before ``step``, and rounds whose updates were
        made outside a forward pass.
        """
        counts = self._rounds, self._early_reads, self._flushes
        self._rounds = self._early_reads = self._flushes = 0
        return counts

    # ------------------------------------------------------------------ after backward

    def suspend_gradients(self) -> None:
        """Make the gradients pending: the backward pass is over, their exchange is not."""
        engine = self.engine
        self._rounds += 1
        self._early_reads += self._read_early
        self._flushes += self._flushed
        self._read_early = self._flushed = False
        self.stall_ns, self._stalling_ns = self._stalling_ns, 0
        self._norms = None
        with UPDATES:
            for index, parameter in enumerate(self.parameters):
                gradient = parameter.grad
                if gradient is None or is_pending(gradient):
                    continue
                # Ranks differ in which gradients have arrived, and must not in where a norm comes
                # from. On CUDA, too, the host has waited for what has arrived.
                if engine.plan.norm is None and engine.arrived(index):
                    continue
                self._suspend(gradient, index)
                if self.guard is not None:
                    parameter.grad = gradient  # refers to the C++ tensor, which may have changed
                self._gradients[index] = gradient

    # ------------------------------------------------------------------ the update

    @property
    def pending_gradients(self) -> bool:
        """Whether any gradient is being exchanged."""
        return bool(self._gradients)

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Say whether a parameter's gradient is being exchanged."""
        gradient = self._gradients.get(self.index_of.get(id(parameter), -1))
        return gradient is not None and gradient is parameter.grad

    def is_due(self, parameter: torch.Tensor) -> bool:
        """Say whether a parameter's update was asked for and is not complete yet."""
        return self.index_of.get(id(parameter)) in self._due

    def defer(self, step: DeferredStep, parameters: Iterable[nn.Parameter]) -> None:
        """Make the update of parameters with pending gradients due; call under the lock."""
        chosen = list(parameters)
        # A second backward pass through a graph with the old values raises torch's error, as after
        # an update that was made at once.
        increment_version(chosen)
        for parameter in chosen:
            index = self.index_of[id(parameter)]
            self._due[index] = step
            self._suspend(parameter, index)
        step.suspend(len(chosen))

    def average(self, averages: Mapping[int, torch.Tensor], update: AverageUpdate) -> None:
        """Update averages, by their parameters' indices, right after the updates of these.

        Call under the lock.
        """
        torch_state = TorchState.now(self.parameters[0].device.type)

        def update_later(averages: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
            with torch_state.restored():
                update(averages, parameters)

        for index, average in averages.items():
            self._averages.setdefault(index, []).append((update_later, average))
            suspend(average, self, index, is_average=True)

    # ------------------------------------------------------------------ the forward pass

    def begin_forward(self) -> None:
        """Call before a forward pass: finishes what that reads without a gate."""
        if torch.is_grad_enabled():
            self.train_here()
        self.in_forward |= self.trains_here
        if self._due and self._compiled:
            self.gate("compiled code", sorted(self._compiled))

    def end_forward(self) -> None:
        """Call after it."""
        self.in_forward &= not self.trains_here

    def note_compiled(self, indices: Iterable[int]) -> None:
        """Note that compiled code without a gate reads some parameters."""
        self._compiled.update(indices)

    # ------------------------------------------------------------------ what finishes it

    def gate(self, label: str, indices: Sequence[int]) -> None:
        """Make the due updates of some parameters, which are about to be used."""
        engine, began_ns, waited = self.engine, time.perf_counter_ns(), None
        while True:
            with UPDATES:
                due = [index for index in indices if index in self._due]
                if not due or self._makes_here:
                    return
                engine.check()
                arrived_ns, round_ = time.perf_counter_ns(), engine.round
                # On CUDA the host has not waited for what this thread's stream waits for. Another
                # thread may have gone on to the next round.
                here = set(due) if waited is round_ else set()
                # One call of the optimizer costs as much for many parameters as for one.
                ready = [i for i in self._due if i in here or engine.arrived(i)]
                if ready:
                    with self._in_order():
                        engine.wait(ready)  # on CUDA, also for norms that are only issued
                        self._apply(ready)
                    if self.trains_here:
                        ended_ns = time.perf_counter_ns()
                        self._gates.append(GateTimes(label, began_ns, arrived_ns, ended_ns))
                        began_ns = ended_ns
                    continue
            self._wait(due, round_)
            waited = round_

    def read_parameters(self, indices: list[int]) -> None:
        """Finish parameters that are read without a gate."""
        if self.in_forward or not self.trains_here:
            self.gate(self.names[indices[0]], indices)
        else:
            self.flush()

    def read_gradients(self, indices: list[int]) -> None:
        """Finish gradients that are read.

        If no update is due, all gradients: code that reads one reads the others next.
        """
        if self._makes_here:
            return
        if not self.trains_here:
            self._read_elsewhere(indices)
            return
        if not self._due.keys().isdisjoint(indices):
            self.flush()
            return
        if self._read.issuperset(indices):
            return
        if self._due:  # of another optimizer
            self._wait(indices)
            self._deliver(indices)
            return
        self._read_early = True
        self._wait_for_gradients()
        self._deliver(self._gradients)

    def _read_elsewhere(self, indices: Iterable[int]) -> None:
        """Finish gradients that a thread reads which does not train."""
        left = list(indices)
        while left:
            with UPDATES:
                left = [i for i in left if i in self._gradients and i not in self._read]
                due, round_ = [i for i in left if i in self._due], self.engine.round
            if due:
                self.gate(self.names[due[0]], due)
            elif left:
                self._wait(left, round_)
                with UPDATES, self._in_order():
                    if self.engine.round is round_:
                        self.engine.wait(left, round_)
                        self._deliver(i for i in left if i not in self._due)

    def _deliver(self, indices: Iterable[int]) -> None:
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
        """Make gradients that have been read plain tensors: their step uses them.

        Call under the lock.
        """
        indices = [self.index_of.get(id(parameter), -1) for parameter in parameters]
        self._release_gradients(self._read.intersection(indices))

    # ------------------------------------------------------------------ before the update

    def norms(self, indices: Sequence[int], norm: Norm) -> list[torch.Tensor] | None:
        """Return the norms of pending gradients, in their dtype; None if others are exchanged.

        Ranks differ in which gradients have been read, so the norms of these are computed in the
        same way as the exchanged ones.
        """
        if not self._due.keys().isdisjoint(indices):
            return None
        if self.engine.plan.norm != norm:
            self.asked_norm = norm
            return None
        changed = [c for index in indices for c in self._changes.get(index, ())]
        if not all(change.is_exact for change in changed):
            self.read_gradients(list(indices))
        exchanged = () if self._read.issuperset(indices) else self._exchanged_norms()
        found = []
        read = self._read.intersection(indices)
        with UPDATES, lifted([(self._gradients[index], None) for index in read]):
            for index in indices:
                gradient = self._gradients[index]
                if index in self._read:
                    value = self.engine.local_norm(index, flat(gradient))
                else:
                    value = exchanged[index]
                    for change in self._changes.get(index, ()):
                        assert change.factor is not None
                        value = value * abs(float(change.factor))
                found.append(value.to(gradient.dtype.to_real()))
        return found

    def all_finite(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return whether pending gradients have finite elements only; None if they must be read."""
        if self.engine.plan.norm is None:
            self.asked_norm = self.asked_norm or "2"
            return None
        # The square of a float64 may be too large for one.
        if any(
            i in self._due
            or i in self._read
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
            self._stalling_ns += ended_ns - began_ns
            self._gates.append(GateTimes("norms", began_ns, ended_ns, ended_ns))
        return self._norms

    def change(self, gradients: list[torch.Tensor], change: Change) -> None:
        """Change gradients: before their update or, if that is due, after it."""
        with UPDATES:
            indices = [index_of(gradient) for gradient in filter(is_pending, gradients)]
            due = not self._due.keys().isdisjoint(indices)
        if due:
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
        """Make the due changes of gradients that have arrived; call under the lock."""
        due: dict[tuple[int, ...], tuple[list[Change], list[torch.Tensor]]] = {}
        for index in indices:
            changes = self._changes.pop(index, [])
            if changes:
                alike = due.setdefault(tuple(map(id, changes)), (changes, []))
                alike[1].append(self._gradients[index])
        with torch.no_grad():
            for changes, gradients in due.values():
                with lifted([(gradient, None) for gradient in gradients]):
                    make_changes(changes, gradients)

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Set gradients to zero: those whose update is due once that is made."""
        with UPDATES:
            pending = [gradient for gradient in gradients if is_pending(gradient)]
            due = self._due.keys() & {index_of(gradient) for gradient in pending}
            self._zeroed |= due
            unused = [index_of(g) for g in pending if index_of(g) not in due]
            now = [g for g in gradients if not is_pending(g) or index_of(g) not in due]
        if unused:
            self.read_gradients(unused)
            with UPDATES:
                self._release_gradients(unused)
        for gradient in now:
            gradient.zero_()

    def flush(self) -> None:
        """Finish everything because something was read outside the forward pass."""
        self._flushed |= self.trains_here
        self.finish()

    def finish(self) -> None:
        """Finish everything that is pending, on any thread; see :meth:`settle`."""
        if self.trains_here:
            self.settle()
        else:  # the training thread may have begun the next round
            self.gate("everything", range(len(self.parameters)))
            self._read_elsewhere(range(len(self.parameters)))

    def settle(self) -> None:
        """Finish everything, on the thread that trains: all gradients arrive, all updates are made.

        Raises:
            PeerError: a rank failed; the due updates are lost.
            MismatchError: the ranks have parted.
        """
        if self._makes_here:
            return
        everything = range(len(self.parameters))
        self.gate("everything", everything)
        self._wait(everything)
        self.engine.wait_all()
        with UPDATES:
            self._release_gradients(self._gradients)

    def outlive(self) -> None:
        """Call when the wrapper is dropped: pending gradients can still be read."""
        with UPDATES:
            self._release_gradients(self._read - self._due.keys())
            left = {i: gradient for i, gradient in self._gradients.items() if i not in self._due}
            if left:
                orphans = _Orphans(self.engine, left, self._changes)
                for index, gradient in left.items():
                    lift(gradient, self.parameters[index])
                    hand_over(gradient, orphans)

    def wait_for_all(self) -> None:
        """Return once all gradients are in place, at the end of a backward pass that waits."""
        self.stall_ns, self._stalling_ns = self._stalling_ns, 0
        self._wait_for_gradients()

    def _wait_for_gradients(self) -> None:
        began_ns = time.perf_counter_ns()
        self._wait(range(len(self.parameters)))
        arrived_ns = time.perf_counter_ns()
        self._gates.append(GateTimes("all gradients", began_ns, arrived_ns, arrived_ns))

    def _wait(self, tensors: Sequence[int], of: Round | None = None) -> None:
        began_ns = time.perf_counter_ns()
        self.engine.wait(tensors, of)
        if self.trains_here:
            self._stalling_ns += time.perf_counter_ns() - began_ns

    def _apply(self, indices: Sequence[int]) -> None:
        """Make due updates whose gradients have arrived; call under the lock.

        For this thread their tensors are plain ones meanwhile. For all others they stay pending
        until everything is done: the changes of the gradients, the updates and the averages.
        """
        by_step: dict[DeferredStep, list[int]] = {}
        for index in indices:
            by_step.setdefault(self._due[index], []).append(index)
        self._maker = threading.get_ident()
        parameters = [(self.parameters[index], None) for index in indices]
        gradients = [(self._gradients[index], self.parameters[index]) for index in indices]
        try:
            with lifted([*parameters, *gradients]):
                for step, members in by_step.items():
                    with step.torch_state.restored():
                        self._make_changes(members)
                        step.apply(
                            [self.parameters[index] for index in members],
                            [self._gradients[index] for index in members],
                        )
                        zeroed = self._zeroed.intersection(members)
                        if zeroed:
                            foreach_zero_([self._gradients[index] for index in zeroed])
                # Before anyone can change a parameter again.
                self._average(indices)
            for step, members in by_step.items():
                step.made(len(members))
            for index in indices:
                release(self.parameters[index])
                for _, average in self._averages.pop(index, ()):
                    release(average)
            self._zeroed.difference_update(indices)
            self._release_gradients(indices)
            for index in indices:
                del self._due[index]
        except BaseException as error:
            self._spoil(indices, error)
            raise
        finally:
            self._maker = 0

    def _average(self, indices: Iterable[int]) -> None:
        found: dict[AverageUpdate, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index in self._averages.keys() & set(indices):
            for update, average in self._averages[index]:
                averages, parameters = found.setdefault(update, ([], []))
                averages.append(average)
                parameters.append(self.parameters[index])
        for update, (averages, parameters) in found.items():
            update(averages, parameters)

    def _spoil(self, indices: Sequence[int], error: BaseException) -> None:
        """Let every read fail from now on: which parameters were updated is unknown."""
        self.engine.fail(
            SynclineError(
                f"rank {self.engine.rank}: the update of {self.names[indices[0]]!r} and "
                f"{len(indices) - 1} other parameters was broken off by {type(error).__name__}: "
                f"{error}; resume all ranks from the last checkpoint"
            )
        )

    def _release_gradients(self, indices: Iterable[int]) -> None:
        """Make gradients that have arrived plain tensors; call under the lock."""
        found = [index for index in indices if index in self._gradients]
        for index in found:
            lift(self._gradients[index], self.parameters[index])
        self._make_changes(found)
        for index in found:
            release(self._gradients.pop(index))
        self._read.difference_update(found)

    def _suspend(self, tensor: torch.Tensor, index: int) -> None:
        if self.guard is None:
            suspend(tensor, self, index)
        else:
            self.guard.suspend(tensor, self, index)


class _Orphans:
    """Finishes the gradients that were under way when their model's wrapper was dropped.

    Each gradient keeps this object alive, which keeps none of them alive: a parameter refers to its
    gradient where garbage collection cannot look, so a circle would never be freed.
    """

    trains_here = True
    """On all threads alike: there is no training any more."""

    def __init__(
        self,
        engine: Engine,
        gradients: Mapping[int, torch.Tensor],
        changes: Mapping[int, Sequence[Change]],
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._gradients = {index: weakref.ref(gradient) for index, gradient in gradients.items()}

    def read_parameters(self, indices: list[int]) -> None:
        """No update is due."""
        raise AssertionError(f"parameters {indices} wait for no gradient")

    def read_gradients(self, indices: list[int]) -> None:  # noqa: ARG002
        """Wait for all gradients."""
        self._engine.wait(self._gradients)
        with UPDATES:
            for index, reference in self._gradients.items():
                gradient = reference()
                if gradient is not None and is_pending(gradient):
                    with without_torch_function():
                        make_changes(self._changes.get(index, ()), [gradient])
                    release(gradient)

    def norms(self, indices: Sequence[int], norm: Norm) -> None:
        """Return None: they are not exchanged any more."""

    def all_finite(self, indices: Sequence[int]) -> None:
        """Return None."""

    def change(self, gradients: list[torch.Tensor], change: Change) -> None:
        """Wait for all gradients, and change some."""
        self.read_gradients([])
        change.make(gradients)

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Wait for all gradients, and set some to zero."""
        self.read_gradients([])
        for gradient in gradients:
            gradient.zero_()
