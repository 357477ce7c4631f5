"""``Deferral``: the gradients that are still being exchanged, and the deferred updates."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from syncline.errors import SynclineError
from syncline.plan.profile import Norm
from syncline.torch_private import foreach_zero_, unsafe_preserve_version_counter
from syncline.train.engine.engine import Engine
from syncline.train.overlap.clipping import Change, make_changes
from syncline.train.overlap.deferred_step import DeferredStep, TorchState
from syncline.train.overlap.guard import Guard, lifted
from syncline.train.overlap.pending import UPDATES, hand_over, is_pending, release, suspend
from syncline.train.overlap.pending_gradients import PendingGradients

AverageUpdate = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Updates some averages from their parameters, each independently."""


class Deferral(PendingGradients):
    """Knows which gradients and parameters of a model are pending, and finishes them.

    A parameter is pending from the optimizer's ``step`` until that update has been made. Each
    tensor is finished where it is first read: by the pre-forward hook of its module, or by any
    other use, on any thread (:mod:`.pending` says how).
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], engine: Engine, guard: Guard | None
    ) -> None:
        super().__init__(parameters, engine, guard)
        self.in_forward = False  # whether the model's forward pass is running
        self._maker = 0  # the thread that is making updates and sees plain tensors; 0 if none
        self._averages: dict[int, list[tuple[AverageUpdate, torch.Tensor]]] = {}
        """By parameter: averages to be updated after its deferred update, in this order."""
        self._compiled: set[int] = set()  # parameters that compiled code reads

    @property
    def _makes_here(self) -> bool:
        return threading.get_ident() == self._maker

    @property
    def pending(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._gradients or self._deferred) or self.engine.exchanging

    @property
    def anything_deferred(self) -> bool:
        """Whether any update is deferred and not complete yet."""
        return bool(self._deferred)

    def is_deferred(self, parameter: torch.Tensor) -> bool:
        """Say whether a parameter's update is deferred and not complete yet."""
        return self.index_of.get(id(parameter)) in self._deferred

    def defer(self, step: DeferredStep, parameters: Iterable[nn.Parameter]) -> None:
        """Defer the updates of parameters with pending gradients; call under the lock."""
        chosen = list(parameters)
        # So a second backward pass through a graph with the old values raises torch's error, as it
        # would after an immediate update.
        increment_version(chosen)
        for parameter in chosen:
            index = self.index_of[id(parameter)]
            self._deferred[index] = step
            self._suspend(parameter, index)
        step.suspend(len(chosen))

    def average(self, averages: Mapping[int, torch.Tensor], update: AverageUpdate) -> None:
        """Update averages, by parameter index, right after the updates; call under the lock."""
        torch_state = TorchState.now(self.parameters[0].device.type)

        def update_later(averages: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
            with torch_state.restored():
                update(averages, parameters)

        for index, average in averages.items():
            self._averages.setdefault(index, []).append((update_later, average))
            suspend(average, self, index, is_average=True)

    def begin_backward(self) -> None:
        """Call before gradients are accumulated, once nothing is deferred."""

    def stop(self) -> None:
        """Finish everything, and release all tensors."""
        self.synchronize()

    def begin_forward(self) -> None:
        """Call before a forward pass: finish the parameters that it reads without a hook."""
        if torch.is_grad_enabled():
            self.train_here()
        self.in_forward |= self.trains_here
        if self._deferred and self._compiled:
            self.make_updates("compiled code", sorted(self._compiled))

    def end_forward(self) -> None:
        """Call after a forward pass."""
        self.in_forward &= not self.trains_here

    def note_compiled(self, indices: Iterable[int]) -> None:
        """Note that compiled code without a hook reads some parameters."""
        self._compiled.update(indices)

    def make_updates(self, label: str, indices: Sequence[int]) -> None:
        """Make the deferred updates of some parameters, which are about to be used."""
        engine, began_ns, waited = self.engine, time.perf_counter_ns(), None
        while True:
            with UPDATES:
                deferred = [index for index in indices if index in self._deferred]
                if self._makes_here:
                    return
                if not deferred:
                    self.wait_for_stream()  # another one may have made the updates just now
                    return
                engine.check()
                arrived_ns, round_ = time.perf_counter_ns(), engine.round
                # On CUDA only this thread's stream has waited, so arrived() may still be False. A
                # wait for an earlier round does not count: another thread has begun this one.
                waited_for = set(deferred) if waited is round_ else set()
                # One call of the optimizer costs as much for many parameters as for one.
                ready = [i for i in self._deferred if i in waited_for or engine.arrived(i)]
                if ready:
                    with self._in_order():
                        engine.wait(ready)  # on CUDA, also for norms that are only issued
                        self.apply(ready)
                    if self.trains_here:
                        ended_ns = time.perf_counter_ns()
                        self.waits.note(label, began_ns, arrived_ns, ended_ns)
                        began_ns = ended_ns
                    continue
            self._wait(deferred, round_)
            waited = round_

    def read_parameters(self, indices: list[int]) -> None:
        """Finish parameters that are read without a hook."""
        if self.in_forward or not self.trains_here:
            self.make_updates(self.names[indices[0]], indices)
        else:
            self.force_sync()

    def read_gradients(self, indices: list[int]) -> None:
        """Finish gradients that are read."""
        if self._makes_here:
            return
        if not self.trains_here:
            self._read_elsewhere(indices)
            return
        if not self._deferred.keys().isdisjoint(indices):
            self.force_sync()
            return
        if self._read.issuperset(indices):
            return
        if self._deferred:  # of another optimizer
            self._wait(indices)
            self.deliver(indices)
            return
        # All of them: code that reads one reads the others next.
        self.waits.read_early = True
        self._wait_for_gradients()
        self.deliver(self._gradients)

    def _read_elsewhere(self, indices: Iterable[int]) -> None:
        """Finish gradients that are read by a thread other than the training thread."""
        left = list(indices)
        while left:
            with UPDATES:
                left = [i for i in left if i in self._gradients and i not in self._read]
                deferred, round_ = [i for i in left if i in self._deferred], self.engine.round
            if deferred:
                self.make_updates(self.names[deferred[0]], deferred)
            elif left:
                self._wait(left, round_)
                with UPDATES, self._in_order():
                    if self.engine.round is round_:
                        self.engine.wait(left, round_)
                        self.deliver(i for i in left if i not in self._deferred)

    def force_sync(self) -> None:
        """Finish everything because something was read outside the forward pass."""
        self.waits.forced_sync |= self.trains_here
        self.finish()

    def finish(self) -> None:
        """Finish everything that is pending, on any thread; see :meth:`synchronize`."""
        if self.trains_here:
            self.synchronize()
        else:  # the training thread may have begun the next round
            self.make_updates("everything", self._everything)
            self._read_elsewhere(self._everything)

    def synchronize(self) -> None:
        """Finish everything, on the thread that trains: all gradients arrive, all updates are made.

        Raises:
            PeerError: a rank failed; the deferred updates are lost.
            MismatchError: the ranks are desynchronized.
        """
        if self._makes_here:
            return
        self.make_updates("everything", self._everything)
        self._wait(self._everything)
        self.engine.wait_all()
        with UPDATES:
            self._release_gradients(self._gradients)

    def outlive(self) -> None:
        """Call when the wrapper is dropped: pending gradients can still be read.

        Takes no lock and runs no tensor operation: the garbage collector may call this on any
        thread, while another one holds the lock and waits for it, or while a model is traced.
        """
        left = {i: g for i, g in dict(self._gradients).items() if i not in self._deferred}
        orphans = _Orphans(self.engine, left, self.parameters, self._changes)
        for gradient in left.values():
            hand_over(gradient, orphans)

    def apply(self, indices: Sequence[int]) -> None:
        """Make deferred updates whose gradients have arrived; call under the lock.

        Meanwhile this thread sees plain tensors. For all other threads they stay pending until the
        gradients are changed, the updates are made and the averages are updated.
        """
        by_step: dict[DeferredStep, list[int]] = {}
        for index in indices:
            by_step.setdefault(self._deferred[index], []).append(index)
        self._maker = threading.get_ident()
        parameters = [(self.parameters[index], None) for index in indices]
        gradients = [(self._gradients[index], self.parameters[index]) for index in indices]
        plain = tuple(parameter for parameter, _ in parameters)
        try:
            # Slices of one tensor share its version, which autograd may have saved for another one.
            with lifted([*parameters, *gradients]), unsafe_preserve_version_counter(plain):
                for step, members in by_step.items():
                    with step.torch_state.restored():
                        self._update(step, members)
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
                del self._deferred[index]
        except BaseException as error:
            self._spoil(indices, error)
            raise
        finally:
            self._maker = 0

    def _update(self, step: DeferredStep, indices: Sequence[int]) -> None:
        self._make_changes(indices)
        step.apply(
            [self.parameters[index] for index in indices],
            [self._gradients[index] for index in indices],
        )
        zeroed = self._zeroed.intersection(indices)
        if zeroed:
            foreach_zero_([self._gradients[index] for index in zeroed])

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
        """Make every later read fail: it is unknown which parameters were updated."""
        self.engine.fail(
            SynclineError(
                f"rank {self.engine.rank}: the update of {self.names[indices[0]]!r} and "
                f"{len(indices) - 1} other parameters was interrupted by {type(error).__name__}: "
                f"{error}; resume all ranks from the last checkpoint"
            )
        )


class _Orphans:
    """Finishes the gradients that were in flight when their model's wrapper was dropped.

    Each gradient keeps this object alive, which refers to gradients and parameters weakly: the
    garbage collector would never free a cycle (see :func:`.pending.suspend`).
    """

    trains_here = True  # true on every thread: there is no training any more

    def __init__(
        self,
        engine: Engine,
        gradients: Mapping[int, torch.Tensor],
        parameters: Sequence[nn.Parameter],
        changes: dict[int, list[Change]],
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._gradients = {
            index: (weakref.ref(gradient), weakref.ref(parameters[index]))
            for index, gradient in gradients.items()
        }

    def read_parameters(self, indices: list[int]) -> None:
        raise AssertionError(f"parameters {indices} wait for no gradient")

    def read_gradients(self, indices: list[int]) -> None:  # noqa: ARG002
        self._engine.wait(self._gradients)
        with UPDATES:
            for index, (gradient_of, parameter_of) in self._gradients.items():
                gradient = gradient_of()
                if gradient is not None and is_pending(gradient):
                    with torch.no_grad(), lifted([(gradient, parameter_of())]):
                        make_changes(self._changes.pop(index, ()), [gradient])
                    release(gradient)

    def norms(self, indices: Sequence[int], norm: Norm) -> None:
        """Return None: norms are not exchanged any more."""

    def all_finite(self, indices: Sequence[int]) -> None:
        """Return None."""

    def change(self, gradients: list[torch.Tensor], change: Change) -> None:
        self.read_gradients([])
        change.make(gradients)

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        self.read_gradients([])
        for gradient in gradients:
            gradient.zero_()
