"""The state that the communication hook of sparse exchange keeps between steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from syncline.errors import UserError
from syncline.plan.recipe import Recipe
from syncline.torch_private import current_graph_task, queue_callback
from syncline.train.measure.exchange import timeout_of
from syncline.train.measure.profiler import trainable_parameters
from syncline.train.sparse.gradients import NamedGradient, flat, unwrapped
from syncline.train.sparse.memory import future_on
from syncline.train.sparse.serial_executor import SerialExecutor
from syncline.train.sparse.session import Scaler, Session

PATIENCE = 2
"""An exchange may take this many timeouts of the group, so that its own waits fail first, with
errors that name the peer."""

Future = torch.futures.Future


class GTopKState:
    """The state of :func:`syncline.hooks.gtopk`: recipe, step and residuals of one rank.

    Selection and exchange run on a thread of their own, mostly without the interpreter's lock,
    during the backward pass. The exchange has a process group of its own.
    """

    def __init__(
        self,
        model: nn.Module | Recipe,
        recipe: Recipe | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        check: bool = False,
        scaler: Scaler | None = None,
    ) -> None:
        """Agree with the other ranks; all of them must call this.

        ``GTopKState(recipe)`` is for frameworks that take a state before there is a model. It
        learns the parameters from its first step, which is exchanged dense, as with torch's
        PowerSGD. The ranks agree after that step.

        Args:
            model: the module, inside DDP or not; of float32, on the CPU or on one GPU.
            recipe: the same on all ranks.
            process_group: that of DDP; the default group if None.
            check: whether every exchange is checked for lost gradient. Slow: for debugging.
            scaler: torch's ``GradScaler``, if one scales the loss. Steps in which a gradient is not
                finite are then skipped on all ranks; without a scaler that is an error.

        Raises:
            UserError: the model cannot be exchanged sparsely, or there is no process group.
            MismatchError: a rank has another recipe or another model; raised on all ranks.
            PeerError: a rank did not take part within the group's timeout.
        """
        recipe = model if isinstance(model, Recipe) else recipe
        if recipe is None:
            raise UserError("expected a Recipe beside the model; give GTopKState(model, recipe)")
        self.recipe = recipe
        self._arguments = process_group, check, scaler
        self._module = None if isinstance(model, Recipe) else unwrapped(model)
        self._shown: list[Tensor] = []  # without a model: the parameters of the first step so far
        self._agreed: Session | None = None
        if self._module is not None:
            self._agree(trainable_parameters(self._module))
        self._exchanged: list[tuple[Future[Tensor], Tensor]] = []
        """Exchanged buckets of this step, with their futures, which are not complete yet."""
        self._message = 0
        self.step = 0  # how many steps have been exchanged; the warm-up depends on it
        self._kept_back: list[tuple[list[NamedGradient], Future[Tensor], Tensor]] = []

    def _agree(self, parameters: Mapping[str, Tensor]) -> None:
        if not dist.is_initialized():
            raise UserError(
                "sparse exchange needs a process group; call "
                "torch.distributed.init_process_group first"
            )
        group, check, scaler = self._arguments
        base = dist.group.WORLD if group is None else group
        assert base is not None
        session = Session(self.recipe, parameters, base, model=self._module, check=check)
        self._names = {id(p): name for name, p in parameters.items()}
        if scaler is not None:
            session.follow(scaler)
        timeout_s = timeout_of(base).total_seconds()
        self._executor = SerialExecutor("syncline-sparse", timeout_s=PATIENCE * timeout_s)
        weakref.finalize(self, self._executor.close)
        self._agreed = session

    @property
    def _session(self) -> Session:
        if self._agreed is None:
            raise UserError(
                "this GTopKState was made without a model, which it knows after the first step; "
                "make it with the model, GTopKState(model, recipe), or call this later"
            )
        return self._agreed

    def step_ahead(self, optimizer: Optimizer) -> None:
        """Compute gradients at the weights as they will be once this rank's residuals are applied.

        Then residuals no longer make gradients point the same way again and again, so small
        densities cost less accuracy. From a step's first forward pass to its update, the weights
        differ between ranks; see :class:`~syncline.train.sparse.ahead.StepAhead`.

        Call on all ranks, once for each optimizer, before the first forward pass.

        Raises:
            UserError: it is not ``torch.optim.SGD``, of another model, or was given before.
        """
        if self._module is None:
            raise UserError(
                "step_ahead needs a state that was made with the model: GTopKState(model, recipe)"
            )
        self._session.step_ahead(
            self._module,
            trainable_parameters(self._module),
            optimizer,
            synchronize=self._executor.join,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save; every rank saves its own.

        Raises:
            PeerError: a rank failed, or did not answer in time.
        """
        session = self._session
        self._executor.join()
        return session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that this rank has saved.

        Ranks that have loaded states of different steps refuse each other's messages.

        Raises:
            MismatchError: it is of another recipe, model, rank or number of ranks.
        """
        session = self._session
        self._executor.join()
        session.load_state_dict(state)
        self.step = session.step

    def exchanged(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin the exchange of a bucket; return a future of its averaged buffer."""
        if self._agreed is None:
            return self._exchanged_whole(bucket)
        self._executor.check()
        future = future_on(self._session.memory.device)
        try:
            names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        except KeyError:
            raise UserError(
                "a bucket holds a parameter that the state was not made with; make GTopKState of "
                "the model that DDP trains"
            ) from None
        gradients = list(map(NamedGradient, names, map(flat, bucket.gradients())))
        self._kept_back.append((gradients, future, bucket.buffer()))
        if bucket.is_last() or self.recipe.unit != "model":
            self._begin(bucket.is_last())
        return future

    def _exchanged_whole(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket of the first step, and learn its parameters."""
        self._shown += bucket.parameters()
        group = self._arguments[0]
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None
        if bucket.is_last():
            # Buckets come from the last parameter to the first.
            named = {f"parameter {n}": p for n, p in enumerate(reversed(self._shown))}

            def agree() -> None:
                self._shown = []
                self._agree(named)

            queue_callback(agree)
        averaged: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged

    def _begin(self, last: bool) -> None:
        buckets, self._kept_back = self._kept_back, []
        gradients = [gradient for each, _, _ in buckets for gradient in each]
        message = self._message
        self._message += 1
        # DDP has copied the gradients on the current stream.
        complete = self._session.memory.mark()

        def exchange() -> None:
            self._session.prepare(gradients, message=message, after=[complete])()
            if last:
                self._session.end_step()

        def ended() -> None:
            self._exchanged += [(future, buffer) for _, future, buffer in buckets]
            # With a scaler, a later bucket may cause the whole step to be skipped.
            if last or self._session.scaler is None:
                exchanged, self._exchanged = self._exchanged, []
                with self._session.memory.after(()):
                    for future, buffer in exchanged:
                        if self._session.refused:
                            buffer.fill_(math.inf)
                        future.set_result(buffer)

        self._executor.put(exchange, ended)
        if last:
            self.step, self._message = self.step + 1, 0
            # Called before DDP waits for the futures, so that backward() raises the error itself.
            if current_graph_task() >= 0:
                queue_callback(self._executor.join)
            else:  # in DDP's join(), a rank without inputs exchanges without a backward pass
                self._executor.join()
