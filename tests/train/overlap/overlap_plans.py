"""Plans for the models of the overlap tests: cut, ordered and halved as a test wants them."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from syncline.plan.plan import Message, Plan, Tensor, Wait
from syncline.plan.planners.compressed import compressed
from syncline.plan.planners.dtypes import apart
from syncline.plan.profile import Norm
from syncline.plan.recipe import Rounded
from syncline.train.measure.profiler import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a plan's messages are made from a model's gradients."""

    piece_elements: int = 150
    """Messages end after so many elements: small tensors are merged, large ones split."""
    aligned: bool = False
    """Whether they also end where a tensor of at least so many elements begins or ends, so that
    there are several buckets."""
    order: str = "need"  # ``need`` (what is ready last first), ``ready``, or a seed to shuffle with
    decoupled: bool = False
    """Whether every message is a reduce-scatter and, after all of them, an all-gather."""
    wait: Wait = "need"
    in_flight: int = 2
    delay_s: float = 0.0
    norm: Norm | None = None
    wire: Rounded | None = None
    """The type in which gradients travel, if not their own; DDP has a hook that does so."""


def ready_order(module: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> list[str]:
    """Return the names of a model's parameters in the order in which gradients become ready.

    Those that get none come last, as in DDP's buckets.
    """
    # A copy of a scripted module has no leaves.
    scripted = any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())
    twin = module if scripted else copy.deepcopy(module)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    exchanged = {name: p for name, p in trained.items() if name not in ignored}
    order: list[str] = []
    for name, parameter in exchanged.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    with torch.random.fork_rng():
        loss(twin).backward()
    twin.zero_grad()
    used = list(dict.fromkeys(reversed(order)))[::-1]
    unused = [name for name in exchanged if name not in used]
    shared = [[*used, *unused]]
    dist.broadcast_object_list(shared)
    return shared[0]


def plan_of(module: nn.Module, order: Sequence[str], workers: int, style: Style) -> Plan:
    by_name = dict(module.named_parameters())
    tensors = tuple(
        Tensor(name=name, elements=by_name[name].numel(), dtype=dtype_name(by_name[name].dtype))
        for name in order
    )
    spans = list(itertools.pairwise(_cuts(tensors, style))) or [(0, 0)]
    if style.order == "need":
        spans.reverse()
    elif style.order != "ready":
        random.Random(style.order).shuffle(spans)
    kinds = ["reduce-scatter", "all-gather"] if style.decoupled else ["all-reduce"]
    plan = Plan(
        planner="by hand",
        model=type(module).__name__,
        workers=workers,
        tensors=tensors,
        messages=tuple(
            Message(start=a, stop=b, collective=kind, delay_s=style.delay_s)  # type: ignore[arg-type]
            for kind, (a, b) in itertools.product(kinds, spans)
        ),
        wait=style.wait,
        in_flight=style.in_flight,
        norm=style.norm if style.wait == "need" else None,
    )
    plan = apart(plan)
    return plan if style.wire is None else compressed(plan, style.wire)


def _cuts(tensors: Sequence[Tensor], style: Style) -> list[int]:
    ends = [0, *itertools.accumulate(tensor.elements for tensor in tensors)]
    if not style.aligned:
        return sorted({*range(0, ends[-1], style.piece_elements), ends[-1]})
    cuts = {0, ends[-1]}
    for tensor, (start, stop) in zip(tensors, itertools.pairwise(ends), strict=True):
        if tensor.elements >= style.piece_elements:
            cuts |= {*range(start, stop, style.piece_elements), stop}
    return sorted(cuts)
