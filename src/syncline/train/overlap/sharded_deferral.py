"""``ShardedDeferral``: parameters that are gathered after each rank has updated its share.

An all-reduce is a reduce-scatter and an all-gather. Here the update comes between the two, on each
rank's own share, and the all-gather carries parameters instead of gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.errors import UserError
from syncline.torch_private import foreach_copy_, foreach_zero_, without_torch_function
from syncline.train.engine.engine import Engine
from syncline.train.engine.layout import TensorPart
from syncline.train.engine.message_threads import Round
from syncline.train.overlap.clipping import Change, make_changes
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.deferred_step import DeferredStep, step_of
from syncline.train.overlap.guard import Guard, lift, lifted
from syncline.train.overlap.pending import UPDATES, PendingState, index_of, is_pending, release
from syncline.train.overlap.sharding import Sharding
from syncline.train.overlap.trial import marks, parameters_of
from syncline.train.sparse.gradients import flat


class ShardedStep(DeferredStep):
    """One call of ``step`` on this rank's share."""

    def __init__(
        self, optimizer: Optimizer, state: PendingState, sharding: Sharding, *, moves_groups: bool
    ) -> None:
        super().__init__(optimizer, state, moves_groups=moves_groups)
        self._sharding = sharding
        self._all = parameters_of(optimizer)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates a parameter."""
        return id(parameter) in self._group_of

    @property
    def exchanged(self) -> list[nn.Parameter]:
        """The optimizer's parameters whose gradients are exchanged."""
        return [p for p in self._all if id(p) in self._sharding.index_of]

    def update_rest(self) -> None:
        """Update parameters that are not exchanged: whole, on every rank."""
        known = self._sharding.index_of
        rest = [p for p in self._all if id(p) not in known and p.grad is not None]
        if rest:
            self.apply(rest, [p.grad for p in rest if p.grad is not None])

    def update(self, parameters: Mapping[nn.Parameter, Sequence[Change]]) -> None:
        """Update this rank's share of some parameters that have gradients; call under the lock.

        Each comes with changes to its gradient, which are made first, to the share alone.
        """
        sharding, real = self._sharding, self._optimizer.state
        shares: dict[nn.Parameter, nn.Parameter] = {}
        members: dict[int, list[nn.Parameter]] = {}
        state: defaultdict[Any, Any] = defaultdict(dict)
        alike: dict[tuple[int, ...], tuple[Sequence[Change], list[torch.Tensor]]] = {}
        with self.torch_state.restored(), without_torch_function():
            for parameter, changes in parameters.items():
                index = sharding.index_of[id(parameter)]
                own = sharding.own(index, parameter.detach())
                if not own.numel():
                    continue
                share = shares[parameter] = nn.Parameter(own)
                vars(share).update(marks(parameter))
                share.grad = sharding.own(index, _like(parameter.grad, parameter))
                alike.setdefault(tuple(map(id, changes)), (changes, []))[1].append(share.grad)
                members.setdefault(self._group_of[id(parameter)], []).append(share)
                if parameter in real:
                    state[share] = real[parameter]
            with torch.no_grad():
                for changes, gradients in alike.values():
                    make_changes(changes, gradients)
            if not shares:
                return
            groups = [{**self._groups[n], "params": members[n]} for n in sorted(members)]
            with self._state.stepping(groups, state):
                step_of(self._optimizer)(self._optimizer)
            for parameter, share in shares.items():
                sharding.put(sharding.index_of[id(parameter)], share.detach())
                if state.get(share):
                    real[parameter] = state[share]
                share.grad = None  # it may be a view of the parameter's own gradient


def _like(gradient: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor:
    """Return a gradient with its elements in the order of the parameter's memory."""
    assert gradient is not None
    if gradient.stride() == parameter.stride():
        return gradient.detach()
    return torch.empty_like(parameter).detach().copy_(gradient.detach())


class ShardedDeferral(Deferral):
    """Knows which gradients and parameters are pending if each rank updates only its share.

    After the backward pass, each rank has the sums of its share of the gradients. If any rank reads
    a gradient before the optimizer's step, the all-gathers carry gradients, and the step finds
    whole ones. Otherwise the step updates the share, and the all-gathers carry parameters: each is
    pending until all of its elements have arrived, and no rank has whole gradients.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], engine: Engine, guard: Guard | None
    ) -> None:
        super().__init__(parameters, engine, guard)
        self._spent: dict[int, torch.Tensor] = {}  # pending gradients whose updates were made
        plan, layout = engine.plan, engine.layout
        self._own: dict[int, list[TensorPart]] = {}  # by all-gather: this rank's share of it
        self._whole: list[list[TensorPart]] = [[] for _ in plan.tensors]  # all of each parameter
        for number in engine.gathers:
            message = plan.messages[number]
            for part in layout.parts(number, message.start, message.stop):
                self._whole[part.tensor].append(part)
            self._own[number] = [
                part
                for start, stop in engine.shares[number][engine.rank]
                for part in layout.parts(number, message.start + start, message.start + stop)
            ]

    def wait_for_sums(self) -> bool:
        """Return once this rank's sums are in place; say whether shares are to be updated."""
        return self._stalled_by(self.engine.wait_for_sums)

    def update(self, step: ShardedStep) -> None:
        """Update and send this rank's share, after :meth:`wait_for_sums`; call under the lock."""
        engine = self.engine
        updated = [p for p in self.parameters if step.holds(p) and p.grad is not None]
        left = {self.index_of[id(parameter)] for parameter in updated}
        # A gradient that the program has replaced is not changed.
        changes = {i: c for i, c in self._changes.items() if self.awaits(self.parameters[i])}
        self._changes = {}
        gradients = [(gradient, None) for gradient in self._gradients.values()]
        with lifted(gradients):
            step.update_rest()
            for message in engine.gathers:
                now = left.intersection(engine.layout.tensors[message])
                left -= now
                step.update({self.parameters[i]: changes.get(i, ()) for i in sorted(now)})
                self._copy(self._own[message], to_bucket=True)
                engine.load(message)
        self.defer(step, updated)

    @torch.no_grad()
    def _copy(self, parts: Iterable[TensorPart], *, to_bucket: bool) -> None:
        values, inside = [], []
        for index, start, stop, bucket, at in parts:
            values.append(flat(torch.Tensor.detach(self.parameters[index]))[start:stop])
            inside.append(self.engine.buffers[bucket][at : at + stop - start])
        if values:
            foreach_copy_(*((inside, values) if to_bucket else (values, inside)))

    def _update(self, step: DeferredStep, indices: Sequence[int]) -> None:  # noqa: ARG002
        """Copy parameters whose elements have arrived out of the buckets."""
        self._copy((part for i in indices for part in self._whole[i]), to_bucket=False)
        zeroed = self._zeroed.intersection(indices)
        if zeroed:
            foreach_zero_([self._gradients[index] for index in zeroed])
            for index in zeroed:
                release(self._gradients.pop(index))

    def _wait(self, tensors: Sequence[int], of: Round | None = None) -> None:
        """Wait for messages; if no step has been made yet, they bring whole gradients."""
        self.engine.ask(whole=True)
        super()._wait(tensors, of)

    def read_gradients(self, indices: list[int]) -> None:
        """Finish gradients that are read before the step; after it, that is a UserError."""
        spent = [i for i in indices if i in self._deferred or i in self._spent]
        if spent and not self._makes_here:
            raise UserError(
                f"overlap(shard=True): the gradient of {self.names[spent[0]]!r} was read after the "
                "optimizer's step, when no rank has whole gradients; read it before the step, or "
                "call optimizer.zero_grad() first, also before the module is moved or cast"
            )
        super().read_gradients(indices)

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Set gradients to zero: at once if their update was made, else as the base class does."""
        with UPDATES:
            numbers = {index_of(g) for g in gradients if is_pending(g)} & self._spent.keys()
            self._set_spent(numbers, 0.0)
        super().zero_gradients(gradients)

    def _set_spent(self, indices: Iterable[int], value: float) -> None:
        for index in indices:
            gradient = self._spent.pop(index)
            release(gradient)
            gradient.fill_(value)

    def _release_gradients(self, indices: Iterable[int]) -> None:
        if not self.engine.carries_parameters:
            super()._release_gradients(indices)
            return
        found = [index for index in indices if index in self._gradients]
        for index in found:
            self._spent[index] = self._gradients.pop(index)
            lift(self._spent[index], self.parameters[index])

    def begin_backward(self) -> None:
        """Raise a UserError if gradients would be added to some whose update was already made."""
        with UPDATES:
            for index, gradient in self._spent.items():
                if self.parameters[index].grad is gradient:
                    raise UserError(
                        f"overlap(shard=True): the gradient of {self.names[index]!r} was not set "
                        "to zero after the optimizer's step. This backward pass would add to it, "
                        "but no rank has it whole; call optimizer.zero_grad() in between"
                    )
            for gradient in self._spent.values():
                release(gradient)
            self._spent.clear()

    def stop(self) -> None:
        """Finish everything; gradients that no rank has whole become NaN until zeroed."""
        super().stop()
        with UPDATES:
            self._set_spent(list(self._spent), torch.nan)
