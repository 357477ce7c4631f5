"""Carrying out the steps of an exchange over a process group, point to point."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from syncline.errors import MismatchError, PeerError
from syncline.measure.lost import said_of
from syncline.sparse.exchange import Algorithm, Content, Outcome, Refusal, Share, Step
from syncline.sparse.wire import Wire

__all__ = ["UNREADABLE", "Courier"]

UNREADABLE = 1
"""The reason of a refusal: a message is of another exchange; the detail is the sender's rank."""


class Courier:
    """Sends and receives for one rank of a process group that nothing else uses meanwhile."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Use a group.

        Args:
            group: of any backend that sends tensors of the CPU.
            timeout: after which a peer that does not answer counts as lost.
        """
        self._group = group
        self._timeout = timeout
        self.rank = group.rank()
        self.ranks = group.size()
        self._refused: MismatchError | None = None

    def run(self, algorithm: Algorithm, share: Share, wire: Wire) -> Outcome:
        """Run an exchange; all ranks must.

        A message that cannot be read makes this rank refuse, and go on: so the refusal reaches all
        ranks, and none waits.

        Raises:
            PeerError: a rank failed, or did not answer in time.
            MismatchError: a message that reached this rank was of another exchange.
        """
        self._refused = None
        run = algorithm(share)
        arrived: tuple[Content, ...] | None = None
        while True:
            try:
                step = run.send(arrived)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as ended:
                outcome: Outcome = ended.value
                break
            arrived = self._carried_out(step, wire)
        if self._refused is not None:
            raise self._refused
        return outcome

    def all_reduce(self, values: torch.Tensor) -> None:
        """Add up a dense tensor over all ranks, in place.

        Raises:
            PeerError: a rank failed, or did not answer in time.
        """
        try:
            work = dist.all_reduce(values, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("dense gradients were exchanged", error) from None

    def _lost(self, doing: str, error: RuntimeError) -> PeerError:
        return PeerError(
            f"rank {self.rank} lost a peer while {doing}: "
            f"{said_of(error, self._timeout.total_seconds())}; see the other ranks' output, and "
            "resume all ranks from the last checkpoint"
        )

    def _carried_out(self, step: Step, wire: Wire) -> tuple[Content, ...]:
        works: list[dist.Work] = []
        received = torch.empty(step.receives * wire.message_bytes, dtype=torch.uint8)
        try:
            if step.receive_from is not None:
                works.append(self._started(dist.irecv, received, step.receive_from))
            if step.send_to is not None:
                messages = [wire.write(content) for content in step.contents]
                whole = messages[0] if len(messages) == 1 else np.concatenate(messages)
                sent = torch.from_numpy(whole)
                works.append(self._started(dist.isend, sent, step.send_to))
            if step.meanwhile is not None:
                step.meanwhile()
            for work in works:
                if work.wait(self._timeout) is False:
                    raise PeerError("the exchange was aborted")
        except RuntimeError as error:
            peers = {peer for peer in (step.send_to, step.receive_from) if peer is not None}
            whom = " and ".join(map(str, sorted(peers)))
            raise self._lost(f"sparse gradients were exchanged with rank {whom}", error) from None
        rows = received.numpy().reshape(step.receives, wire.message_bytes)
        return tuple(self._read(row, step.receive_from, wire) for row in rows)

    def _started(self, start: Any, tensor: torch.Tensor, peer: int) -> dist.Work:
        work: dist.Work = start(tensor, dist.get_global_rank(self._group, peer), group=self._group)
        return work

    def _read(self, message: Any, sender: int | None, wire: Wire) -> Content:
        try:
            return wire.read(message)
        except MismatchError as error:
            # With several contents the sender has passed on those of others.
            self._refused = MismatchError(
                f"rank {self.rank} cannot read what rank {sender} sent: {error}; give all ranks "
                "the same recipe and the same number of steps"
            )
            return Refusal(self.rank, UNREADABLE, sender or 0)
