"""``Replayed``: a model with a profile's parameters, whose computation is waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.optim import Optimizer

from syncline.errors import UserError, quoted
from syncline.lab.replay.clock import DeviceClock
from syncline.lab.replay.work import Computation
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile

OWN_ATTRIBUTES = ("clock", "gradient_names", "optimizer", "profile", "work")
"""Public attributes of :class:`Replayed`; the others have underscores."""
RESERVED = frozenset([*dir(nn.Module()), *OWN_ATTRIBUTES])  # names that torch refuses for a child


def module_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name under which each gradient's parameter stands in a module.

    The parts between dots name submodules, the last one the parameter. Different names stay
    different, and names change only where they must:

    - A name of one part gets the part ``weight``; else its parameter would belong to the outermost
      module, and be needed before everything else.
    - A part that is empty, begins with an underscore or is an attribute of every module gets an
      underscore at its end.
    - A parameter with the name of another or of a submodule gets as many underscores as it needs.
    """
    paths = [[_allowed(part) for part in name.split(".")] for name in names]
    for path in paths:
        if len(path) == 1:
            path.append("weight")
    modules = {tuple(path[:depth]) for path in paths for depth in range(1, len(path))}
    taken: set[tuple[str, ...]] = set()
    # Names that can stay are placed first, so that only the others give way.
    for _, path in sorted(zip(names, paths, strict=True), key=lambda p: ".".join(p[1]) != p[0]):
        while tuple(path) in modules or tuple(path) in taken:
            path[-1] += "_"
        taken.add(tuple(path))
    return {name: ".".join(path) for name, path in zip(names, paths, strict=True)}


def _allowed(part: str) -> str:
    return f"{part}_" if not part or part in RESERVED or part.startswith("_") else part


def renamed_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with other names of its tensors, which must all be among ``names``."""
    tensors = tuple(msgspec.structs.replace(t, name=names[t.name]) for t in plan.tensors)
    return msgspec.structs.replace(plan, tensors=tensors)


class ReplayedOptimizer(Optimizer):
    """Takes as long as the profile's update, for the parameters that have a gradient.

    Like any optimizer that updates each parameter from its own gradient alone, it may be stepped
    for some of its parameters at a time; each takes its share of the time by its bytes. ``work`` is
    not needed if every group of ``params`` names it, as the groups of another such optimizer do.
    """

    def __init__(self, params: Any, work: Computation | None = None) -> None:
        # A setting of the groups, not an attribute: wrappers that make an optimizer of their own
        # class hand over the groups and nothing else.
        super().__init__(params, {"work": work})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let the device wait for as long as the update takes; the host goes on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            work: Computation = group["work"]
            stepped = [p for p in group["params"] if p.grad is not None]
            if stepped:
                work.update(sum(p.nbytes for p in stepped), len(stepped))
        return loss


VALUES = 7  # how many different values gradients take: small whole numbers, exact in every dtype


def gradient_value(rank: int, iteration: int, tensor: int) -> float:
    """Return the value of every element of a gradient (its index is in ready order) on a rank."""
    return float(1 + (rank + iteration + tensor) % VALUES)


RECYCLED_BYTES = 64 * 1024
"""malloc may take memory of this size or more from the kernel each time, which clears every page. A
device's allocator does not. For VGG-16 on four hosts, clearing took half a second an iteration."""


class Replayed(nn.Module):
    """A module with the gradients of a profile, which waits as long as the profile computes.

    Called without arguments it runs the forward operations, by waiting, and returns a loss whose
    ``backward()`` runs the backward operations and delivers every gradient when the profile does.
    Submodules that own parameters are called just before the operation that first needs one of
    them, so that pre-forward hooks that wait for parameters wait there.

    A large gradient always has the same memory, which the next backward pass overwrites: set
    gradients to None before it, as ``zero_grad`` does. Their values depend on ``rank``. Parameters
    are vectors unless ``shapes`` has their shape, by name in the profile.

    Raises:
        UserError: a shape has another number of elements than the gradient.
    """

    def __init__(
        self,
        profile: Profile,
        clock: DeviceClock | None = None,
        *,
        rank: int = 0,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.gradient_names = module_names([g.name for g in profile.gradients])
        """Name of each gradient's parameter here, by its name in the profile."""
        renamed = tuple(
            msgspec.structs.replace(g, name=self.gradient_names[g.name]) for g in profile.gradients
        )
        self.profile = msgspec.structs.replace(profile, gradients=renamed)
        """What is replayed, under the names of the parameters."""
        self.clock = clock if clock is not None else DeviceClock()
        self.work = Computation(self.profile, self.clock)
        self._rank = rank
        self._iteration = -1
        # Modules are mostly written in the order of the forward pass.
        for gradient in reversed(profile.gradients):
            shape = tuple((shapes or {}).get(gradient.name, (gradient.elements,)))
            if math.prod(shape) != gradient.elements:
                raise UserError(
                    f"gradient {quoted(gradient.name)} has {gradient.elements} elements, but the "
                    f"shape {shape} has {math.prod(shape)}"
                )
            _register(self, self.gradient_names[gradient.name], shape, gradient.dtype)
        self._visits = tuple(self._plan_visits())
        chained = [part.tensor for visit in self._visits for part in visit.parts]
        self._in_step = chained == sorted(chained, reverse=True)
        """Whether gradients become ready in the reverse order of the modules."""

    def optimizer(self) -> ReplayedOptimizer:
        """Return an optimizer of all parameters that takes as long as the profile's update."""
        return ReplayedOptimizer(self.parameters(), self.work)

    def forward(self) -> Tensor:
        """Run the forward operations and return the loss."""
        self._iteration += 1
        self.work.begin()
        token = torch.zeros((), requires_grad=True).clone()
        token.register_hook(lambda _: self.work.backward(None))  # after the last gradient
        for visit in self._visits:
            self.work.forward(visit.needed_by)
            token = visit.owner(token, visit.parts if self._in_step else (), self._value)
            self.work.arrived(visit.needed_by)
        self.work.forward(self.work.first_backward)
        if not self._in_step:
            # A second pass over the modules chains the work of the backward pass.
            parts = [(part, visit.owner) for visit in self._visits for part in visit.parts]
            for part, owner in sorted(parts, key=lambda pair: -pair[0].tensor):
                token = owner(token, (part,), self._value)
        return token

    def _value(self, tensor: int) -> float:
        return gradient_value(self._rank, self._iteration, tensor)

    def _plan_visits(self) -> Iterator[_Visit]:
        """Yield the modules that own parameters in the order in which they are called."""
        needs = self.profile.need_operations()
        owned: dict[str, list[int]] = {}
        for index, gradient in enumerate(self.profile.gradients):
            owned.setdefault(gradient.name.rpartition(".")[0], []).append(index)

        def first_need(path: str) -> int:
            return min(needs[index] for index in owned[path])

        # Of those that one operation needs, the last to be ready is first: backward mirrors this.
        for path in sorted(owned, key=lambda path: (first_need(path), -owned[path][-1])):
            owner = self.get_submodule(path)
            assert isinstance(owner, _Owner)
            parts = []
            for index in reversed(owned[path]):
                gradient = self.profile.gradients[index]
                name = gradient.name.rpartition(".")[2]
                large = gradient.size_bytes > RECYCLED_BYTES
                dtype = getattr(torch, gradient.dtype)
                made = torch.zeros(gradient.elements, dtype=dtype) if large else None
                parts.append(_Part(self.work, made, index, gradient.ready_after, name))
            yield _Visit(owner, first_need(path), tuple(parts))


class _Part(NamedTuple):
    """One gradient, as the backward pass makes it."""

    work: Computation
    made: Tensor | None  # where a large one is made, of shape (elements,)
    tensor: int  # its index in ready order
    ready_after: int
    parameter: str


class _Owner(nn.Module):
    """A module that owns parameters."""

    def forward(
        self, token: Tensor, parts: Sequence[_Part], value_of: Callable[[int], float]
    ) -> Tensor:
        """Return the token behind the backward operations that make its gradients."""
        for part in parts:
            parameter = getattr(self, part.parameter)
            token = _Ready.apply(token, part, value_of(part.tensor), parameter)  # type: ignore[no-untyped-call]
        return token


class _Visit(NamedTuple):
    """A module that is called before an operation."""

    owner: _Owner
    needed_by: int
    parts: tuple[_Part, ...]  # the last to be ready first


class _Ready(Function):
    """Backward: runs the operations up to the one that finishes a gradient, then delivers it.

    Each gradient has its own node: if a node returned several, their order would be undefined.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: _Part, value: float, parameter: Tensor) -> Tensor:
        ctx.part, ctx.value = part, value
        ctx.shape, ctx.dtype, ctx.device = parameter.shape, parameter.dtype, parameter.device
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor]:
        part: _Part = ctx.part
        part.work.backward(part.ready_after)
        if part.made is None:
            # One element, expanded: torch makes the whole tensor when it stores the gradient.
            made = torch.full((), ctx.value, dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)
        else:
            # torch keeps this tensor itself as the gradient.
            made = part.made.fill_(ctx.value).view(ctx.shape)
        return gradient, None, None, made


def _register(root: nn.Module, name: str, shape: tuple[int, ...], dtype: str) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, _Owner())
        module = module.get_submodule(part)
    # Zeros that nobody writes to take no memory: the kernel maps pages when they are written.
    zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
    module.register_parameter(last, nn.Parameter(zeros))
