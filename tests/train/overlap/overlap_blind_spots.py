"""What reads a parameter's memory without asking: the list of the documentation, tried out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils import dlpack

from tests.train.overlap.loop import Loop
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import Ours, holding
from tests.train.overlap.parts import Training, every


class Case(NamedTuple):
    """What there is when an update is deferred."""

    net: Any
    weight: nn.Parameter
    alias: torch.Tensor  # the weight's memory, taken before the step
    state: dict[str, Any]  # the optimizer's state of the weight, taken before the step
    scripted: Any  # a scripted function


class Direct(torch.Tensor):
    """Somebody's own tensor, which switches the asking off for all arguments."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _mixed(weight: torch.Tensor) -> torch.Tensor:
    inputs = torch.ones(1, weight.shape[1]).as_subclass(Direct)
    return functional.linear(inputs, weight).as_subclass(torch.Tensor)


BY_CPP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.tensor(p)": torch.tensor,
    "torch.Tensor(p)": torch.Tensor,
    "q.new_tensor(p)": lambda p: torch.zeros(1).new_tensor(p, dtype=p.dtype),
    "p.as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "q.set_(p)": lambda p: torch.empty(0, dtype=p.dtype).set_(p),
    "torch.sparse_coo_tensor(i, p)": lambda p: torch.sparse_coo_tensor(
        torch.arange(len(p))[None], p
    ).to_dense(),
    "nested_tensor([p])": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0)[0],
}  # each returns the values that it sees, of a matrix


def _by_cpp(name: str) -> Callable[[Case], torch.Tensor]:
    return lambda case: BY_CPP[name](case.weight)


BLIND: dict[str, Callable[[Case], torch.Tensor]] = {
    "a view of a parameter's memory that was taken before the step: `p.detach()`, `p.data`, a NumPy "  # noqa: E501
    "array, a flat buffer that the parameters are views of": lambda c: c.alias,
    "the optimizer's state of a parameter, where it was taken before the step and is read after it: "  # noqa: E501
    "`state = optimizer.state[p]`": lambda c: c.state["exp_avg"],
    "`torch.tensor(p)` (`p.clone()` asks)": _by_cpp("torch.tensor(p)"),
    "`torch.Tensor(p)`, `torch.FloatTensor(p)`, `q.new_tensor(p)`": _by_cpp("torch.Tensor(p)"),
    "`p.as_subclass(torch.Tensor)`": _by_cpp("p.as_subclass"),
    "`q.set_(p)`": _by_cpp("q.set_(p)"),
    "`q.data = p`, until the update is made": lambda c: _shared(c.weight),
    "`torch.sparse_coo_tensor(i, p)`": _by_cpp("torch.sparse_coo_tensor(i, p)"),
    "`torch.nested.nested_tensor([p])`": _by_cpp("nested_tensor([p])"),
    "`torch.utils.dlpack.to_dlpack(p)` (`torch.from_dlpack(p)` asks)": lambda c: dlpack.from_dlpack(
        dlpack.to_dlpack(c.weight)
    ),
    "a parameter that is given to a transformation: `torch.vmap(f)(p)`, `torch.func.grad(f)(p)` "
    "(what `f` reads by itself is seen)": lambda c: torch.vmap(lambda row: row * 2)(c.weight),
    "a TorchScript function that is given a parameter": lambda c: c.scripted(c.weight),
    "a TorchScript module that is called past the module that holds it": lambda c: _inside(c.net),
    "a tensor class of your own that switches `__torch_function__` off for all arguments": lambda c: (  # noqa: E501
        _mixed(c.weight)
    ),
}  # those that can be tried here
UNTRIED = (
    "a function of a C++ extension that takes tensors directly (operators under `torch.ops` ask)",
)
BY_GROUP = (
    "a process group's own methods: `group.allreduce([p.grad])` (`dist.all_reduce(p.grad)` asks)"
)
GUARDED = " (waits with the guard)"
UNGUARDED = (
    *("a view of", "the optimizer's state", "`q.data = p`", "`torch.utils.dlpack"),
    *("a TorchScript module", "a function of a C++ extension"),
)
NEVER_SEEN = frozenset(text for text in (*BLIND, *UNTRIED) if text.startswith(UNGUARDED))
"""Those that the guard does not see either."""


def _shared(weight: torch.Tensor) -> torch.Tensor:
    other = torch.empty(())
    other.data = weight
    return other


def _inside(net: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = net.hidden(torch.ones(1, 20))
    return output.flatten()


def table() -> str:
    texts = (*BLIND, BY_GROUP, *UNTRIED)
    return "".join(f"- {text}{'' if text in NEVER_SEEN else GUARDED}\n" for text in texts)


def _average_gradients(t: Training) -> None:
    for gradient in t.gradients:
        dist.group.WORLD.allreduce([gradient]).wait()  # type: ignore[union-attr]


def _average_weight(t: Training) -> None:
    with torch.no_grad():
        dist.group.WORLD.allreduce([t.net.hidden.weight]).wait()  # type: ignore[union-attr]


by_group = Loop(before=every(3, _average_gradients), after=every(2, _average_weight))
"""Averages gradients before the step, and a parameter after it, by a group's own methods."""


def look(guard: bool) -> dict[str, tuple[bool, bool]]:
    """Look at each while an update is deferred: is it stale, but not after ``synchronize``?"""
    found = {}
    with holding(0.0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript, nested tensors, torch.tensor
        scripted = torch.jit.script(_sum)
        torch.manual_seed(1)
        net = Net(hidden=torch.jit.script(nn.Sequential(nn.Linear(20, 20), nn.Tanh())))
        side = Ours(Style(), guard=guard)
        ddp = side.wrap(net, loss_of)
        optimizer = side.overlap(ddp, torch.optim.Adam(ddp.parameters(), lr=0.01))
        for step, (text, read) in enumerate([("", None)] * 4 + list(BLIND.items())):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            weight = net.enter.weight
            state = optimizer.state[weight] if step else {}
            case = Case(net, weight, weight.detach(), state, scripted)
            optimizer.step()
            if read is not None:
                stale = read(case).detach().clone()
                side.synchronize(ddp)
                settled = read(case).detach().clone()
                side.synchronize(ddp)
                again = read(case).detach()
                found[text] = not torch.equal(stale, settled), torch.equal(settled, again)
        side.close()
    return found


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.abs().sum()
