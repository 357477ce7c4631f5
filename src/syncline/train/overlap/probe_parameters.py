"""``StepCheck``: makes the optimizer's step on small parameters before every deferred step."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.torch_private import foreach_copy_
from syncline.train.overlap import trial
from syncline.train.overlap.deferred_step import step_of
from syncline.train.overlap.pending import PendingState
from syncline.train.overlap.separable import separability
from syncline.train.overlap.trial import hyperparameters, normal, parameters_of, same

OTHERS_SCALE = 1e3  # the scale of the other parameters' gradients; the probes' own are about 1
CYCLE = 8  # every eighth check makes others' gradients infinite; some optimizers then skip a step
MOST_TRIALS = 32  # the most kinds of settings tried: some settings, such as a label, never repeat
MOST_ITEMS = 16  # for longer containers only the length counts


class StepCheck:
    """Checks before each deferred step that each parameter is still updated independently.

    The trial that an optimizer has passed is repeated when its settings change in kind. That is
    enough for the classes of ``torch.optim``: each updates every parameter by itself, with any
    settings. The step of any other class is first made on :class:`ProbeParameters`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tried = {_kinds(optimizer)}
        self._known = _is_of_torch(optimizer)
        self.why_inseparable: Callable[[], str | None] = lambda: separability(optimizer).why_not
        """Repeats the trial; the sharded optimizer tries slices too."""
        self._probes: ProbeParameters | None = None

    def skip(self) -> None:
        """Call when a step is made without a check, or the state is replaced."""
        self._probes = None

    def why_not(self) -> str | None:
        """Return why this step must be whole, or None; all earlier updates must be complete."""
        kinds = _kinds(self._optimizer)
        if kinds not in self._tried:
            self._probes = None
            if len(self._tried) < MOST_TRIALS:
                reason = self.why_inseparable()
                if reason is not None:
                    return reason
                self._tried.add(kinds)
        return None if self._known else self._why_coupled()

    def _why_coupled(self) -> str | None:
        if self._probes is not None:
            return self._probes.why_coupled()
        # Comparing on the CPU waits for no device. If a corner of the state cannot be used (it is
        # in blocks), the probe parameters begin without state.
        cpu = torch.device("cpu")
        on_cpu = all(p.device == cpu for p in parameters_of(self._optimizer))
        places = (None,) if on_cpu else (cpu, None)
        failure = ""
        for device, with_state in itertools.product(places, (True, False)):
            try:
                probes = ProbeParameters(self._optimizer, device, with_state=with_state)
                reason = probes.why_coupled()
            # The step of an unknown optimizer may raise anything; any error becomes the answer.
            except Exception as error:
                failure = trial.failed(error)
            else:
                self._probes = probes
                return reason
        return failure


class _Probe(NamedTuple):
    """Small parameters that stand for those of one kind in one kind of group."""

    group: int
    alone: nn.Parameter  # stepped without any ``other``
    beside: nn.Parameter  # equal to ``alone``, but stepped together with ``other``
    other: nn.Parameter  # has other values, and larger gradients


class ProbeParameters:
    """Small parameters that are stepped with an optimizer before each of its deferred steps.

    There are two equal sets, with one for each kind of parameter in each kind of group. One set is
    stepped by itself, the other together with parameters of far larger gradients. If updates depend
    on other parameters, the two sets differ. No update of the model has been made by then.

    With ``with_state`` they begin with a corner of the real state, including its count of steps,
    so they show what begins at a certain step. All earlier updates must have been made.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device | None, *, with_state: bool
    ) -> None:
        self._optimizer = optimizer
        self._attributes = PendingState(optimizer, synchronize=lambda: None)
        self._checks = 0
        self._probes: list[_Probe] = []
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._written: list[torch.Tensor] = []
        self._values: tuple[list[torch.Tensor], ...] = ([], [], [])
        """Values written before an even check, an odd one, and one with infinite gradients."""
        generator = torch.Generator().manual_seed(0)
        for group, real in _representatives(optimizer):
            alone, beside, other = (trial.small(real, generator, device) for _ in range(3))
            beside.data.copy_(alone.data)
            self._probes.append(_Probe(group, alone, beside, other))
            gradient = normal(alone, generator)
            great = OTHERS_SCALE * normal(alone, generator)
            own = gradient, -gradient / 2, gradient
            great_gradients = great, -great / 2, torch.full_like(great, math.inf)
            for parameter, gradients in ((alone, own), (beside, own), (other, great_gradients)):
                parameter.grad = torch.empty_like(parameter)
                self._written += [parameter.data, parameter.grad]
                initial = parameter.detach().clone()
                for values, each in zip(self._values, gradients, strict=True):
                    values += [initial, each]
                if with_state and real in optimizer.state:
                    self._state[parameter] = trial.corner(optimizer.state[real], device)

    def why_coupled(self) -> str | None:
        """Step the probe parameters; return how others affect the update of one, or None."""
        self._checks += 1
        infinite = self._checks % CYCLE == 0
        values = self._values[2 if infinite else self._checks % 2]
        foreach_copy_(self._written, values)
        self._step_all(lambda probe: (probe.alone,))
        self._step_all(lambda probe: (probe.beside, probe.other))
        for probe in self._probes:
            if not _agree(probe.alone.detach(), probe.beside.detach()):
                return "it updates a parameter differently when it also updates others"
            # An optimizer without state makes no entry; the copy below makes an empty one.
            if not _agree(self._state.get(probe.alone, {}), self._state.get(probe.beside, {})):
                return "it leaves another state of a parameter when others are stepped with it"
        if infinite:  # infinities in their state would hide the effect of other gradients
            for probe in self._probes:
                self._state[probe.other] = copy.deepcopy(self._state[probe.alone])
        return None

    def _step_all(self, chosen: Callable[[_Probe], Sequence[nn.Parameter]]) -> None:
        members: dict[int, list[nn.Parameter]] = {}
        for probe in self._probes:
            members.setdefault(probe.group, []).extend(chosen(probe))
        real = self._optimizer.param_groups
        groups = [trial.moving({**real[n], "params": members[n]}) for n in sorted(members)]
        with self._attributes.stepping(groups, self._state):
            step_of(self._optimizer)(self._optimizer)


def kind_of(value: object) -> object:
    """Return the kind of a setting: a step may take another code path only if the kind changes.

    For a number: its type, its sign, and whether it is finite. So a learning-rate schedule does not
    change the kind; setting a threshold, or making an infinite one finite, does.
    """
    if value is None or isinstance(value, bool | str | bytes):
        return type(value), value
    if isinstance(value, int | float):
        return type(value), value > 0, value < 0, math.isfinite(value)
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, list | tuple | Mapping) and len(value) > MOST_ITEMS:
        return type(value), len(value)
    if isinstance(value, list | tuple):
        return type(value), *map(kind_of, value)
    if isinstance(value, Mapping):
        return type(value), *((key, kind_of(item)) for key, item in value.items())
    return type(value), getattr(value, "__qualname__", None)


def _kinds(optimizer: Optimizer) -> tuple[object, ...]:
    """Return the kinds of the settings of the groups, and of the optimizer's own attributes."""
    groups = ((len(group["params"]), _kind_of_group(group)) for group in optimizer.param_groups)
    return *groups, kind_of(trial.own_attributes(optimizer))


def _kind_of_group(group: Mapping[str, Any]) -> object:
    return tuple((key, kind_of(value)) for key, value in hyperparameters(group).items())


def _is_of_torch(optimizer: Optimizer) -> bool:
    step = inspect.unwrap(type(optimizer).step)
    modules = type(optimizer).__module__, getattr(step, "__module__", None) or ""
    return all(f"{module}.".startswith("torch.optim.") for module in modules)


def _representatives(optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield a trained parameter of each kind in each kind of group, with the group's number."""
    seen = set()
    for number, group in enumerate(optimizer.param_groups):
        of_group = _kind_of_group(group)
        for parameter in group["params"]:
            kind = of_group, trial.kind_of_parameter(parameter)
            if parameter.requires_grad and kind not in seen:
                seen.add(kind)
                yield number, parameter


def _agree(ours: Any, theirs: Any) -> bool:
    """Say whether two values are the same; quickly if they are equal tensors."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs) or same(ours, theirs)
    if type(ours) is dict and type(theirs) is dict and ours.keys() == theirs.keys():
        return all(_agree(value, theirs[key]) for key, value in ours.items())
    return same(ours, theirs)
