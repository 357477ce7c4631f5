"""Runs the steps of a sparse exchange over a process group, point to point."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.errors import MismatchError, PeerError
from syncline.torch_private import device_types
from syncline.train.measure.exchange import describe_error, new_group_like
from syncline.train.measure.keepalive import keepalive
from syncline.train.sparse.algorithms import (
    UNREADABLE,
    Algorithm,
    Content,
    ExchangeOutcome,
    ExchangeStep,
    Refusal,
    Share,
)
from syncline.train.sparse.wire import WireFormat


class SparseTransport:
    """Sends and receives for one rank of a process group that nothing else uses meanwhile."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Use a group of any backend that sends tensors of the CPU."""
        # The group's methods are called directly, so that works can complete after the user has
        # destroyed all groups.
        self._group = group
        self._timeout = timeout
        self.rank = group.rank()
        self.ranks = group.size()
        self.sent_bytes = 0
        self._refused: MismatchError | None = None

    def run(self, algorithm: Algorithm, share: Share, wire: WireFormat) -> ExchangeOutcome:
        """Run an exchange; all ranks must call this.

        A rank that cannot read a message sends a refusal on, so that no other rank waits for it.

        Raises:
            PeerError: a rank failed, or did not answer in time.
            MismatchError: a message that reached this rank was of another exchange.
        """
        self._refused = None
        run = algorithm(share)
        try:
            step = next(run)
            while True:
                step = run.send(self._run_step(step, wire))
        except StopIteration as ended:
            outcome: ExchangeOutcome = ended.value
        if self._refused is not None:
            raise self._refused
        return outcome

    def all_reduce(self, values: Tensor, *, counted: bool = True) -> None:
        """Add up a contiguous tensor of the CPU over all ranks, in place.

        The bytes sent are added to :attr:`sent_bytes` if ``counted``.

        Raises:
            PeerError: a rank failed, or did not answer in time.
        """
        try:
            self._group.allreduce([keepalive(values)]).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("dense gradients were exchanged", error) from None
        self.sent_bytes += ring_bytes(values.nbytes, self.ranks) if counted else 0

    def _lost(self, doing: str, error: RuntimeError) -> PeerError:
        return PeerError(
            f"rank {self.rank} lost a peer while {doing}: "
            f"{describe_error(error, self._timeout.total_seconds())}; see the other ranks' output, "
            "and resume all ranks from the last checkpoint"
        )

    def _run_step(self, step: ExchangeStep, wire: WireFormat) -> tuple[Content, ...]:
        works: list[dist.Work] = []
        received = torch.empty(step.receives * wire.message_bytes, dtype=torch.uint8)
        try:
            if step.receive_from is not None:
                works.append(self._group.recv([received], step.receive_from, 0))
            if step.send_to is not None:
                messages = [wire.write(content) for content in step.contents]
                whole = messages[0] if len(messages) == 1 else np.concatenate(messages)
                sent = torch.from_numpy(whole)
                works.append(self._group.send([sent], step.send_to, 0))
                self.sent_bytes += sent.numel()
            for work in works:
                if work.wait(self._timeout) is False:
                    raise PeerError("the exchange was aborted")
        except RuntimeError as error:
            peers = {peer for peer in (step.send_to, step.receive_from) if peer is not None}
            whom = " and ".join(map(str, sorted(peers)))
            raise self._lost(f"sparse gradients were exchanged with rank {whom}", error) from None
        rows = received.numpy().reshape(step.receives, wire.message_bytes)
        return tuple(self._read(row, step.receive_from, wire) for row in rows)

    def _read(self, message: Any, sender: int | None, wire: WireFormat) -> Content:
        try:
            return wire.read(message)
        except MismatchError as error:
            # Some contents may be of other ranks, which the sender passed on.
            self._refused = MismatchError(
                f"rank {self.rank} cannot read what rank {sender} sent: {error}; give all ranks "
                "the same recipe and the same number of steps, and let all step ahead or none"
            )
            return Refusal(self.rank, UNREADABLE, sender or 0)


def own_group(base: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a process group of the same ranks, for CPU tensors; all of them must call this."""
    return new_group_like(base, backend=None if serves_the_cpu(base) else "gloo")


def serves_the_cpu(group: dist.ProcessGroup) -> bool:
    """Say whether a group's backend exchanges tensors of the CPU."""
    return "cpu" in {device.type for device in device_types(group)}


def ring_bytes(size_bytes: int, ranks: int) -> int:
    """Return how many bytes a rank sends in a ring all-reduce of ``size_bytes``."""
    return 2 * (ranks - 1) * size_bytes // ranks
