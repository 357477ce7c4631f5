"""``Reducer``: torch's reducer under a wrapped module, and how its buckets are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from syncline.plan.plan import Plan
from syncline.plan.recipe import Rounded
from syncline.torch_private import (
    TorchDDP,
    caps_for_buckets,
    has_final_buckets,
    make_final_buckets,
    reducer_parameters,
    remake_reducer,
)
from syncline.train.engine.layout import needs_engine
from syncline.train.engine_executor import EngineExecutor
from syncline.train.executor import Executor
from syncline.train.measure.exchange import new_group_like, telling_lost_peers
from syncline.train.measure.gradient_hooks import thawed, weakly
from syncline.train.reducer_executor import ReducerExecutor
from syncline.train.watches import SAMPLE_EVERY
from syncline.train.wrapped import Wrapped


class Reducer:
    """Changes and reads the reducer of a wrapped module.

    Every exchanged backward pass ends with a call of the method ``end_iteration``, whose object is
    not kept alive.
    """

    def __init__(self, wrapped: Wrapped, end_iteration: Callable[[], None]) -> None:
        self._wrapped = wrapped
        self._parameters, self._sparse, self._names = reducer_parameters(wrapped.ddp)
        """What torch's class gave to its reducer; the module may change later."""
        self._order = list(range(len(self._parameters)))
        """The order in which the reducer has them now."""
        self._engine_group: dist.ProcessGroup | None = None
        self._finished = weakly(end_iteration)
        self.executor: Executor = ReducerExecutor(wrapped, None, self._finished)
        self.executor.start(self._names_in_order())
        self._is_ours = False
        """Whether the reducer was made here rather than by torch's constructor."""
        self.changes: list[Callable[[], None]] = []
        """Changes to make before the next forward pass whose gradients will be exchanged."""

    def change(self, change: Callable[[], None]) -> None:
        """Call a function that changes the reducer: at once or, in a static graph, later.

        In its first backward pass the reducer of a static graph learns how often each gradient is
        accumulated, and exchanges them all. That pass must not be under ``no_sync()``, so such a
        reducer is changed right before the next forward pass whose gradients will be exchanged.
        Other reducers note used parameters under ``no_sync()``, too, so they must not be changed
        between such a pass and the one that is exchanged.
        """
        self.changes.append(change)
        if not self._wrapped.ddp.static_graph:
            self.make_changes()

    def make_changes(self) -> None:
        """Call before a forward pass whose gradients will be exchanged."""
        changes, self.changes = self.changes, []
        for change in changes:
            change()

    def make_group(self, plan: Plan) -> None:
        """Create the process group that a plan needs, if any; call on all ranks."""
        if needs_engine(plan) and self._engine_group is None:
            with telling_lost_peers("while the engine's process group was made"):
                group = new_group_like(self._wrapped.group, description="syncline engine")
            self._engine_group = group

    def make_final(self) -> None:
        """Rebuild the reducer's buckets on all ranks, after its first backward pass.

        torch's class does so in its next forward pass, but ranks may not all run the same passes.
        """
        ddp = self._wrapped.ddp
        if self._is_ours and not has_final_buckets(ddp):
            with self.executor.keeping_gradients():
                make_final_buckets(ddp)

    def use(
        self, plan: Plan | None, hook: Rounded | None = None, *, record: bool, updates: int
    ) -> None:
        """Make a new reducer, with the plan's messages as its buckets.

        Without a plan, ``hook`` is the type of torch's hook that is to run. ``updates`` is how
        often the optimizers had been stepped when the ranks agreed on the plan. If the reducer
        cannot run the plan by itself, the engine runs it over the reducer's buckets.
        """
        wrapped = self._wrapped
        self.executor.stop()
        if wrapped.compressing is not None and not (plan is not None and plan.is_lossy):
            wrapped.compressing.deliver_residuals()
        if plan is not None and needs_engine(plan):
            assert self._engine_group is not None  # made by :meth:`make_group`
            if plan.sharded:
                assert wrapped.sharding is not None
                wrapped.sharding.follow(plan)
            self.executor = EngineExecutor(
                wrapped, plan, self._engine_group, updates, self._finished
            )
        else:
            self.executor = ReducerExecutor(wrapped, plan, self._finished, wire=hook, record=record)
        buckets, caps = self.executor.buckets, self.executor.bucket_caps
        take_bucket = self.executor.hook()
        self._order = list(range(len(self._parameters)))
        if plan is not None and wrapped.keeps_first_buckets:
            # With find_unused_parameters, DDP does not rebuild its buckets: it keeps the initial
            # ones, of which the last holds the first parameters.
            order = [plan.tensors[t].name for bucket in reversed(buckets) for t in bucket]
            position = {id(wrapped.parameters[name]): n for n, name in enumerate(order)}
            self._order.sort(key=lambda index: position[id(self._parameters[index])])
            caps = caps[::-1]
        changed = {} if plan is None else caps_for_buckets(wrapped.ddp, caps)
        if self.executor.needs_views:
            changed["gradient_as_bucket_view"] = True
        with (
            _changed(wrapped.ddp, changed),
            self.executor.keeping_gradients(),
            thawed(self._parameters),  # some may have been frozen since
        ):
            remake_reducer(
                wrapped.ddp,
                [self._parameters[index] for index in self._order],
                [self._sparse[index] for index in self._order],
                {n: self._names[i] for n, i in enumerate(self._order) if i in self._names},
                sample_every=wrapped.sample_rate or SAMPLE_EVERY,
            )
        if take_bucket is not None:
            TorchDDP.register_comm_hook(wrapped.ddp, None, take_bucket)  # ours refuses hooks
        self._is_ours = True
        self.executor.start(self._names_in_order())

    def _names_in_order(self) -> list[str]:
        names = {id(p): name for name, p in self._wrapped.parameters.items()}
        return [names[id(self._parameters[index])] for index in self._order]

    def close(self) -> None:
        """End the engine and its process group, and free the reducer: training is over."""
        self.executor.stop()
        if self._engine_group is not None:
            dist.destroy_process_group(self._engine_group)
            self._engine_group = None
        # The reducer holds the engine's hook in C++, where the collector cannot see the cycle.
        del self._wrapped.ddp.reducer, self._wrapped.ddp.logger


@contextmanager
def _changed(ddp: TorchDDP, changed: Mapping[str, Any]) -> Iterator[None]:
    """Temporarily change settings of a wrapper."""
    before = {name: ddp.__dict__[name] for name in changed}
    ddp.__dict__.update(changed)
    try:
        yield
    finally:
        ddp.__dict__.update(before)
