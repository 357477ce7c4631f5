"""Small values exchanged and compared by all ranks of a group, and reports of lost peers."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.errors import MismatchError, PeerError, SynclineError
from syncline.torch_private import set_group_count, timeout_of_backend
from syncline.train.measure.keepalive import keepalive


def gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return every rank's ``value``, which JSON can hold, on every rank, in rank order.

    All ranks of the group must call. ``device`` is that of the tensors that the backend exchanges.

    Raises:
        PeerError: another rank failed or did not answer within the group's timeout.
    """
    text = bytearray(msgspec.json.encode(value))
    own_size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = [int(size) for size in gathered(own_size, group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    texts = gathered(padded.to(device), group)
    return [
        msgspec.json.decode(bytes(text[:size].tolist()))
        for text, size in zip(texts, sizes, strict=True)
    ]


def gather_numbers(
    values: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return every rank's numbers, equally many, by one collective; as :func:`gather_json`."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    return [numbers.tolist() for numbers in gathered(own, group)]


def share_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the value of the group's rank 0 on every rank; otherwise as :func:`gather_json`."""
    source = dist.get_global_rank(group, 0)
    is_source = dist.get_rank(group) == 0
    text = bytearray(msgspec.json.encode(value)) if is_source else bytearray()
    with _naming_the_rank(group):
        size = torch.tensor([len(text)], dtype=torch.int64, device=device)
        dist.broadcast(keepalive(size), source, group=group)
        text = text or bytearray(int(size))
        data = torch.frombuffer(text, dtype=torch.uint8).to(device)
        dist.broadcast(keepalive(data), source, group=group)
    return value if is_source else msgspec.json.decode(bytes(data.cpu().tolist()))


def gathered(own: torch.Tensor, group: dist.ProcessGroup, doing: str = "") -> list[torch.Tensor]:
    """Return every rank's tensor, all of one shape, on the CPU; ``doing`` is for the error."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with _naming_the_rank(group, doing):
        dist.all_gather([keepalive(each) for each in everyone], keepalive(own), group=group)
        return [each.cpu() for each in everyone]


@contextmanager
def _naming_the_rank(group: dist.ProcessGroup, doing: str = "") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank(group)} lost a peer{doing}: {describe_error(error)}; see the "
            "other ranks' output"
        ) from error


def require_same(
    items: Mapping[str, str], group: dist.ProcessGroup, device: torch.device, *, advice: str
) -> None:
    """Raise on all ranks if any rank's items differ; all ranks of the group must call.

    ``items`` describe what is compared, in order, by names such as ``"parameter 3"``. The ranks
    exchange a digest of 32 bytes, and the items only if it differs. ``advice`` tells the user what
    to do.

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


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a group's collectives wait for a rank."""
    own = getattr(group, "timeout", None)  # of our backend, which has none of torch's inside
    return own if isinstance(own, timedelta) else timeout_of_backend(group)


def new_group_like(
    base: dist.ProcessGroup, *, backend: str | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """Make another process group of a group's ranks, by default with its backend; all must call."""
    ranks = dist.get_process_group_ranks(base)
    if dist.get_backend(base) == "gloo" and len(ranks) == dist.get_world_size():
        # Torch numbers groups from 0, so after torchrun has restarted ranks on the same store, Gloo
        # would find the addresses of ended processes under the same names, and fail. Groups of
        # fewer ranks than the world are named after their ranks instead.
        first = torch.tensor(secrets.randbits(62))
        dist.broadcast(first, src=dist.get_global_rank(base, 0), group=base)
        set_group_count(int(first))
    group = dist.new_group(
        ranks,
        timeout=timeout_of(base),
        backend=backend or dist.get_backend(base),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


LOST_PEER_WORDS = ("gloo", "connection closed", "connection reset", "timed out", "nccl")


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether an error of torch says that a peer has ended or does not answer."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST_PEER_WORDS)


def describe_error(error: Exception, timeout_s: float | None = None) -> str:
    """Return the message of an error of torch's collective, without source location and advice."""
    first = str(error).strip().split("\n", 1)[0]
    first = re.sub(r"^\[[^\]]*:\d+\]\s*", "", first)
    said = first.partition(". This is typically")[0].rstrip(".") or type(error).__name__
    if timeout_s is not None and re.search("timed ?out|timeout", said, re.IGNORECASE):
        return f"no answer within {timeout_s:g} s ({said})"
    return said


@contextmanager
def telling_lost_peers(
    doing: str, *, rank: str | None = None, then: str = "resume all ranks from the last checkpoint"
) -> Iterator[None]:
    """Turn the loss of a peer, which torch reports in many ways, into a :class:`PeerError`.

    ``rank`` is for use without a process group, and ``then`` says what the user should do next.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SynclineError) or not is_lost_peer(error):
            raise
        raise PeerError(
            f"rank {dist.get_rank() if rank is None else rank} lost a peer {doing}: "
            f"{describe_error(error)}; see the other ranks' output, and {then}"
        ) from None
