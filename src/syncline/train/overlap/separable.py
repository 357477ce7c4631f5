"""Whether an optimizer's step can be run parameter by parameter with the result of one whole step.

An overlapped update applies the user's optimizer to a few parameters at a time, in the order in
which the forward pass needs them. That is the user's step only if each parameter's update depends
on nothing but its own gradient, its own state and the hyper-parameters. To find out for any
optimizer, its step is tried on two small copies.
"""

from __future__ import annotations

import gc
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from syncline.torch_private import COMPILED_FROM
from syncline.train.overlap.deferred_step import foreign_hooks
from syncline.train.overlap.trial import Trial, hyperparameters, own_attributes, trial

STEP_COMPILED = "its step is compiled, which rounds differently for a part of the parameters"
WRAPPERS = ("torch.optim.lr_scheduler", "torch._compile", "syncline.")
"""Modules whose wrappers call ``step`` once and do not change its meaning. The wrapper of
``torch._compile`` keeps the compiler out."""


def separability(optimizer: Optimizer) -> Trial:
    """Say whether an optimizer's step can be run parameter by parameter.

    The optimizer is only read. Steps with a closure are not tried. The trial makes five steps on
    parameters of up to three elements per dimension. What depends on more, or on hyper-parameters
    that are not set yet, is left to ``probe_parameters.StepCheck``, which runs before each step.
    Global variables are not copied, so the trial's steps share them with the real ones.
    """
    why_not = _why_not_called_alone(optimizer) or _why_sharing(optimizer)
    return Trial(why_not) if why_not else trial(optimizer)


def _why_not_called_alone(optimizer: Optimizer) -> str | None:
    """Return why an update is more than a call of the class's ``step()``; None if it is not."""
    for needed in ("param_groups", "state", "defaults"):
        if needed not in vars(optimizer):
            return f"its {needed} are not its own: it seems to wrap another optimizer"
    try:
        parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError) as error:  # of compiled code
        return f"the signature of its step cannot be read: {error}"
    for parameter in list(parameters)[1:]:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic:
            return f"{type(optimizer).__name__}.step needs the argument {parameter.name!r}"
    for where, hook in foreign_hooks(optimizer):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return f"the hook {name} on the step of {where} expects whole steps"
    return _why_step_replaced(optimizer)


def _why_step_replaced(optimizer: Optimizer) -> str | None:
    """Return how an object's own ``step`` differs from its class's; None if it does not."""
    layer = vars(optimizer).get("step")
    while layer is not None:
        function = getattr(layer, "__func__", layer)
        if function is type(optimizer).step:
            return None
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if hasattr(function, COMPILED_FROM):
            return STEP_COMPILED
        if not module.startswith(WRAPPERS):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"its step was replaced by {name}"
        layer = getattr(function, "__wrapped__", None)
    return None


def _why_sharing(optimizer: Optimizer) -> str | None:
    for name, value in own_attributes(optimizer).items():
        if (found := find_shared(value, optimizer)) is not None:
            return f"its attribute {name!r} holds {found}, which parameters may share"
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = [(f"parameter group {i}", group) for i, group in enumerate(optimizer.param_groups)]
    for where, group in [*groups, ("the defaults", optimizer.defaults)]:
        for key, value in hyperparameters(group).items():
            found = find_shared(value, optimizer, hyper=lambda t: id(t) not in parameters)
            if found is not None:
                return f"{key!r} of {where} holds {found}, which parameters may share"
    entries: list[object] = list(optimizer.state)
    for entry in entries:
        if not isinstance(entry, torch.Tensor):
            return f"its state has the entry {entry!r}, which belongs to no parameter"
    return None


MOST_OBJECTS = 100_000
LEAVES = (type, types.ModuleType, types.CodeType, logging.Logger, str, bytes, int, float, complex)
"""Types that are not searched: their contents belong to the program, not to the value."""


def find_shared(
    value: object, owner: Optimizer, *, hyper: Callable[[torch.Tensor], bool] = lambda _: False
) -> str | None:
    """Say what in ``value`` several parameters of the optimizer ``owner`` could share, or None.

    Looks into containers, objects, closures and weak references. Skips a tensor of one element if
    ``hyper`` says that it is a hyper-parameter.
    """
    seen = {id(owner)}
    # Held until the end: the next object could get the id of a freed one.
    held: list[object] = []
    unseen = [value]
    while unseen:
        found = unseen.pop()
        if id(found) in seen or isinstance(found, LEAVES):
            continue
        if isinstance(found, torch.Tensor):
            if found.numel() == 1 and hyper(found):
                continue
            return "a tensor"
        if isinstance(found, Optimizer):
            return "another optimizer"
        if isinstance(found, dist.ProcessGroup):
            return "a process group"
        if len(held) == MOST_OBJECTS:
            return "too much to look through"
        seen.add(id(found))
        held.append(found)
        unseen += _parts(found)
    return None


def _parts(value: object) -> list[Any]:
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):  # its globals are the whole program
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)
