"""``Deferral``: the gradients that are still being exchanged, and the updates that are due."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from syncline.errors import SynclineError
from syncline.model.profile import Norm
from syncline.parallel.engine.engine import Engine
from syncline.parallel.engine.recording import GateTimes
from syncline.parallel.overlap.clipping import Change, make_changes
from syncline.parallel.overlap.deferred_step import DeferredStep, TorchState
from syncline.parallel.overlap.guard import Guard, lift
from syncline.parallel.overlap.pending import (
    hand_over,
    is_pending,
    own_class,
    release,
    suspend,
)
from syncline.sparse.gradients import flat
from syncline.torch_private import foreach_zero_

KEPT_GATES = 4096
"""Gates whose times are kept: an iteration has at most one for each module."""


AverageUpdate = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Updates some averages with their parameters, each by itself."""


class Deferral:
    """Knows which gradients and parameters of a model are pending, and finishes them.

    A gradient is pending from the end of the backward pass until its messages have arrived; a
    parameter from the optimizer's ``step`` until that update has been made. Each is finished where
    it is first read: by the gate of the module that owns it, or by any other use.

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
        self.in_forward = False
        """Whether the model's forward pass runs: it reads parameters one after the other."""
        self._rounds = self._early_reads = self._flushes = 0
        self._read_early = self._flushed = False
        """Whether that happened in the present round."""
        self._gradients: dict[int, torch.Tensor] = {}
        """Pending gradients, each the view of its bucket."""
        self._due: dict[int, DeferredStep] = {}
        """By parameter: the update that was asked for and is not made yet."""
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
    def pending(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._gradients or self._due) or self.engine.exchanging

    @property
    def anything_due(self) -> bool:
        """Whether any update was asked for and is not made yet."""
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
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or is_pending(gradient):
                continue
            # Ranks differ in which gradients have arrived, and must not in where a norm comes from.
            # On CUDA, too, the host has waited for what has arrived.
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
        """Say whether a parameter's update was asked for and is not made yet."""
        return self.index_of.get(id(parameter)) in self._due

    def defer(self, step: DeferredStep, parameters: Iterable[nn.Parameter]) -> None:
        """Make the update of parameters with pending gradients due."""
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
        """Update averages, by their parameters' indices, right after the updates of these."""
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
        self.in_forward = True
        if self._due and self._compiled:
            self.gate("compiled code", sorted(self._compiled))

    def end_forward(self) -> None:
        """Call after it."""
        self.in_forward = False

    def note_compiled(self, indices: Iterable[int]) -> None:
        """Note that compiled code without a gate reads some parameters."""
        self._compiled.update(indices)

    # ------------------------------------------------------------------ what finishes it

    def gate(self, label: str, indices: Sequence[int]) -> None:
        """Make the due updates of some parameters, which are about to be used."""
        due = [index for index in indices if index in self._due]
        if not due:
            return
        engine = self.engine
        engine.check()
        began_ns = time.perf_counter_ns()
        while not all(map(engine.arrived, due)):
            # Meanwhile, make the updates whose gradients have arrived.
            others = [index for index in self._due if engine.arrived(index)]
            if not others:
                self._wait(due)
                break
            arrived_ns = time.perf_counter_ns()
            self._apply(others)
            updated_ns = time.perf_counter_ns()
            self._gates.append(GateTimes(label, began_ns, arrived_ns, updated_ns))
            began_ns = updated_ns
        arrived_ns = time.perf_counter_ns()
        engine.wait(due)  # on CUDA, also for norms that read the gradients and are only issued
        # One call of the optimizer costs as much for many parameters as for one.
        wanted = set(due)
        self._apply([i for i in self._due if i in wanted or engine.arrived(i)])
        self._gates.append(GateTimes(label, began_ns, arrived_ns, time.perf_counter_ns()))

    def read_parameters(self, indices: list[int]) -> None:
        """Finish parameters that are read without a gate."""
        if self.in_forward:
            self.gate(self.names[indices[0]], indices)
        else:
            self.flush()

    def read_gradients(self, indices: list[int]) -> None:
        """Finish gradients that are read.

        If no update is due, all gradients: code that reads one reads the others next.
        """
        if any(index in self._due for index in indices):
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
        self._deliver(list(self._gradients))

    def _deliver(self, indices: Iterable[int]) -> None:
        if self.engine.plan.norm is None:
            self._release_gradients(indices)
            return
        for index in indices:
            if index in self._gradients and index not in self._read:
                self._read.add(index)
                lift(self._gradients[index], self.parameters[index])
                with own_class([self._gradients[index]]):
                    self._make_changes([index])

    def release_read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make gradients that have been read plain tensors: their step uses them."""
        indices = [self.index_of.get(id(parameter), -1) for parameter in parameters]
        self._release_gradients(self._read.intersection(indices))

    # ------------------------------------------------------------------ before the update

    def norms(self, indices: Sequence[int], norm: Norm) -> list[torch.Tensor] | None:
        """Return the norms of pending gradients, in their dtype; None if others are exchanged.

        Ranks differ in which gradients have been read, so the norms of these are computed in the
        same way as the exchanged ones.
        """
        if any(index in self._due for index in indices):
            return None
        if self.engine.plan.norm != norm:
            self.asked_norm = norm
            return None
        changed = [c for index in indices for c in self._changes.get(index, ())]
        if not all(change.is_exact for change in changed):
            self.read_gradients(list(indices))
        found = []
        for index in indices:
            gradient = self._gradients[index]
            if index in self._read:
                with own_class([gradient]):
                    value = self.engine.local_norm(index, flat(gradient))
            else:
                value = self._exchanged_norms()[index]
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

    def change(self, indices: list[int], change: Change) -> None:
        """Change pending gradients: before their update or, if that is due, after it."""
        gradients = {index: self._gradients[index] for index in indices}
        if not self._due.keys().isdisjoint(indices):
            self.read_gradients(indices)
        present = [g for i, g in gradients.items() if i in self._read or not is_pending(g)]
        if present:
            with own_class(present):
                change.make(present)
        for index, gradient in gradients.items():
            if index not in self._read and is_pending(gradient):
                self._changes.setdefault(index, []).append(change)

    def _make_changes(self, indices: Iterable[int]) -> None:
        """Make the due changes of gradients that have arrived."""
        due: dict[tuple[int, ...], tuple[list[Change], list[torch.Tensor]]] = {}
        for index in indices:
            changes = self._changes.pop(index, [])
            if changes:
                alike = due.setdefault(tuple(map(id, changes)), (changes, []))
                alike[1].append(self._gradients[index])
        with torch.no_grad():
            for changes, gradients in due.values():
                make_changes(changes, gradients)

    def zero_gradients(self, indices: list[int]) -> None:
        """Set gradients to zero: those whose update is due once that is made."""
        unused = [index for index in indices if index not in self._due]
        if unused:
            gradients = [self._gradients[index] for index in unused]
            self.read_gradients(unused)
            self._release_gradients(unused)
            for gradient in gradients:
                gradient.zero_()
        self._zeroed.update(index for index in indices if index in self._due)

    def flush(self) -> None:
        """Finish everything because something was read outside the forward pass."""
        self._flushed = True
        self.settle()

    def settle(self) -> None:
        """Finish everything: all gradients arrive, all due updates are made.

        Raises:
            PeerError: a rank failed; the due updates are lost.
            MismatchError: the ranks have parted.
        """
        everything = range(len(self.parameters))
        self.gate("everything", everything)
        self._wait(everything)
        self.engine.wait_all()
        self._release_gradients(list(self._gradients))

    def outlive(self) -> None:
        """Call when the wrapper is dropped: pending gradients can still be read."""
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

    def _wait(self, tensors: Sequence[int]) -> None:
        began_ns = time.perf_counter_ns()
        self.engine.wait(tensors)
        self._stalling_ns += time.perf_counter_ns() - began_ns

    def _apply(self, indices: Iterable[int]) -> None:
        """Make due updates whose gradients have arrived."""
        chosen = {index: self._due.pop(index) for index in indices}
        by_step: dict[DeferredStep, list[int]] = {}
        try:
            gradients = {index: self._gradients[index] for index in chosen}
            for index, step in chosen.items():
                self._release(self.parameters[index])
                by_step.setdefault(step, []).append(index)
            for step, members in by_step.items():
                with step.torch_state.restored():
                    self._release_gradients(members)
                step.make([self.parameters[i] for i in members], [gradients[i] for i in members])
            # Under the same state of torch as the updates.
            zeroed = [gradients[index] for index in self._zeroed & chosen.keys()]
            if zeroed:
                with step.torch_state.restored():
                    foreach_zero_(zeroed)
            # Before anyone can change a parameter again.
            self._average(chosen)
        except BaseException as error:
            self._spoil(chosen, error)
            raise
        self._zeroed -= chosen.keys()

    def _average(self, indices: Iterable[int]) -> None:
        found: dict[AverageUpdate, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index in self._averages.keys() & set(indices):
            for update, average in self._averages.pop(index):
                release(average)
                averages, parameters = found.setdefault(update, ([], []))
                averages.append(average)
                parameters.append(self.parameters[index])
        for update, (averages, parameters) in found.items():
            update(averages, parameters)

    def _spoil(self, chosen: dict[int, DeferredStep], error: BaseException) -> None:
        """Let every read fail from now on: which parameters were updated is unknown."""
        self.engine.fail(
            SynclineError(
                f"rank {self.engine.rank}: the update of {self.names[next(iter(chosen))]!r} and "
                f"{len(chosen) - 1} other parameters was broken off by {type(error).__name__}: "
                f"{error}; resume all ranks from the last checkpoint"
            )
        )
        self._due.update(chosen)
        for index in chosen:
            if not is_pending(self.parameters[index]):
                self._suspend(self.parameters[index], index)

    def _release_gradients(self, indices: Iterable[int]) -> None:
        found = [index for index in indices if index in self._gradients]
        for index in found:
            self._release(self._gradients[index], self.parameters[index])
        self._make_changes(found)
        for index in found:
            del self._gradients[index]
        self._read.difference_update(found)

    def _suspend(self, tensor: torch.Tensor, index: int) -> None:
        if self.guard is None:
            suspend(tensor, self, index)
        else:
            self.guard.suspend(tensor, self, index)

    def _release(self, tensor: torch.Tensor, parameter: nn.Parameter | None = None) -> None:
        lift(tensor, parameter)
        release(tensor)


class _Orphans:
    """Finishes the gradients that were under way when their model's wrapper was dropped.

    Each gradient keeps this object alive, which keeps none of them alive: a parameter refers to its
    gradient where garbage collection cannot look, so a circle would never be freed.
    """

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
        for index, reference in self._gradients.items():
            gradient = reference()
            if gradient is not None and is_pending(gradient):
                release(gradient)
                make_changes(self._changes.get(index, ()), [gradient])

    def norms(self, indices: Sequence[int], norm: Norm) -> None:
        """Return None: they are not exchanged any more."""

    def all_finite(self, indices: Sequence[int]) -> None:
        """Return None."""

    def change(self, indices: list[int], change: Change) -> None:
        """Wait for all gradients, and change some."""
        change.make(self._finished(indices))

    def zero_gradients(self, indices: list[int]) -> None:
        """Wait for all gradients, and set some to zero."""
        for gradient in self._finished(indices):
            gradient.zero_()

    def _finished(self, indices: list[int]) -> list[torch.Tensor]:
        self.read_gradients(indices)
        found = [self._gradients[index]() for index in indices]
        return [gradient for gradient in found if gradient is not None]
