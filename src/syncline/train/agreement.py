"""Checks that all ranks were given the same, before a collective waits for all of them."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError, UserError
from syncline.plan.document import Document
from syncline.torch_entry import untried
from syncline.torch_private import device_types, ignored_by_ddp
from syncline.train.measure.exchange import gather_json, gathered
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer
from syncline.train.stages import Settings

COMPARED_ARGUMENTS = (
    *("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_cap_mb"),
    *("gradient_as_bucket_view", "init_sync"),
)
"""Arguments of torch's class that change which collectives are issued."""


def require_same_training(
    module: nn.Module, settings: Settings, arguments: Mapping[str, Any], refused: UserError | None
) -> None:
    """Compare module, settings and arguments, before torch's constructor waits for all ranks.

    Without a process group nothing is compared: torch's constructor reports that. ``arguments`` are
    those of torch's class. ``refused`` is this rank's own error, if any; it is raised once the
    other ranks know of it. Otherwise raises as :func:`require_same`.
    """
    group = _group_of(arguments)
    if group is not None:
        compared = {f.name: getattr(settings, f.name) for f in fields(settings)}
        compared |= {n: arguments[n] for n in COMPARED_ARGUMENTS if n in arguments}
        items = {
            "arguments": "accepted" if refused is None else f"refused: {refused}",
            # With an untested torch, this rank alone would train with DDP's own buckets.
            "torch": "tried" if untried(torch.__version__) is None else torch.__version__,
            **{name: _describe(value) for name, value in compared.items()},
            **dict(_items_of(module)),
        }
        try:
            require_same(
                items,
                group,
                _device_of(module, group),
                advice="build the same model with the same arguments on every rank",
            )
        except MismatchError as error:
            raise refused or error from None
    if refused is not None:
        raise refused


def require_same_ranks(
    optimizers: Sequence[DeferredOptimizer],
    state: str | None,
    module: nn.Module,
    group: dist.ProcessGroup,
) -> None:
    """Compare optimizers and compression state; raises as :func:`require_same`.

    The optimizers are those given to ``overlap``, in the order of the calls. ``state`` describes
    the step and plan from which a compressed training continues.
    """
    device = _device_of(module, group)
    items = {
        f"call {number} of overlap": (
            f"for {type(o.optimizer).__name__} with "
            f"{sum(len(g['params']) for g in o.optimizer.param_groups)} parameters, "
            + ("deferred" if o.why_not is None else f"synchronous: {o.why_not}")
        )
        for number, o in enumerate(optimizers, 1)
    }
    advice = "call overlap on every rank, with the same optimizers"
    require_same(items, group, device, advice=advice)
    if state is not None:
        advice = "load the states of one checkpoint on all ranks"
        require_same({"the compression's state": state}, group, device, advice=advice)


def require_same(
    items: Mapping[str, str], group: dist.ProcessGroup, device: torch.device, *, advice: str
) -> None:
    """Raise on all ranks if any rank's items differ; all ranks of the group must call.

    One collective of 32 bytes; the items themselves are sent only if they differ. They are ordered
    descriptions by names such as ``"parameter 3"``. ``advice`` tells the user what to do.

    Raises:
        MismatchError: names a rank that differs from most, and the first difference.
        PeerError: a rank did not take part within the group's timeout.
    """
    text = "\0".join(itertools.chain.from_iterable(items.items()))
    own_digest = bytearray(hashlib.sha256(text.encode()).digest())
    own = torch.frombuffer(own_digest, dtype=torch.uint8).to(device)
    everyone = gathered(own, group, " while the ranks compared what they were given")
    digests = [bytes(other.tolist()) for other in everyone]
    if len(set(digests)) == 1:
        return
    listed = gather_json(dict(items), group, device)
    ranks = dist.get_process_group_ranks(group)
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    odd, *others = [n for n, digest in enumerate(digests) if digest != digests[usual]]
    one, other = listed[odd], listed[usual]
    place = {name: at for items in (one, other) for at, name in enumerate(items)}
    name = min((n for n in place if one.get(n) != other.get(n)), key=place.__getitem__)
    raise MismatchError(
        f"{name} is {one.get(name, 'missing')} on rank {ranks[odd]} and "
        f"{other.get(name, 'missing')} on rank {ranks[usual]}"
        + (f"; ranks {', '.join(str(ranks[n]) for n in others)} differ too" if others else "")
        + f"; {advice}"
    )


def _items_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the parameters and buffers that torch's class broadcasts, without the ignored ones."""
    ignored = ignored_by_ddp(module)
    for kind, tensors in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        kept = ((name, tensor) for name, tensor in tensors if name not in ignored)
        for number, (name, tensor) in enumerate(kept):
            yield f"{kind} {number}", _describe_tensor(name, tensor)


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    lazy = nn.parameter.is_lazy(tensor)
    shape = "no shape yet" if lazy else f"shape {tuple(tensor.shape)}"
    frozen = (
        ", no gradient" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    )
    return f"{name!r} of {shape}, {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _describe(value: Any) -> str:
    if not isinstance(value, Document):
        return repr(value)
    digest = hashlib.sha256(value.to_json().encode()).hexdigest()
    return f"a {value.KIND} with the SHA-256 {digest[:16]}"


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group that torch's class will use; None if this rank is in none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if group is None and mesh is not None:
        if mesh.ndim != 1:
            return None  # torch's constructor raises
        group = mesh.get_group(mesh_dim=0)
    group = group if group is not None else dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


def _device_of(module: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group's backend can exchange a few bytes."""
    if any(device.type == "cpu" for device in device_types(group)):
        return torch.device("cpu")
    first = next(module.parameters(), None)
    if first is not None and first.device.type == "cuda":
        return first.device
    return torch.device("cuda", torch.cuda.current_device())
