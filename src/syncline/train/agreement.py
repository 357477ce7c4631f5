"""Checks that all ranks were given the same, before a collective waits for all of them."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError
from syncline.torch_private import device_types
from syncline.train.measure.exchange import gather_json, gathered
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer


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
    device = device_of(module, group)
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


def device_of(module: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group's backend can exchange a few bytes."""
    if any(device.type == "cpu" for device in device_types(group)):
        return torch.device("cpu")
    first = next(module.parameters(), None)
    if first is not None and first.device.type == "cuda":
        return first.device
    return torch.device("cuda", torch.cuda.current_device())
