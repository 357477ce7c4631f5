"""A trial of an optimizer's step on small copies: whole, and parameter by parameter."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.torch_private import DispatchMode

MOST_PARAMETERS = 8  # the most parameters in a group of a copy, unless it has more kinds of them
SCALES = (1.0, 1e-3, 30.0, 1e3, math.inf)
"""The scale of the gradients in each step: some are above, some below a clipping threshold. In the
last step one parameter's gradient is infinite; some optimizers then skip the whole step."""
SLICED_UNITS = 8  # by how many units in the last place of the largest number slices may differ
STANDARD = frozenset({"defaults", "state", "param_groups", "step", "_opt_called"})
"""Attributes of every optimizer; schedulers add ``step`` and ``_opt_called``."""
HOOKS, MARKS = "_optimizer_", "_syncline_"  # prefixes of optimizers' hooks and of our own marks


class Trial(NamedTuple):
    """How stepping parameter by parameter compares with one whole step."""

    why_not: str | None  # how it differs; None if it does not
    moves_groups: bool = False  # whether a step changes numbers in groups, such as a step count


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that not every optimizer has."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in STANDARD and not name.startswith((HOOKS, MARKS))
    }


def trial(optimizer: Optimizer) -> Trial:
    """Compare stepping parameter by parameter with one whole step.

    Two copies of the optimizer, with small parameters on the same devices, take the same five
    steps. Parameters and state must agree to the last bit after each. A step may change numbers
    among the hyper-parameters if every part of it, and a step without parameters, changes them in
    the same way.

    The optimizer is only read; its own attributes must hold no tensor.
    """
    return _tried(_compare, optimizer)


def trial_of_slices(optimizer: Optimizer) -> Trial:
    """Compare stepping slices of flat parameters with one whole step, as :func:`trial` does.

    A slice may end in the middle of a vector instruction's operand, so values may differ in their
    last digits, by :data:`SLICED_UNITS`. A state must have one number per element, or be the same
    for all slices.
    """
    return _tried(_compare_slices, optimizer)


def _tried(compare: Callable[..., Trial], optimizer: Optimizer) -> Trial:
    # Without state the step makes its own, in the shapes that it needs. If state is made on
    # construction (Adagrad) that fails, and a corner of the real state is needed.
    failure = ""
    for with_state in (False, True) if optimizer.state else (False,):
        try:
            with _undisturbed(), _Alone():  # type: ignore[no-untyped-call]
                return compare(optimizer, with_state=with_state)
        # The step of an unknown optimizer may raise anything; any error becomes the answer.
        except Exception as error:
            failure = failed(error)
    return Trial(failure)


def failed(error: Exception) -> str:
    """Return the reason for an optimizer whose step of small parameters has raised an error."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    return f"its step failed on a small example ({text})"


def calls_closure_first(optimizer: Optimizer) -> bool:
    """Say whether ``step(closure)`` is ``closure()``, called once, and then ``step()``."""
    calling, plain = (_SmallCopy(optimizer, with_state=False) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    loss = object()
    calls = 0

    def closure() -> object:
        nonlocal calls
        calls += 1
        for parameter, other in zip(calling.parameters, plain.parameters, strict=True):
            parameter.grad = None if other.grad is None else other.grad.clone()
        return loss

    with _undisturbed(), contextlib.suppress(Exception):  # one that fails is not such a step
        for count in (1, 2):
            for parameter, other in zip(calling.parameters, plain.parameters, strict=True):
                parameter.grad = None
                other.grad = normal(other, generator) if other.requires_grad else None
            _seed(count)
            returned = calling.step(closure)
            _seed(count)
            plain.step()
            if calls != count or returned is not loss or plain.difference(calling) is not None:
                return False
        return True
    return False


StepOn = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Runs an optimizer's step on some groups, and returns the groups as the step left them."""


def move_groups(groups: Sequence[dict[str, Any]], step_on: StepOn) -> None:
    """Advance the numbers in an optimizer's groups by a step without parameters."""
    moved = step_on([{**group, "params": []} for group in groups])
    for group, new in zip(groups, moved, strict=True):
        group.update(hyperparameters(new))


def _compare(optimizer: Optimizer, *, with_state: bool) -> Trial:
    whole, apart = (_SmallCopy(optimizer, with_state=with_state) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    orders = random.Random(0)
    for scale in SCALES:
        pairs = zip(whole.parameters, apart.parameters, strict=True)
        trained = [(ours, theirs) for ours, theirs in pairs if ours.requires_grad]
        for number, (ours, theirs) in enumerate(trained):
            gradient = normal(ours, generator)
            if math.isfinite(scale) or number == 0:
                gradient *= scale
            ours.grad, theirs.grad = gradient, gradient.clone()
        seed = orders.randrange(2**32)
        _seed(seed)
        changed = whole.step_whole()
        if changed is not None:
            return Trial(changed)
        _seed(seed)
        # Not in the order of the parameters: then even a shared random generator would agree.
        order = orders.sample(range(len(apart.parameters)), len(apart.parameters))
        if order == sorted(order):
            order.reverse()
        difference = apart.step_apart(order, moves_groups=whole.moved) or whole.difference(apart)
        if difference is not None:
            return Trial(difference)
    return Trial(None, whole.moved)


def _compare_slices(optimizer: Optimizer, *, with_state: bool) -> Trial:
    whole, sliced = (_SmallCopy(optimizer, with_state=with_state) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    groups = sliced._copy.param_groups
    known, state = sliced._copy.state, defaultdict[Any, Any](dict)
    halves = {p: [nn.Parameter(part) for part in _halves(p.detach())] for p in sliced.parameters}
    for parameter, some in halves.items():
        for number, half in enumerate(some):
            vars(half).update(vars(parameter))
            for name, value in known.get(parameter, {}).items():
                cut = is_of_elements(name, value, parameter)
                state[half][name] = _halves(value)[number].clone() if cut else copy.deepcopy(value)
    sliced._copy.state = state
    for scale in SCALES:
        for ours, some in zip(whole.parameters, halves.values(), strict=True):
            ours.grad = normal(ours, generator) if ours.requires_grad else None
            if ours.grad is not None:
                ours.grad *= scale if math.isfinite(scale) or ours is whole.parameters[0] else 1.0
                for half, gradient in zip(some, _halves(ours.grad), strict=True):
                    half.grad = gradient.clone()
        before = copy.deepcopy([hyperparameters(group) for group in groups])
        changed = whole.step_whole()
        if changed is not None:
            return Trial(changed)
        if whole.moved:
            move_groups(groups, sliced._step_on)
        for turn in slice(1), slice(1, None):
            members = [[h for p in group["params"] for h in halves[p][turn]] for group in groups]
            settings = copy.deepcopy(before)
            sliced._step_on([{**s, "params": m} for s, m in zip(settings, members, strict=True)])
        for ours, some in zip(whole.parameters, halves.values(), strict=True):
            theirs = [state.get(half, {}) for half in some]
            own = whole._copy.state.get(ours, {}) if some else {}
            fits = _close(ours.detach(), some) and all(each.keys() == own.keys() for each in theirs)
            if not fits or not all(_fits(v, [each[n] for each in theirs]) for n, v in own.items()):
                return Trial(
                    f"{whole._name}, tried on a small example, updates a part of a parameter "
                    "differently when it is stepped without the rest"
                )
    return Trial(None, whole.moved)


def _halves(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.reshape(-1).split(max((values.numel() + 1) // 2, 1)))


def _fits(value: Any, parts: Sequence[Any]) -> bool:
    """Say whether the slices' states are parts of the whole state, or each equal to it."""
    if not isinstance(value, torch.Tensor) or all(part.ndim == 0 for part in parts):
        return all(same(value, part) for part in parts)
    return [p.shape for p in parts] == [h.shape for h in _halves(value)] and _close(value, parts)


def _close(ours: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Say whether values are the same up to their last digits."""
    theirs = torch.cat([part.detach() for part in parts]) if parts else ours.reshape(-1)
    largest = ours[ours.isfinite()].abs().amax() if ours.isfinite().any() else 0.0
    error = SLICED_UNITS * torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    return torch.allclose(ours.reshape(-1), theirs, error, error * float(largest), equal_nan=True)


def is_of_elements(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Say whether a state of a whole parameter has one number per element."""
    # If the parameter is a single number, a count of steps has the same shape.
    scalar = parameter.ndim == 0 and name != "step"
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or scalar)


class _SmallCopy:
    """An optimizer of the same class, groups and attributes, with small parameters of its own."""

    def __init__(self, original: Optimizer, *, with_state: bool) -> None:
        self._name = type(original).__name__
        generator = torch.Generator().manual_seed(1)
        self.parameters: list[nn.Parameter] = []
        groups: list[dict[str, Any]] = []
        state: defaultdict[Any, Any] = defaultdict(dict)
        made: Optimizer = object.__new__(type(original))
        copies = {id(original): made}  # references to the optimizer become references to its copy
        chosen = [_chosen(group["params"]) for group in original.param_groups]
        if sum(len(some) for some in chosen) == 1:  # stepping a single one apart would show nothing
            chosen = [some * 2 for some in chosen]
        for group, some in zip(original.param_groups, chosen, strict=True):
            ours = [small(parameter, generator) for parameter in some]
            self.parameters += ours
            settings = copy.deepcopy(hyperparameters(group), copies)
            groups.append({"params": ours, **moving(settings)})
            for real, parameter in zip(some, ours, strict=True):
                if with_state and real in original.state:
                    state[parameter] = corner(original.state[real])
        hooks = (name for name in vars(original) if name.startswith(HOOKS))
        vars(made).update({name: OrderedDict() for name in hooks if name.endswith("_hooks")})
        own = {**own_attributes(original), "defaults": original.defaults}
        vars(made).update(copy.deepcopy(own, copies), state=state, param_groups=groups)
        self._copy = made
        self.moved = False  # whether a whole step has changed numbers in the groups

    def step(self, *args: Any) -> Any:
        return type(self._copy).step(self._copy, *args)

    def step_whole(self) -> str | None:
        """Make a whole step; return what it changed in groups other than numbers, or None."""
        before = copy.deepcopy([hyperparameters(group) for group in self._copy.param_groups])
        self.step()
        if len(self._copy.param_groups) != len(before):
            return "its step changes its parameter groups"
        for number, (old, group) in enumerate(zip(before, self._copy.param_groups, strict=True)):
            for key in _changed(old, group):
                if not all(type(hyper.get(key, 0)) in (int, float) for hyper in (old, group)):
                    return _change(key, number)
                self.moved = True
        return None

    def step_apart(self, order: Sequence[int], *, moves_groups: bool) -> str | None:
        """Step one parameter after the other; return what changed in groups, or None."""
        groups = self._copy.param_groups
        before = copy.deepcopy([hyperparameters(group) for group in groups])
        if moves_groups:
            move_groups(groups, self._step_on)
        number_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}
        for index in order:
            number = number_of[id(self.parameters[index])]
            left = self._step_on([{**before[number], "params": [self.parameters[index]]}])
            if len(left) != 1:
                return "its step changes its parameter groups"
            for key in _changed(groups[number], left[0]):
                return _change(key, number)
        return None

    def _step_on(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        optimizer = self._copy
        own, optimizer.param_groups = optimizer.param_groups, groups
        try:
            self.step()
            return optimizer.param_groups
        finally:
            optimizer.param_groups = own

    def difference(self, other: _SmallCopy) -> str | None:
        """Return what differs after steps that should have done the same, or None."""
        for index, (ours, theirs) in enumerate(zip(self.parameters, other.parameters, strict=True)):
            if not same(ours.detach(), theirs.detach()):
                return (
                    f"{self._name}, tried on a small example, updates a parameter differently when "
                    f"it is stepped without the others (parameter {index})"
                )
            if not same(self._copy.state.get(ours), other._copy.state.get(theirs)):
                return (
                    f"{self._name}, tried on a small example, leaves another state when a "
                    f"parameter is stepped without the others (parameter {index})"
                )
        groups = zip(self._copy.param_groups, other._copy.param_groups, strict=True)
        for number, pair in enumerate(groups):
            for key in _changed(*pair):
                return _change(key, number)
        if not same(self._state_of_none(), other._state_of_none()):
            return "its step changes state that belongs to no parameter"
        missing = object()
        for name in {**vars(self._copy), **vars(other._copy)}:
            values = getattr(self._copy, name, missing), getattr(other._copy, name, missing)
            if name not in ("state", "param_groups") and not same(*values):
                return f"its step changes its attribute {name!r}"
        return None

    def _state_of_none(self) -> dict[Any, Any]:
        known = set(map(id, self.parameters))
        return {key: value for key, value in self._copy.state.items() if id(key) not in known}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two groups, except the parameters."""
    missing = object()
    keys = sorted({*old, *new} - {"params"})
    return [k for k in keys if not same(old.get(k, missing), new.get(k, missing))]


def _change(key: str, number: int) -> str:
    return f"its step changes {key!r} of parameter group {number}"


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything in a parameter group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _chosen(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return one parameter of each kind, and others up to the limit, in their order."""
    kinds = [kind_of_parameter(parameter) for parameter in parameters]
    firsts = [kinds.index(kind) for kind in set(kinds)]
    others = [index for index in range(len(kinds)) if index not in firsts]
    room = max(MOST_PARAMETERS - len(firsts), 0)
    return [parameters[index] for index in sorted([*firsts, *others[:room]])]


class _Alone(DispatchMode):
    """Raises an error where a collective is called: parts would call it in another order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("it calls collectives")
        return func(*args, **(kwargs or {}))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random generators afterwards; ignore warnings, which the real step repeats."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)


def _seed(seed: int) -> None:
    """Seed the random generators that a step may use."""
    # ``torch.manual_seed`` would also seed devices that are not in use yet, once they are used.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)


SIDE = 3  # the most elements per dimension of a small parameter
LEAST_RATE = 0.1  # the least learning rate of a trial: a warm-up from 0 would hide differences
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def kind_of_parameter(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return the properties that, with its group, decide how a parameter is updated."""
    return parameter.ndim, parameter.dtype, parameter.device, parameter.requires_grad


def same(ours: Any, theirs: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Say whether two values have the same types and contents, with tensors equal to the last bit.

    Values that do not show what they hold (a function, a lock) count as the same. So do the
    optimizers that values refer to, which are compared by themselves.
    """
    seen = set() if seen is None else seen
    pair = (id(ours), id(theirs))
    if ours is theirs or pair in seen:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, PLAIN):
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    if isinstance(ours, torch.Tensor):
        if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
            return False
        return torch.equal(_bits(ours), _bits(theirs))
    seen.add(pair)
    if isinstance(ours, Mapping):
        if ours.keys() == theirs.keys():
            return all(same(ours[key], theirs[key], seen) for key in ours)
        # Keys that are copies of one object are not equal, but come in the same order.
        return same(list(ours.items()), list(theirs.items()), seen)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(
            same(a, b, seen) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, set | frozenset):
        return {v for v in ours if isinstance(v, PLAIN)} == {
            v for v in theirs if isinstance(v, PLAIN)
        }
    if hasattr(ours, "__dict__") and not isinstance(ours, Optimizer):
        return same(dict(vars(ours)), dict(vars(theirs)), seen)
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which are equal for NaN too."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def moving(group: dict[str, Any]) -> dict[str, Any]:
    """Raise a group's learning rate so that every step changes values of 16 bits too."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        group["lr"] = rate.clamp(min=LEAST_RATE)
    elif isinstance(rate, float | int):
        group["lr"] = max(float(rate), LEAST_RATE)
    return group


def small(
    parameter: nn.Parameter, generator: torch.Generator, device: torch.device | None = None
) -> nn.Parameter:
    """Return a parameter of random values, with at most three elements per dimension."""
    shape = tuple(min(side, SIDE) for side in parameter.shape)
    like = torch.empty(shape, dtype=parameter.dtype, device=device or parameter.device)
    made = nn.Parameter(normal(like, generator), requires_grad=parameter.requires_grad)
    vars(made).update(marks(parameter))
    return made


def marks(parameter: torch.Tensor) -> dict[str, Any]:
    """Return attributes that say how to treat a parameter, such as one for no weight decay."""
    return {n: v for n, v in vars(parameter).items() if isinstance(v, PLAIN)}


def normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return normal deviates, drawn on the CPU so that every device gets the same."""
    drawn = torch.float64 if not like.is_complex() else torch.complex128
    return torch.randn(like.shape, dtype=drawn, device="cpu", generator=generator).to(like)


def corner(state: Any, device: torch.device | None = None) -> Any:
    """Copy the first three elements per dimension of the tensors in a parameter's state."""
    if isinstance(state, torch.Tensor):
        part = state.detach()[(slice(SIDE),) * state.ndim]
        return part.to(device or part.device, copy=True)
    if isinstance(state, Mapping):
        return {key: corner(value, device) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(corner(value, device) for value in state)
    return copy.deepcopy(state)
