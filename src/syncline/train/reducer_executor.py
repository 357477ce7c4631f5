"""``ReducerExecutor``: DDP's reducer exchanges its buckets by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncline.plan.plan import Plan
from syncline.plan.quantities import NS_PER_S
from syncline.plan.recipe import Rounded
from syncline.torch_private import (
    bucket_sizes,
    current_graph_task,
    disable_dynamo,
    exposed_communication_s,
    is_finalized,
    logging_data,
    queue_callback,
    tree_leaves,
)
from syncline.train.engine.layout import difference_from_plan
from syncline.train.engine.recording import BucketRecorder, Recorded, exchange_in
from syncline.train.executor import Executor
from syncline.train.measure.gradient_hooks import GradientHooks, weakly
from syncline.train.watches import Sample
from syncline.train.wrapped import Wrapped


class ReducerExecutor(Executor):
    """Follows the reducer to detect the end of every exchanged backward pass.

    Counting forward passes instead would fail: one rank may make more of them than another, such as
    to log a sample. With ``wire`` the buckets travel through torch's hook of that type; with
    ``record`` a hook notes when each of them is issued and complete.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        plan: Plan | None,
        finished: Callable[[], None],
        *,
        wire: Rounded | None = None,
        record: bool = False,
    ) -> None:
        planned = () if plan is None else (plan.message_tensors(), plan.message_bytes())
        super().__init__(wrapped, finished, *planned)
        self._plan = plan
        self._order: list[str] = []  # the names of the reducer's parameters, in their order
        exchange = exchange_in(wire, wrapped.group)
        self._hook = exchange if wire is not None else None
        self._recorder = BucketRecorder(exchange, wrapped.clock) if record else None
        self._hooks = GradientHooks()
        self._reducer: Any = None
        self._begun = False  # whether the expected backward pass has reached a gradient
        self._task = -1
        """The id of the backward pass at whose end we check; nested ones have their own."""
        self._is_static = False
        """Whether we check only at the end of the backward pass that reaches the model's output. In
        a static graph the reducer notes nothing before the last use of a parameter, and seems
        finished until then."""
        self._logged: dict[str, Any] = {}
        """The reducer's last logging data. Only the training thread asks for it: another thread
        could keep the reducer alive, and then free it during a backward pass."""

    def hook(self) -> Callable[..., Any] | None:
        """Return the recording hook if any, else torch's own if any, else None."""
        return self._hook if self._recorder is None else self._recorder.hook

    def start(self, order: list[str]) -> None:
        """Attach hooks to follow the current reducer."""
        self._order = order
        ddp = self._wrapped.ddp
        self._reducer, self._is_static = ddp.reducer, ddp.static_graph
        self._logged = logging_data(ddp)
        parameters = list(self._wrapped.parameters.values())
        if not (ddp.find_unused_parameters or ddp.static_graph):
            # The reducer requires a gradient for each of them, so one hook is enough.
            parameters = [p for p in parameters if p.requires_grad][:1]
        reached = weakly(self._reached)
        for parameter in parameters:
            self._hooks.add(parameter, reached)

    def stop(self) -> None:
        """Remove the hooks, and release the reducer."""
        self._reducer = None
        self._hooks.remove()

    def follow(self) -> None:
        """Attach the hooks again: which parameters get gradients may have changed."""
        self.stop()
        self._forget()
        self.start(self._order)

    def _forget(self) -> None:
        self._expected = self._begun = False
        self._task = -1

    def expect(self, output: Any) -> None:
        """Call with the output of a forward pass whose gradients will be exchanged."""
        self._expected = True
        if self._is_static:
            poll = weakly(self._poll_at_end)
            for node in filter(None, {getattr(x, "grad_fn", None) for x in tree_leaves(output)}):
                node.register_prehook(poll)

    def poll(self) -> None:
        """Call before a forward pass, to detect that a nested backward pass has ended."""
        if self._reducer is not None and self._begun and is_finalized(self._reducer):
            self._forget()
            self._finished()

    @disable_dynamo
    def _reached(self, *_: Any) -> None:
        self.mixed = not self._expected
        if self.mixed:
            return
        self._begun = True
        task = current_graph_task()
        if task != self._task and not self._is_static:
            self._task = task
            self._poll_at_end()

    @disable_dynamo
    def _poll_at_end(self, *_: Any) -> None:
        # The reducer queues its last work with the last gradient, so before the end of this
        # backward pass; a callback queued at that end runs after it.
        queue_callback(lambda: queue_callback(self.poll))

    @property
    def bucket_count(self) -> int:
        """How many buckets the reducer has, as last reported."""
        return len(bucket_sizes(self._logged))

    @property
    def mismatch(self) -> str | None:
        """How the reducer's buckets differ from the plan, if they do."""
        if self._plan is None:
            return None
        return difference_from_plan(self._plan, self._order, logging_data(self._wrapped.ddp))

    @property
    def exposed_s(self) -> float | None:
        """Seconds that the last timed iteration waited for messages."""
        return exposed_communication_s(self._logged)

    def recorded(self) -> Recorded:
        """Return what was recorded of the exchange since the last call."""
        return self._recorder.take() if self._recorder is not None else []

    def sample(self, iteration_s: float) -> Sample | None:  # noqa: ARG002
        """Return the times of the last iteration that the reducer timed."""
        data = self._logged = logging_data(self._wrapped.ddp)
        if not data.get("backward_compute_time"):
            return None
        return Sample(
            computation_s=(data["forward_compute_time"] + data["backward_compute_time"]) / NS_PER_S,
            communication_s=data["backward_comm_time"] / NS_PER_S,
        )
