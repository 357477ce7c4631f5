"""The private names of torch that Syncline uses, each with the reason.

Torch may change them in any release, so no other module uses one. Checked with torch 2.13. The
exceptions are private methods of DDP, of optimizers and of process groups that a class of ours
overrides, or that torch calls on it by name. They stay in that class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo import eval_frame as _eval_frame
from torch._C._profiler import _RecordFunctionFast
from torch._compile import _disable_dynamo
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import optimizer as _torch_optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves as _tree_leaves

# ------------------------------------------------------------------ torch.compile

Class = TypeVar("Class", bound=type[Any])

disable_dynamo = _disable_dynamo
"""``torch.compiler.disable`` imports the compiler at once, which takes seconds; this waits until
something is compiled. Torch's own DDP uses it."""
eval_frame_callback: Callable[[], Any] = _eval_frame.get_eval_frame_callback
"""Returns the callback that compiles the running frames; None outside compiled code. The public
``torch.compiler.is_compiling`` returns False in a function that is itself not compiled."""


COMPILED_FROM = "_torchdynamo_orig_callable"
"""Attribute of a function that the compiler made, or that it was told to skip."""
LEFT_ALONE = "_torchdynamo_disable"  # attribute of a function that the compiler was told to skip


def is_compiled(module: nn.Module) -> bool:
    """Say whether calling a module runs code that ``torch.compile`` made.

    The user or Lightning may have compiled only its ``forward``.
    """
    forward = module.__dict__.get("forward")
    return (
        uncompiled(module) is not module
        or compiled_call(module) is not None
        or (hasattr(forward, COMPILED_FROM) and not hasattr(forward, LEFT_ALONE))
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of ``torch.compile(module)``, or the module itself."""
    if not isinstance(module, torch._dynamo.OptimizedModule):
        return module
    inside: nn.Module = module._orig_mod
    return inside


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call that ``module.compile()`` installed, if any; there is no getter."""
    call: Callable[..., Any] | None = module.__dict__.get("_compiled_call_impl")
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the compiled call of a module."""
    module._compiled_call_impl = call


def untraced(cls: Class) -> Class:
    """Keep ``torch.compile`` from tracing the methods of a class and all that they call.

    C++ code of torch may call a process group inside compiled code, such as the forward pass of a
    wrapped model. The compiler then traces the group's Python functions as a part of it.
    ``torch.compiler.disable`` prevents that by a wrapper that takes 0.4 us a call, an eighth of
    what our Python takes in a small collective. This function marks the methods' code instead.
    """
    skip = _eval_frame._FrameAction.SKIP
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            _eval_frame.set_code_exec_strategy(
                function.__code__, _eval_frame._FrameExecStrategy(skip, skip)
            )
    return cls


# ------------------------------------------------------------------ autograd

_ENGINE: Any = torch.autograd.Variable._execution_engine
queue_callback: Callable[[Callable[[], None]], None] = _ENGINE.queue_callback
"""Runs a function at the end of the running backward pass. DDP's reducer uses it too."""
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward pass; -1 outside. It tells nested passes apart."""
unsafe_preserve_version_counter = _unsafe_preserve_version_counter
"""An update made inside an operator must not change the versions that autograd has just saved."""
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""A node's place in the order of creation, which tells which submodule made it."""

# ------------------------------------------------------------------ switches of torch

# A deferred update runs under the modes of its ``step``; no public function sets their stack.
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
push_function_mode: Callable[[Any], None] = _push_mode
pop_function_mode: Callable[[], Any] = _pop_mode
DispatchMode = TorchDispatchMode  # its base class, of which the optimizers' trial makes one
disable_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
"""How many ``TorchFunctionMode``s are active; their list takes longer and is usually empty."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode``s are active."""
interpreter_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost transformation of ``torch.func``; None outside."""
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
"""The running ``torch.jit.trace``; None outside. ``is_tracing`` cannot restore it."""
set_tracing_state: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]


def no_interpreter_stack() -> AbstractContextManager[Any]:
    """Suspend all transformations of ``torch.func`` within the block."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# ------------------------------------------------------------------ tensors

swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Swaps the C++ tensors of two objects. The public ``swap_tensors`` swaps their classes too."""
make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
"""What ``nn.Parameter(tensor)`` calls."""
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""A tensor of a class whose ``__torch_dispatch__`` gets every operator that is called with it."""
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A block in which a tensor's ``__torch_function__`` is not called, as torch documents."""
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that does nothing, as ``nn.Parameter`` has."""
force_dispatch_keys: Any = torch._C._ForceDispatchKeyGuard
"""Calls operators inside ``__torch_dispatch__`` as if from outside it, autograd included."""


def dispatch_keys() -> tuple[Any, Any]:
    """Return this thread's included and excluded dispatch keys, for ``force_dispatch_keys``."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many references C++ holds to a storage, to know whether anyone else uses it."""
    return int(torch._C._storage_Use_Count(storage._cdata))


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place, by an update among others."""
tree_leaves: Callable[[Any], list[Any]] = _tree_leaves
"""The leaves of any nested structure that torch knows, such as named tuples."""
# One call for many tensors. The optimizers of torch use these; they have no public names.
foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_clamp_max_: Callable[..., None] = torch._foreach_clamp_max_
foreach_clamp_min_: Callable[..., None] = torch._foreach_clamp_min_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_div_: Callable[..., None] = torch._foreach_div_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
foreach_zero_: Callable[..., None] = torch._foreach_zero_
unscale_: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""What ``GradScaler.unscale_`` calls."""


def set_failed(
    future: torch.futures.Future[Any], value: Any, raised: Callable[[Any], NoReturn]
) -> None:
    """Complete a future as failed: C++ gets ``value``; waits in Python raise as ``raised`` does.

    Torch's ``set_exception`` does the same, but with the exception as the value.
    """
    future._set_unwrap_func(raised)
    future.set_result(value)


# ------------------------------------------------------------------ the profiler

RecordFunction: Any = _RecordFunctionFast
"""Used because ``record_function`` takes microseconds a call, and no tensor sizes."""
profiling: Callable[[], bool] = _profiler_enabled  # whether a profiler runs


def end_range(profiled: Any, future: torch.futures.Future[Any]) -> None:
    """End a ``record_function`` when a future is complete."""
    profiled._call_end_callbacks_on_future(future)


# ------------------------------------------------------------------ optimizers

SEEN_BY_SCHEDULER = "_wrapped_by_lr_sched"
"""Attribute of a ``step`` that a learning-rate scheduler has wrapped."""
STEP_CALLED = "_opt_called"
"""Attribute of an optimizer that has stepped; without it, a scheduler's step warns."""


def is_made_by_torch(optimizer: object) -> bool:
    """Say whether ``Optimizer.__init__`` ran for an optimizer: some wrapper classes skip it."""
    return "_zero_grad_profile_name" in vars(optimizer)


def update_many_at_once(cls: type[torch.Tensor]) -> None:
    """Let torch's optimizers update many parameters of a class in one call, as with plain ones.

    On a GPU that is their default. ``torch.distributed.tensor`` adds its own class in the same way.
    """
    if cls not in _torch_optimizer._foreach_supported_types:
        _torch_optimizer._foreach_supported_types.append(cls)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[tuple[str, Mapping[int, Any]]]:
    """Return the hooks around an optimizer's whole step, with whose they are."""
    return [
        ("the optimizer", getattr(optimizer, "_optimizer_step_pre_hooks", {})),
        ("the optimizer", getattr(optimizer, "_optimizer_step_post_hooks", {})),
        ("all optimizers", _torch_optimizer._global_optimizer_pre_hooks),
        ("all optimizers", _torch_optimizer._global_optimizer_post_hooks),
    ]


# ------------------------------------------------------------------ process groups

device_types: Callable[[dist.ProcessGroup], list[torch.device]] = attrgetter("_device_types")
"""The kinds of devices that a group has backends for."""


def all_gather_base(group: dist.ProcessGroup, gathered: torch.Tensor, own: torch.Tensor) -> Any:
    """Begin an all-gather into one tensor; a group has no public method for it."""
    return group._allgather_base(gathered, own)


def timeout_of_backend(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's first backend; torch has no public getter."""
    timeout: timedelta = group._get_backend(device_types(group)[0]).options._timeout
    return timeout


def known_groups() -> list[dist.ProcessGroup]:
    """Return all groups of this process, which a dump of the flight recorder names."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_count(count: int) -> None:
    """Set the counter from which torch names new groups."""
    dist.distributed_c10d._world.group_count = count


def ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that DDP is to ignore; only their setter is public."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# ------------------------------------------------------------------ torch's DDP

TorchDDP = nn.parallel.DistributedDataParallel
DDP_ARGUMENTS = (
    *("device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group"),
    *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view"),
    "static_graph",
)
"""The constructor's arguments after the module, in order, up to the last that Syncline reads. They
are not taken from its signature, because a tracer may have replaced the constructor."""
logging_data: Callable[[TorchDDP], dict[str, Any]] = methodcaller("_get_ddp_logging_data")
"""What the reducer has measured: its buckets, and the times of sampled iterations."""
active_ddp: Callable[[], TorchDDP | None] = TorchDDP._get_active_ddp_module
"""The innermost wrapper whose forward pass is running, or None."""
is_joining: Callable[[TorchDDP], bool] = attrgetter("_join_config.enable")
"""Whether ``join`` was entered; torch does not reset this when the context ends."""
has_final_buckets: Callable[[TorchDDP], bool] = attrgetter("_has_rebuilt_buckets")
"""Whether the reducer has rebuilt its buckets after its first backward pass."""


def bucket_sizes(data: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the reducer's buckets in bytes, from ``logging_data``."""
    listed = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
    return [int(size) for size in listed.split(", ") if size]


def exposed_communication_s(data: Mapping[str, Any]) -> float | None:
    """Return how long the last sampled iteration waited for messages, from ``logging_data``."""
    if not data.get("backward_comm_time_end"):
        return None
    return max(int(data["backward_comm_time_end"] - data["backward_compute_time_end"]), 0) / 1e9


def has_comm_hook(ddp: TorchDDP) -> bool:
    """Say whether a communication hook was registered."""
    return bool(ddp._comm_hooks)


def arguments_of(ddp: TorchDDP) -> dict[str, Any]:
    """Return by name those constructor arguments of a wrapper that Syncline reads."""
    names = ("process_group", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    arguments = {name: getattr(ddp, name) for name in names}
    if not ddp.bucket_bytes_cap_default:
        arguments["bucket_cap_mb"] = ddp.bucket_bytes_cap / 2**20
    return arguments


def why_no_buckets(ddp: TorchDDP, parameters: Sequence[nn.Parameter]) -> str | None:
    """Return which feature of DDP rules out other buckets or a hook, or None."""
    if ddp._use_python_reducer:
        return "torch._dynamo's Python reducer is in use"
    if ddp.mixed_precision is not None:
        return "the mixed_precision argument uses DDP's only communication hook"
    if ddp._delay_all_reduce_params:
        return "some parameters are reduced later (delay_all_reduce_named_params)"
    if any(hasattr(p, "_in_backward_optimizers") for p in parameters):
        return "the optimizer runs inside backward and uses DDP's only communication hook"
    return None


def is_tensor_parallel(parameters: Iterable[nn.Parameter]) -> bool:
    """Say whether DTensors were made of some parameters' memory (``torch.distributed.tensor``)."""
    return any(hasattr(parameter, "_st_info") for parameter in parameters)


def reducer_parameters(ddp: TorchDDP) -> tuple[list[nn.Parameter], list[bool], dict[int, str]]:
    """Return what DDP gives its reducer: parameters, whether their gradients are sparse, names."""
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters)


def make_final_buckets(ddp: TorchDDP) -> None:
    """Rebuild the buckets now, which DDP otherwise does once, in its next forward pass."""
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()


def is_finalized(reducer: Any) -> bool:
    """Say whether a reducer has exchanged all gradients of the last backward pass."""
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:  # torch's next forward pass raises this if it matters
        return False
    return True


def remake_reducer(
    ddp: TorchDDP,
    parameters: list[nn.Parameter],
    sparse: list[bool],
    names: dict[int, str],
    *,
    sample_every: int,
) -> None:
    """Replace DDP's reducer by a new one, because a reducer's buckets cannot be changed.

    ``sparse`` tells for each parameter whether its gradient is sparse. ``names`` are by parameter
    index, for torch's messages. The reducer measures one in ``sample_every`` iterations.
    """
    del ddp.reducer, ddp.logger  # takes the old reducer's hooks off the parameters
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._comm_hooks = []
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
    if getattr(ddp, "require_manual_backward_finalization", False):  # since torch 2.15
        setattr(ddp, "require_manual_backward_finalization", True)  # noqa: B010 - a property
    ddp.reducer._set_ddp_runtime_logging_sample_rate(sample_every)


def caps_for_buckets(ddp: TorchDDP, caps: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of DDP with which its reducer closes buckets that hold these bytes.

    Each dtype has buckets of its own, and begins with the first cap.
    """
    largest, caps = max(caps), list(caps)
    noted: dict[str, Any] = {
        "bucket_bytes_cap": largest,
        "bucket_bytes_cap_list": caps,
        "bucket_bytes_cap_default": False,
    }
    config = ddp.__dict__.get("_bucket_config")  # since torch 2.13 it replaces the above
    if config is not None:
        noted["_bucket_config"] = dataclasses.replace(
            config,
            bucket_bytes_cap=largest,
            per_bucket_bytes_caps=tuple(caps),
            first_bucket_bytes_cap=largest,
        )
    return noted
