"""The engine of one stage of training, with its hooks and gates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from syncline.measure.exchange import rename_new_groups, telling_lost_peers, timeout_of
from syncline.model.plan import Plan
from syncline.model.quantities import NS_PER_S
from syncline.parallel.carrier import carrier_for
from syncline.parallel.deferral import Deferral
from syncline.parallel.engine import Engine
from syncline.parallel.gates import Gates
from syncline.parallel.layout import Layout
from syncline.parallel.leaving import finish_on_leaving
from syncline.parallel.recording import EngineTimes
from syncline.parallel.rounds import Rounds
from syncline.parallel.watches import Pace

if TYPE_CHECKING:
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = ["StageEngine", "engine_group", "group_timeout_s"]


class StageEngine:
    """Runs one plan under a wrapped module until :meth:`stop`.

    Made before the reducer is constructed anew with :attr:`layout`'s buckets and :attr:`hook`;
    :meth:`start` afterwards.

    Args:
        ddp: the wrapper.
        plan: to run.
        group: the engine's own.
        finished: is called at the end of every backward pass whose gradients are exchanged.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plan: Plan,
        group: dist.ProcessGroup,
        finished: Callable[[], None],
    ) -> None:
        self._ddp = ddp
        self.layout = Layout.of(plan)
        by_name = ddp._exchanged_parameters()
        deferral = Deferral(
            {tensor.name: by_name[tensor.name] for tensor in plan.tensors}, ddp._guard
        )
        self.deferral = deferral
        self._waits_by_need = plan.wait == "need"
        self.defers = self._waits_by_need and ddp.defers
        """Whether anything is left running when the backward pass ends."""
        device = deferral.parameters[0].device
        compressor = None
        if plan.is_lossy:
            assert ddp._compressing is not None
            compressor = ddp._compressing.compressor_for(plan)
        self._engine = Engine(
            plan,
            self.layout,
            carrier_for(group, device),
            compressor=compressor,
            timeout_s=group_timeout_s(ddp.process_group),
        )
        deferral.engine = self._engine
        self._leaving = finish_on_leaving(deferral, self._engine)
        # From here on: under join, ranks make different numbers of updates.
        optimizers = ddp._overlapped
        updates = sum(optimizer.updates for optimizer in optimizers)
        self._rounds = Rounds(
            self._engine,
            deferral,
            ddp.process_group,
            compressor=compressor,
            defer=self.defers,
            roll=lambda: [sum(optimizer.updates for optimizer in optimizers) - updates],
            by_tensor=not ddp.static_graph,
            as_views=bool(ddp._arguments.get("gradient_as_bucket_view", False)),
            is_final=self._is_final,
            finished=finished,
        )
        self.hook = self._rounds.hook()
        self.keeping_gradients = self._rounds.keeping_gradients
        """To surround what makes the reducer's buckets."""
        self._gates = Gates(ddp.module, deferral)
        self._paced_round = 0

    @property
    def mismatch(self) -> str | None:
        """How the reducer's buckets differ from those wanted, once seen."""
        return self._rounds.mismatch

    def start(self) -> None:
        """Attach hooks and gates, after the reducer's own hooks."""
        self._rounds.attach()
        if self.defers:
            self._gates.attach()

    def stop(self) -> None:
        """Finish what is pending and take everything off again."""
        self.deferral.settle()
        self._engine.finish()
        self.detach()

    def detach(self) -> None:
        """Take everything off; what is under way is given up."""
        self._gates.detach()
        self._rounds.detach()
        self._leaving.cancel()
        self._engine.close()

    def __del__(self) -> None:
        """Let go of what is under way, without waiting: the wrapper was dropped."""
        if hasattr(self, "_leaving"):
            self.deferral.outlive()
            self._engine.leave()

    def let_defer(self) -> None:
        """Let the exchange go on under forward passes, where the plan says so."""
        if self._waits_by_need and not self.defers:
            self.defers = self._rounds.defer = True
            self._gates.attach()

    def stop_deferring(self) -> None:
        """Let backward wait for the whole exchange from now on."""
        self.deferral.settle()
        self.defers = self._rounds.defer = False
        self._gates.detach()

    def expect(self) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        self._rounds.expect()

    def times(self) -> EngineTimes:
        """Return the messages that have finished in the last two rounds, and the gates since."""
        return EngineTimes(self._engine.times(), self.deferral.take_gates())

    def flushed(self) -> str | None:
        """Say why hardly anything was left to run under forward passes since the last call."""
        if not self.defers:
            return None
        deferral = self.deferral
        rounds, early, flushes = deferral.take_counts()
        if early > rounds / 2:
            return (
                "gradients are read before each step (as gradient clipping does), which waits for "
                "the whole exchange"
            )
        if flushes > rounds / 2:
            return (
                "parameters are read between each step and the next forward pass (as averaging "
                "weights does), which waits for the whole exchange"
            )
        return None

    def pace(self, iteration_s: float) -> Pace | None:
        """Return what an iteration takes now, from the last finished round."""
        messages = self._engine.last_round()
        if not messages:
            return None
        begun_ns = min(m.issued_ns for m in messages)
        ended_ns = max(m.finished_ns for m in messages)
        return Pace(
            computation_s=max(iteration_s - self.deferral.stall_ns / NS_PER_S, 0.0),
            communication_s=(ended_ns - begun_ns) / NS_PER_S,
        )

    def _is_final(self) -> bool:
        """Whether the reducer has its final buckets: it keeps its first if it looks for unused."""
        ddp = self._ddp
        keeps = ddp.find_unused_parameters and not ddp.static_graph
        return not self._rounds.first if keeps else bool(ddp._has_rebuilt_buckets)


def engine_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """Make the engine's own process group, of the ranks of the wrapper's; all ranks call.

    Messages share no sequence with whatever else the user or DDP sends.
    """
    ranks = dist.get_process_group_ranks(ddp.process_group)
    whole_world = len(ranks) == dist.get_world_size()
    with telling_lost_peers("while the engine's process group was made"):
        rename_new_groups(ddp.process_group)
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=group_timeout_s(ddp.process_group)),
            backend=dist.get_backend(ddp.process_group),
            use_local_synchronization=not whole_world,
            group_desc="syncline engine",
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group's collectives, in seconds."""
    return timeout_of(group).total_seconds()
