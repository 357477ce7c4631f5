"""The engine of one stage of training, with its hooks and gates."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from syncline.measure.exchange import timeout_of
from syncline.model.plan import Plan
from syncline.model.profile import Norm
from syncline.model.quantities import NS_PER_S
from syncline.parallel.engine.dense_transport import transport_for
from syncline.parallel.engine.engine import Engine
from syncline.parallel.engine.layout import BucketLayout
from syncline.parallel.engine.recording import EngineTimes
from syncline.parallel.overlap.deferral import Deferral
from syncline.parallel.overlap.gates import Gates
from syncline.parallel.rounds import Rounds
from syncline.parallel.shutdown import finish_on_shutdown
from syncline.parallel.watches import PaceSample
from syncline.parallel.wrapped import Wrapped
from syncline.torch_private import has_final_buckets

__all__ = ["StageEngine"]


class StageEngine:
    """Runs one plan under a wrapped module until :meth:`stop`.

    Made before the reducer is constructed anew with :attr:`layout`'s buckets and :attr:`hook`;
    :meth:`start` afterwards.

    Args:
        wrapped: the module.
        plan: to run.
        group: the engine's own.
        finished: is called at the end of every backward pass whose gradients are exchanged.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        plan: Plan,
        group: dist.ProcessGroup,
        finished: Callable[[], None],
    ) -> None:
        self._wrapped = wrapped
        self.layout = BucketLayout.of(plan)
        self._waits_by_need = plan.wait == "need"
        self.defers = self._waits_by_need and wrapped.can_defer
        """Whether anything is left running when the backward pass ends."""
        compressor = None
        if plan.is_lossy:
            assert wrapped.compressing is not None
            compressor = wrapped.compressing.compressor_for(plan)
        self._engine = Engine(
            plan,
            self.layout,
            transport_for(group, wrapped.parameters_device),
            compressor=compressor,
            timeout_s=timeout_of(wrapped.group).total_seconds(),
        )
        parameters = {tensor.name: wrapped.parameters[tensor.name] for tensor in plan.tensors}
        self.deferral = deferral = Deferral(parameters, self._engine, wrapped.guard)
        self._shutdown = finish_on_shutdown(deferral, self._engine)
        # From here on: under join, ranks make different numbers of updates.
        updates = wrapped.updates
        self._rounds = Rounds(
            self._engine,
            deferral,
            wrapped.group,
            compressor=compressor,
            defer=self.defers,
            roll=lambda: [wrapped.updates - updates],
            by_tensor=not wrapped.ddp.static_graph,
            as_views=wrapped.wants_views,
            is_final=self._is_final,
            finished=finished,
        )
        self.hook = self._rounds.hook()
        self.keeping_gradients = self._rounds.keeping_gradients
        """To surround what makes the reducer's buckets."""
        self._gates = Gates(wrapped.ddp.module, deferral)
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
        self._shutdown.cancel()
        self._engine.close()

    def __del__(self) -> None:
        """Let go of what is under way, without waiting: the wrapper was dropped."""
        if hasattr(self, "_shutdown"):
            self.deferral.outlive()
            self._engine.drain()

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
            if deferral.asked_norm is not None:
                return (
                    f"gradients are read before each step for their {deferral.asked_norm}-norm, "
                    "which the plan does not exchange (its field norm), and so this waits for all"
                )
            return (
                "gradients are read before each step, otherwise than by clipping, which waits for "
                "the whole exchange"
            )
        if flushes > rounds / 2:
            return (
                "parameters are read between each step and the next forward pass, which waits for "
                "the whole exchange (for an average of the weights there is model.average)"
            )
        return None

    def asked_norm(self) -> Norm | None:
        """Return a norm that was asked for last and that the plan does not have."""
        return self.deferral.asked_norm if self.defers else None

    def pace(self, iteration_s: float) -> PaceSample | None:
        """Return what an iteration takes now, from the last finished round."""
        messages = self._engine.last_round()
        if not messages:
            return None
        begun_ns = min(m.issued_ns for m in messages)
        ended_ns = max(m.finished_ns for m in messages)
        return PaceSample(
            computation_s=max(iteration_s - self.deferral.stall_ns / NS_PER_S, 0.0),
            communication_s=(ended_ns - begun_ns) / NS_PER_S,
        )

    def _is_final(self) -> bool:
        """Whether the reducer has its final buckets: it keeps its first if it looks for unused."""
        if self._wrapped.keeps_first_buckets:
            return not self._rounds.first
        return has_final_buckets(self._wrapped.ddp)
