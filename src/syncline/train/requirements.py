"""Checks of arguments: whether they are usable and the same on all ranks, and allow planning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError, UserError
from syncline.plan.document import Document
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.dtypes import apart
from syncline.torch_entry import advice, untried
from syncline.torch_private import (
    TorchDDP,
    active_ddp,
    device_types,
    ignored_by_ddp,
    is_tensor_parallel,
    reducer_parameters,
)
from syncline.train.engine.compression import require_compression
from syncline.train.measure.exchange import require_same
from syncline.train.measure.profiler import dtype_name
from syncline.train.overlap.deferred_optimizer import is_overlapped
from syncline.train.stages import Settings
from syncline.train.wrapped import Wrapped

WRAPPED_TWICE = (
    "the model is wrapped in two DistributedDataParallel at once, one of them Syncline's, so that "
    "both would exchange its gradients; give the framework the model itself and let its adapter "
    "wrap it, or wrap it only here"
)
COPIED = (
    "a copy was put in the wrapper's place before the first forward pass, as Accelerate does to "
    "compile block by block (use_regional_compilation), and its parameters have other names; "
    "compile the blocks before prepare instead: for block in model.blocks: block.compile()"
)
SHARED_MEMORY = "some parameters share memory, so an update of one may change another"
TENSOR_PARALLEL = (
    "the model is tensor-parallel, too: it computes with distributed tensors made of its "
    "parameters' memory, and reads of these cannot be seen"
)
COMPARED_ARGUMENTS = (
    *("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_cap_mb"),
    *("gradient_as_bucket_view", "init_sync"),
)
"""Arguments of torch's class that change which collectives are issued."""


def require_accepted(module: nn.Module, arguments: Mapping[str, Any], settings: Settings) -> None:
    """Raise on all ranks if they differ, or on this rank if its arguments cannot be used.

    Call before torch's constructor, which waits for all ranks; ``arguments`` are its own, by name.
    Without a process group nothing is compared, and torch's constructor raises.
    """
    refused = None
    try:
        _require_usable(module, arguments, settings)
    except UserError as error:
        refused = error
    group = _group_of(arguments)
    if group is not None:
        compared = {f.name: getattr(settings, f.name) for f in fields(settings)}
        compared |= {n: arguments[n] for n in COMPARED_ARGUMENTS if n in arguments}
        items = {
            "arguments": "accepted" if refused is None else f"refused: {refused}",
            # With an untested torch, this rank alone would train with DDP's buckets.
            "torch": "tried" if untried(torch.__version__) is None else torch.__version__,
            **{name: _describe(value) for name, value in compared.items()},
            **dict(_items_of(module)),
        }
        advised = "build the same model with the same arguments on every rank"
        try:
            require_same(items, group, _device_of(module, group), advice=advised)
        except MismatchError as error:
            raise refused or error from None
    if refused is not None:
        raise refused


def require_same_ranks(wrapped: Wrapped) -> None:
    """Raise on all ranks if what was given to ``overlap``, or to continue from, differs."""
    group, compressing = wrapped.group, wrapped.compressing
    device = _device_of(wrapped.module, group)
    items = {
        f"call {number} of overlap": (
            f"for {type(o.optimizer).__name__} with "
            f"{sum(len(g['params']) for g in o.optimizer.param_groups)} parameters, "
            + ("deferred" if o.why_not is None else f"synchronous: {o.why_not}")
        )
        for number, o in enumerate(wrapped.optimizers, 1)
    }
    advised = "call overlap on every rank, with the same optimizers"
    require_same(items, group, device, advice=advised)
    if compressing is not None:
        state = {"the compression's state": compressing.description()}
        advised = "load the states of one checkpoint on all ranks"
        require_same(state, group, device, advice=advised)


def _items_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the parameters and buffers that torch's class broadcasts, without the ignored ones."""
    ignored = ignored_by_ddp(module)
    kinds = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    for kind, tensors in kinds.items():
        kept = ((name, tensor) for name, tensor in tensors if name not in ignored)
        for number, (name, tensor) in enumerate(kept):
            yield f"{kind} {number}", _describe_tensor(name, tensor)


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    lazy = nn.parameter.is_lazy(tensor)
    shape = "no shape yet" if lazy else f"shape {tuple(tensor.shape)}"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name!r} of {shape}, {dtype_name(tensor.dtype)}{', no gradient' if is_frozen else ''}"


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


def _require_usable(module: nn.Module, arguments: Mapping[str, Any], settings: Settings) -> None:
    if untried(torch.__version__) == "older":
        raise UserError(
            f"torch {torch.__version__} is older than those that DistributedDataParallel was made "
            f"for; {advice()}; or use torch.nn.parallel.DistributedDataParallel"
        )
    plan = settings.plan
    if plan is not None and (settings.profile is not None or settings.network is not None):
        raise UserError(
            "a plan was given, so a profile or network would be ignored; give one or the other"
        )
    if arguments.get("bucket_cap_mb_list"):
        raise UserError(
            "bucket_cap_mb_list sets the buckets by hand; give a plan instead, or use torch's "
            "DistributedDataParallel"
        )
    ignored = ignored_by_ddp(module)
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(inner, TorchDDP) and any(
            p.requires_grad and prefix + own not in ignored for own, p in inner.named_parameters()
        ):
            raise UserError(WRAPPED_TWICE)
    planner_named(settings.planner)
    if settings.planner.startswith(f"{Ddp.NAME}:"):
        raise UserError(
            f"planner {Ddp.NAME} takes the sizes of its buckets from the wrapper: give "
            f"bucket_cap_mb, not {settings.planner!r}"
        )
    require_compression(
        module, settings.compression, plan, planner=settings.planner, check=settings.check
    )


def require_shardable(wrapped: Wrapped, optimizer: torch.optim.Optimizer, *, shard: bool) -> None:
    """Raise a UserError if an optimizer cannot be sharded, regardless of what its step does."""
    reason = None
    if wrapped.optimizers and not (shard and wrapped.sharding is not None):
        reason = "all optimizers of a model are sharded, or none"
    elif any(known.optimizer is optimizer for known in wrapped.optimizers):
        reason = "it was called twice for this optimizer"
    elif is_overlapped(optimizer):
        reason = "another model overlaps this optimizer"
    elif wrapped.compressing is not None:
        reason = "compressed gradients have residuals on every rank; leave compression out"
    elif is_tensor_parallel(wrapped.parameters.values()):
        reason = TENSOR_PARALLEL
    elif wrapped.share_memory:
        reason = SHARED_MEMORY
    if reason is not None:
        raise UserError(f"overlap(shard=True): {reason}")


def require_given_fits(wrapped: Wrapped, settings: Settings) -> None:
    """Raise a MismatchError if a given plan, profile or network is for another training."""
    workers = dist.get_world_size(wrapped.group)
    plan, profile, network = settings.plan, settings.profile, settings.network
    if network is not None and network.workers != workers:
        raise MismatchError(
            f"the given network {network.name!r} is of {network.workers} workers, this job has "
            f"{workers}; probe this one, or extrapolate with Network.with_workers"
        )
    if profile is not None:
        last = len(profile.gradients) - 1
        plan = apart(Plan.merging(settings.planner, profile, workers, [last]))
    if plan is not None:
        require_fitting(plan, wrapped, "given profile" if profile is not None else "given plan")


def require_fitting(plan: Plan, wrapped: Wrapped, what: str) -> None:
    """Raise a MismatchError if a plan is for another model or worker count."""
    difference = plan.difference(wrapped.tensors(), dist.get_world_size(wrapped.group))
    if difference is not None:
        raise MismatchError(
            f"the {what} does not fit: {difference}; "
            "profile and plan this model at this worker count again"
        )
    if apart(plan) != plan and wrapped.why_not_planned() is None:
        raise MismatchError(
            f"the {what} does not fit: it lists gradients of several dtypes in turns, or a message "
            "holds several, which no collective sums; plan this model again"
        )


def require_outermost(wrapped: Wrapped) -> None:
    """Raise a UserError if another wrapper also exchanges this one's gradients."""
    outer = active_ddp()
    if outer is not None and outer is not wrapped.ddp:
        ours = wrapped.parameter_ids
        if any(id(p) in ours for p in reducer_parameters(outer)[0]):
            raise UserError(WRAPPED_TWICE)


def why_untried() -> str | None:
    """Say why nothing is planned under this version of torch, or None."""
    if untried(torch.__version__) is None:
        return None
    return f"torch {torch.__version__} is newer than those that Syncline was tried with; {advice()}"
