"""``ShardedOptimizer``: each rank updates, and keeps state for, its share of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch.optim import Optimizer

from syncline.errors import FileError, UserError
from syncline.torch_private import disable_dynamo
from syncline.train.measure.step_hooks import after_gathers, after_steps, before_steps
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer, Model
from syncline.train.overlap.pending import UPDATES, is_pending
from syncline.train.overlap.separable import separability
from syncline.train.overlap.sharded_checkpoint import REST, as_dtensors, load
from syncline.train.overlap.sharded_deferral import ShardedDeferral, ShardedStep
from syncline.train.overlap.sharding import BLOCK_ELEMENTS, Sharding, in_batches, packed
from syncline.train.overlap.trial import hyperparameters, parameters_of, trial_of_slices


def why_not_shardable(optimizer: Optimizer) -> str | None:
    """Say why an optimizer cannot update shares of parameters, or None if it can."""
    return separability(optimizer).why_not or trial_of_slices(optimizer).why_not


class ShardedOptimizer(DeferredOptimizer):
    """Replaces an optimizer's step by an update of this rank's share, and keeps only its state.

    Under a sharded plan, the step updates the share and returns, and the parameters are gathered
    under the next forward pass (:class:`ShardedDeferral`). Otherwise, as in the DDP baseline,
    gradients are whole by then: the step updates the share and gathers the parameters at once.

    Raises:
        UserError: the optimizer cannot be sharded.
    """

    def __init__(self, optimizer: Optimizer, sharding: Sharding, model: Model) -> None:
        reason = why_not_shardable(optimizer)
        if reason is not None:
            raise UserError(
                f"overlap(shard=True): {type(optimizer).__name__} cannot be sharded: {reason}; "
                "leave shard out, or use an optimizer that updates each element by itself, such "
                "as AdamW"
            )
        super().__init__(optimizer)
        self._models.append(weakref.ref(model))
        self.sharding = sharding
        self._check.why_inseparable = lambda: why_not_shardable(optimizer)
        self._cut(optimizer.state, parameters_of(optimizer))
        sharding.optimizers.append(optimizer)

    @disable_dynamo
    def defer(self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool) -> bool:
        """Make the update of this rank's share, or raise a UserError; always True."""
        self.updates += 1
        reason = self._why_not_plain(args, kwargs, compiled=compiled)
        if reason is None and getattr(self.optimizer, "found_inf", None) is None:
            reason = self._check.why_not()  # otherwise a scaler makes this step
        if reason is not None:
            raise UserError(
                f"overlap(shard=True): {type(self.optimizer).__name__} cannot make step "
                f"{self.updates} on a share of the parameters: {reason}"
            )
        deferrals = self._deferrals()
        deferral = deferrals[0] if deferrals else None
        if deferral is not None:
            deferral.train_here()
            deferral.engine.require_whole()
            if isinstance(deferral, ShardedDeferral) and self._update_share(deferral):
                return True
            deferral.synchronize()
        self._step_at_once()
        return True

    def _update_share(self, deferral: ShardedDeferral) -> bool:
        """Update this rank's share under a sharded plan; False if ranks have whole gradients."""
        if deferral.anything_deferred:
            deferral.synchronize()  # a second step on the same gradients
        if not deferral.pending_gradients or len(self.sharding.optimizers) > 1:
            return False
        deferral.engine.ask(whole=False)
        if not deferral.wait_for_sums():
            return False
        with UPDATES:
            deferral.update(self._sharded_step())
        return True

    def _step_at_once(self) -> None:
        """Update this rank's share from whole gradients, and gather the parameters."""
        model = self._models[0]()
        gradients = [p.grad for p in self.sharding.parameters if p.grad is not None]
        self.sharding.require_same(gradients, look=model is not None and model.mixed)
        with UPDATES:
            step = self._sharded_step()
            exchanged = step.exchanged
            if any(p.grad is not None and is_pending(p.grad) for p in exchanged):
                raise UserError(
                    "overlap(shard=True): a second step was made on the gradients of one backward "
                    "pass, but after the first no rank has whole gradients; make one step"
                )
            # Hooks of the step itself would see shares instead of the model's parameters.
            before_steps.call(self.optimizer, (), {})
            step.update_rest()
            # In batches: a step makes temporary tensors as large as the parameters it updates.
            for some in in_batches((p for p in exchanged if p.grad is not None), BLOCK_ELEMENTS):
                step.update(dict.fromkeys(some, ()))
            after_steps.call(self.optimizer, (), {})
        self.sharding.gather(exchanged)
        after_gathers.call(self.optimizer, (), {})

    def _sharded_step(self) -> ShardedStep:
        return ShardedStep(
            self.optimizer, self._state, self.sharding, moves_groups=self._moves_groups
        )

    def _before_save(self) -> None:
        raise UserError(
            "state_dict() of a sharded optimizer would hold one rank's share; call "
            "model.full_state_dict(optimizer) on all ranks, which returns the whole on rank 0"
        )

    def _before_load(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return this rank's share of a whole state."""
        super()._before_load(state)
        saved = [key for group in state["param_groups"] for key in group["params"]]
        found = dict(state["state"])
        self._cut(found, saved)
        return {**state, "state": found}

    def _cut(self, state: MutableMapping[Any, Any], keys: Iterable[Any]) -> None:
        """Leave this rank's share of a whole state, under the keys of the parameters, in order."""
        for key, parameter in zip(keys, parameters_of(self.optimizer), strict=False):
            index = self.sharding.index_of.get(id(parameter))
            if index is not None and key in state:
                share = self.sharding.cut_state(index, state.pop(key))
                if share:
                    state[key] = share

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state in even parts, for ``torch.distributed.checkpoint``; all ranks call."""
        for deferral in self._deferrals():
            deferral.finish()
        sharding, numbers = self.sharding, self._numbers()
        states = sharding.even_state(self.optimizer)
        numbered = {numbers[sharding.parameters[i]]: state for i, state in states.items()}
        state: dict[str, Any] = dict(as_dtensors(self._elements(), numbered, sharding.group))
        found: dict[str, Any] = {"state": state}
        if not sharding.rank:  # rank 0 has a part of every parameter
            present = self.optimizer.state.items()
            others = {numbers[p]: own for p, own in present if id(p) not in sharding.index_of}
            plain = {
                n: {k: v for k, v in values.items() if k not in state.get(str(n), {})}
                for n, values in numbered.items()
            }
            groups = [hyperparameters(group) for group in self.optimizer.param_groups]
            found[REST] = packed({"state": {**plain, **others}, "param_groups": groups})
        return found

    def load_sharded_state_dict(self, checkpoint: Any, key: str) -> None:
        """Load what :meth:`sharded_state_dict` returned on any number of ranks; all ranks call."""
        super()._before_load({})
        optimizer, sharding, numbers = self.optimizer, self.sharding, self._numbers()
        of_number = {number: parameter for parameter, number in numbers.items()}
        devices = {number: parameter.device for number, parameter in of_number.items()}
        states, rest = load(checkpoint, key, self._elements(), devices, sharding.group)
        if len(rest["param_groups"]) != len(optimizer.param_groups):
            raise FileError(
                f"{checkpoint}: the saved optimizer has {len(rest['param_groups'])} parameter "
                f"groups, this one {len(optimizer.param_groups)}"
            )
        exchanged = {}
        for number, parameter in of_number.items():
            index, plain = sharding.index_of.get(id(parameter)), rest["state"].get(number, {})
            if index is None:
                if plain:
                    optimizer.state[parameter] = plain
            elif number in states or plain:
                exchanged[index] = {**plain, **states.get(number, {})}
        sharding.take_even_state(optimizer, exchanged)
        for group, saved in zip(optimizer.param_groups, rest["param_groups"], strict=True):
            group.update(saved)

    def _numbers(self) -> dict[Any, int]:
        """Return the number of each parameter, as torch's ``state_dict`` counts them."""
        return {parameter: n for n, parameter in enumerate(parameters_of(self.optimizer))}

    def _elements(self) -> dict[int, int]:
        """Return how many elements each exchanged parameter has, by number."""
        known = self.sharding.index_of
        return {n: p.numel() for p, n in self._numbers().items() if id(p) in known}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's own format on rank 0, and {} on others; all call."""
        for deferral in self._deferrals():
            deferral.finish()
        optimizer, sharding, numbers = self.optimizer, self.sharding, self._numbers()
        whole = sharding.full_state(optimizer)
        if sharding.rank:
            return {}
        states = {
            number: optimizer.state[p] if index is None else whole.get(index, {})
            for p, number in numbers.items()
            for index in (sharding.index_of.get(id(p)),)
        }
        groups = [
            {**hyperparameters(group), "params": [numbers[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": {n: s for n, s in states.items() if s}, "param_groups": groups}
