"""``DistributedDataParallel``: torch's, with measured, planned and checked gradient exchange."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from syncline.errors import MismatchError, UserError
from syncline.measure.profiler import dtype_name
from syncline.model.network import Network
from syncline.model.plan import Plan, Tensor
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.model.run import Run
from syncline.parallel.buckets import BYTES_PER_MIB, only_simulated, unbucketable
from syncline.parallel.conductor import Conductor
from syncline.parallel.record import record_of
from syncline.parallel.reducer import ReducerBuckets, WrappedJob, obstacle
from syncline.parallel.settings import Settings
from syncline.parallel.tuning import Tuning, logger
from syncline.planners import RUNNABLE, runnable_planner_named
from syncline.planners.ddp import Ddp

__all__ = ["DistributedDataParallel"]

TorchDDP = nn.parallel.DistributedDataParallel


class DistributedDataParallel(TorchDDP):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel`` that plans its messages.

    It runs torch's own class for the first iterations while it measures them and the network,
    plans on rank 0, gives the reducer the plan's messages as its buckets, and trains on. If the
    planned iterations are slower than the measured baseline beyond noise it goes back to DDP's own
    buckets and says so once. When computation or communication drifts by more than 20 % for 50
    iterations it measures again. Every stage is real training: no iteration is spent, and at two
    ranks results are those of torch's class to the last bit.

    Args:
        module: as for torch's class; all its other arguments are taken too.
        planner: ``"auto"`` or the name of a planner; the plan is made by it.
        plan: use this plan instead of measuring and planning.
        profile: use this profile instead of measuring one.
        network: use this network instead of probing.
        check: go back to DDP's own buckets if the plan is slower than they are.

    Raises:
        UserError: an unknown planner, one whose plans can only be simulated, or arguments that
            exclude each other.
        MismatchError: the plan or profile is for another model or worker count, or the plan is one
            that can only be simulated or that no buckets of DDP can be.

    What cannot be planned (sparse gradients, gradients of several dtypes, torch's experimental
    ``mixed_precision`` argument, optimizers that run in backward, delayed parameters, the Python
    reducer) trains with DDP's own buckets; the reason is logged once.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        planner: str = "auto",
        plan: Plan | None = None,
        profile: Profile | None = None,
        network: Network | None = None,
        check: bool = True,
        **kwargs: Any,
    ) -> None:
        runnable_planner_named(planner)
        if plan is not None and (profile is not None or network is not None):
            raise UserError(
                "a plan was given, so a profile or network would be ignored; give one or the other"
            )
        if kwargs.get("bucket_cap_mb_list"):
            raise UserError(
                "bucket_cap_mb_list sets the buckets by hand; give a plan instead, or use torch's "
                "DistributedDataParallel"
            )
        bound = inspect.signature(TorchDDP.__init__).bind(self, module, *args, **kwargs)
        self._arguments = {
            name: value for name, value in bound.arguments.items() if name not in ("self", "module")
        }
        self._conductor: Conductor | None = None
        self._in_torch = True
        self._in_join = False
        self._has_joined = False
        self._plan_order: Plan | None = None
        super().__init__(module, **self._arguments)
        self._in_torch = False
        self._settings = Settings(
            planner=planner,
            plan=plan,
            profile=profile,
            network=network,
            check=check,
            ddp=self._own_buckets(),
        )
        self._check_given()
        self._why_not_planned = obstacle(self)
        if self._why_not_planned is not None:
            if dist.get_rank(self.process_group) == 0:
                logger.warning("training with DDP's own buckets: %s", self._why_not_planned)
            return
        job = WrappedJob(self)
        self._tuning = Tuning(job, self._settings)
        self._conductor = Conductor(job, self._tuning, ReducerBuckets(self))

    # ------------------------------------------------------------------ training

    @_disable_dynamo(recursive=False)  # as torch's own forward: only the module is compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and at the start of an iteration do whatever the measuring needs."""
        conductor = self._conductor
        if conductor is None or not self._counts():
            if conductor is not None:
                conductor.skip_iteration()
            return super().forward(*inputs, **kwargs)
        conductor.begin_iteration()
        output = super().forward(*inputs, **kwargs)
        conductor.output(output)
        return output

    def _counts(self) -> bool:
        """Whether this forward pass begins an iteration: the same answer on every rank.

        Under ``join``, ranks run different numbers of iterations; nothing is measured or changed.
        torch leaves the configuration enabled when the context ends, so only a context of our own
        is known to be over; after a bare ``Join`` context the buckets stay as they are.
        """
        return (
            self.training
            and torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and not self._in_join
            and (not self._join_config.enable or self._has_joined)
        )

    @contextlib.contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Train with uneven inputs, as torch's ``join``; the buckets stay as they are meanwhile."""
        self._in_join = self._has_joined = True
        try:
            with super().join(*args, **kwargs):
                yield
        finally:
            self._in_join = False

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuse the user's communication hooks: a hook replaces the exchange that is planned.

        Raises:
            UserError: always, except for torch's own use during construction.
        """
        if not self._in_torch:
            raise UserError(
                "register_comm_hook is not available: a hook would replace the exchange that "
                "Syncline plans and measures; use torch's DistributedDataParallel for this hook"
            )
        super().register_comm_hook(state, hook)

    def _lazy_init(self) -> None:
        with self._torch_may_hook():
            super()._lazy_init()

    @contextlib.contextmanager
    def _torch_may_hook(self) -> Iterator[None]:
        self._in_torch = True
        try:
            yield
        finally:
            self._in_torch = False

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # Measurements belong to this process; a copy trains with DDP's own buckets.
        state.pop("_tuning", None)
        state["_conductor"] = None
        state["_plan_order"] = None
        return state

    # ------------------------------------------------------------------ what is going on

    @property
    def phase(self) -> str:
        """What the wrapper is doing: ``"baseline"``, ``"profiling"``, ..., ``"steady"``."""
        return "steady" if self._conductor is None else self._conductor.stage.name

    @property
    def measuring(self) -> bool:
        """Whether the measurement and the check are still going on."""
        return self._conductor is not None and not self._conductor.steady

    @property
    def plan(self) -> Plan | None:
        """The plan that runs now; None while DDP's own buckets do."""
        return self._conductor.stage.plan if self._conductor is not None else None

    @property
    def profile(self) -> Profile | None:
        """The measured or given profile, once there is one."""
        return self._tuning.profile if self._conductor is not None else None

    @property
    def network(self) -> Network | None:
        """The probed or given network, once there is one."""
        return self._tuning.network if self._conductor is not None else None

    @property
    def exposed_communication_s(self) -> float | None:
        """How long the last sampled backward pass waited for communication, in seconds."""
        data = self._get_ddp_logging_data()
        if not data.get("backward_comm_time_end"):
            return None
        waited_ns = data["backward_comm_time_end"] - data["backward_compute_time_end"]
        return float(max(waited_ns, 0)) / NS_PER_S

    def run_record(self) -> Run:
        """Return the record of this run so far."""
        return record_of(self)

    def save_report(self, directory: str | Path, *, run: Run | None = None) -> Path:
        """Write everything that is known into a directory, with ``report.html``.

        Call on one rank.

        Args:
            directory: is made if missing; files of earlier reports are replaced.
            run: the record to save; by default :meth:`run_record`.

        Returns:
            The path of ``report.html``.

        Raises:
            FileError: the directory cannot be written.
        """
        from syncline.report.bundle import Bundle

        tuning = self._tuning if self._conductor is not None else None
        bundle = Bundle(
            run=run or self.run_record(),
            profile=tuning.profile if tuning else None,
            network=tuning.network if tuning else None,
            plan=tuning.running_plan if tuning else None,
            comparison=tuning.comparison if tuning else None,
            timeline_predicted=tuning.predicted_timeline if tuning else None,
            timeline_measured=tuning.measured_timeline if tuning else None,
        )
        bundle.save(directory)
        return Path(directory) / "report.html"

    # ------------------------------------------------------------------ the reducer

    def _exchanged_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that DDP exchanges, by name; a shared one once."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        }

    def _bucket_sizes(self) -> list[int]:
        data = self._get_ddp_logging_data()
        listed = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
        return [int(size) for size in listed.split(", ") if size]

    def _own_buckets(self) -> Ddp:
        """Return the buckets that torch's class makes under the user's arguments."""
        keeps = self.find_unused_parameters and not self._arguments.get("static_graph", False)
        cap_mb = self._arguments.get("bucket_cap_mb")
        if cap_mb is None:
            return Ddp(from_the_last=keeps)
        cap_bytes = int(cap_mb * BYTES_PER_MIB)
        return Ddp(bucket_bytes=cap_bytes, first_bucket_bytes=cap_bytes, from_the_last=keeps)

    def _check_given(self) -> None:
        tensors = [
            Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
            for name, p in self._exchanged_parameters().items()
        ]
        workers = dist.get_world_size(self.process_group)
        plan, profile = self._settings.plan, self._settings.profile
        network = self._settings.network
        if network is not None and network.workers != workers:
            raise MismatchError(
                f"the given network {network.name!r} is of {network.workers} workers, this job has "
                f"{workers}; probe this one, or extrapolate with Network.with_workers"
            )
        if profile is not None:
            plan = Ddp().plan(profile, Network.line(workers=workers, a_s=0, b_s_per_byte=0))
        if plan is not None:
            difference = plan.difference(tensors, workers)
            if difference is not None:
                what = "profile" if profile is not None else "plan"
                raise MismatchError(
                    f"the given {what} does not fit: {difference}; "
                    "profile and plan this model at this worker count again"
                )
            feature = only_simulated(plan)
            if feature is not None:
                raise MismatchError(
                    f"the given plan can only be simulated so far: {feature}; give the plan of "
                    f"one of the planners {', '.join(RUNNABLE)}"
                )
            problem = unbucketable(plan)
            if problem is not None:
                raise MismatchError(f"the given plan cannot be run as DDP's buckets: {problem}")

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        plan = self._plan_order
        if plan is None or not self.find_unused_parameters or self.static_graph:
            return parameters, sparse
        # DDP does not rebuild its buckets when it looks for unused parameters: it keeps the
        # buckets it made at first, from the last parameter to the first.
        position = {tensor.name: index for index, tensor in enumerate(plan.tensors)}
        names = {id(p): name for name, p in self._exchanged_parameters().items()}
        order = sorted(range(len(parameters)), key=lambda i: -position[names[id(parameters[i])]])
        return [parameters[i] for i in order], [sparse[i] for i in order]
