"""What torch says when a peer is gone, in words for the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from syncline.errors import PeerError, SynclineError

__all__ = ["is_lost_peer", "said_of", "telling_lost_peers"]

SIGNS = ("gloo", "connection closed", "connection reset", "timed out", "nccl")


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether torch says, in one of its ways, that a peer is gone or silent."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in SIGNS)


def said_of(error: Exception, timeout_s: float | None = None) -> str:
    """Return what an error of torch says, without its place in torch's source and its advice.

    Args:
        error: raised by a collective.
        timeout_s: of the process group, if known.
    """
    first = str(error).strip().split("\n", 1)[0]
    first = re.sub(r"^\[[^\]]*:\d+\]\s*", "", first)
    said = first.partition(". This is typically")[0].rstrip(".") or type(error).__name__
    if timeout_s is not None and re.search("timed ?out|timeout", said, re.IGNORECASE):
        return f"no answer within {timeout_s:g} s ({said})"
    return said


@contextmanager
def telling_lost_peers(doing: str) -> Iterator[None]:
    """Let the loss of a peer, which torch reports in many ways, be a PeerError.

    Args:
        doing: such as ``"while buffers were exchanged"``.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SynclineError) or not is_lost_peer(error):
            raise
        raise PeerError(
            f"rank {dist.get_rank()} lost a peer {doing}: {said_of(error)}; see the other ranks' "
            "output, and resume all ranks from the last checkpoint"
        ) from None
