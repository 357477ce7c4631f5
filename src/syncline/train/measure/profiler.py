"""Building a profile from observed iterations, and profiling a model by itself."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import MismatchError, UserError
from syncline.plan.profile import Gradient, Operation, Phase, Profile
from syncline.plan.quantities import NS_PER_S
from syncline.train.measure.clock import clock_for
from syncline.train.measure.exchange import gather_json, share_json
from syncline.train.measure.observer import ObservedIteration, Observer
from syncline.train.measure.segments import (
    Segment,
    SegmentTrace,
    first_forward_segment,
    median_trace,
    read_iteration,
)
from syncline.train.measure.statistics import median


def profile(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    iterations: int = 8,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    name: str | None = None,
    exchange: Callable[[], None] | None = None,
    each: Callable[[int, Profile], None] | None = None,
) -> Profile:
    """Train a model for a few iterations and return what one of them costs.

    The model is really trained: pass a copy if its parameters matter. It needs no change; hooks on
    its modules, on the nodes of its autograd graph and on its parameters note what happens
    (:class:`syncline.train.measure.observer.Observer`). A third of the iterations are observed in
    detail, a third only as a whole, to subtract the cost of observing; the others give the
    durations. The model must not be wrapped for data-parallel training: communication would disturb
    the measured computation.

    Args:
        model: the model, on the device where it computes.
        batches: yields ``(inputs, targets)``; read again from its start when it ends.
        loss: ``loss(model(inputs), targets)`` returns the scalar to differentiate.
        optimizer: updates the parameters; without one the profile has no update.
        iterations: how many iterations to measure, at least 3.
        warmup: how many to run before.
        group: take medians across the ranks of this process group (all must call); by default
            across the default group if there is one.
        name: the model's name in the profile; by default its class name.
        exchange: exchanges the gradients, between the backward pass and the update of every
            iteration that gives durations; the profile leaves its time out.
        each: called in the end with the number and the profile of every iteration that gives
            durations, as this rank measured it; not if its operations differ from the usual ones.

    Raises:
        UserError: the model has no parameter to train, ``batches`` is empty, or too few
            iterations are asked for.
        PeerError: another rank failed or did not answer within the group's timeout.
    """
    if iterations < 3:
        raise UserError(f"profiling needs at least 3 iterations, found {iterations}")
    parameters = trainable_parameters(model)
    if not parameters:
        raise UserError("this model has no parameter that requires a gradient")
    device = next(iter(parameters.values())).device
    clock = clock_for(device)
    observer = Observer(model, parameters, clock)
    observed: list[tuple[tuple[float, Any, Any], ObservedIteration]] = []
    reader = _endless(batches)
    model.train()
    # Seconds of reading a batch, and the clock's stamps around its copy to the device.
    loadings: list[tuple[float, Any, Any]] = []
    observer.attach()
    try:
        for index in range(warmup + iterations + 1):
            start = time.perf_counter()
            inputs, targets = next(reader)
            read = time.perf_counter()
            copying = clock.stamp()
            inputs, targets = _to_device(inputs, device), _to_device(targets, device)
            loadings.append((read - start, copying, clock.stamp()))
            turn = (index - warmup) % 3
            observer.quiet, observer.detail = turn == 1, turn == 2
            finished = observer.begin()
            if finished is not None and index > warmup:
                observed.append((loadings[-2], finished))
            output = model(inputs)
            observer.output(output)
            loss(output, targets).backward()
            if exchange is not None and turn == 0 and index >= warmup:
                exchange()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
    finally:
        observer.detach()
    # Not before: waiting empties a GPU's queue, which makes the next forward pass slower.
    clock.synchronize()
    lean: list[tuple[SegmentTrace, float, float]] = []  # with the seconds of its loading
    detailed: list[SegmentTrace] = []
    quiet_ns: list[int] = []
    loading_s: list[tuple[float, float]] = []  # (reading, copying)
    for (reading_s, began, copied), finished in observed:
        loading_s.append((reading_s, clock.between_ns(began, copied) / NS_PER_S))
        if finished.quiet:
            quiet_ns.append(clock.between_ns(finished.events[0].stamp, finished.end_stamp))
        elif finished.graph is not None:
            detailed.append(read_iteration(finished, clock))
        else:
            one = read_iteration(finished, clock)
            if exchange is not None:
                one = one._replace(segments=[s for s in one.segments if s.phase != "finalize"])
            lean.append((one, *loading_s[-1]))
    trace = median_trace([one for one, *_ in lean], detailed, quiet_ns)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    workers = 1 if group is None else dist.get_world_size(group)
    if group is not None and workers > 1:
        trace = across_ranks(trace, group, device)

    def described(
        trace: SegmentTrace, workers: int, iterations: int, data_s: float, copy_s: float
    ) -> Profile:
        return profile_from_trace(
            trace,
            model,
            name=name or type(model).__name__,
            workers=workers,
            iterations=iterations,
            data_s=data_s,
            copy_s=copy_s if device.type == "cuda" else None,
        )

    typical_data_s, typical_copy_s = map(median, zip(*loading_s, strict=True))
    found = described(trace, workers, len(lean), typical_data_s, typical_copy_s)
    if each is not None:
        usual = [operation.name for operation in found.operations]
        for index, (one, data_s, copy_s) in enumerate(lean):
            single = described(median_trace([one], detailed), 1, 1, data_s, copy_s)
            if [operation.name for operation in single.operations] == usual:
                each(index, single)
    return found


def profile_from_trace(
    trace: SegmentTrace,
    model: nn.Module,
    *,
    name: str,
    workers: int,
    iterations: int,
    data_s: float | None = None,
    copy_s: float | None = None,
    exchange: tuple[tuple[str, float], ...] = (),
) -> Profile:
    """Turn the segments of one iteration, or of medians, into a DAG of operations and gradients.

    ``data_s`` is the time of data loading, by default all between the update and the next forward
    pass; ``copy_s`` that of copying to the device, if that is an operation. ``exchange`` has names
    and seconds of operations between the last message and the update.
    """
    data = sum(s.duration_ns for s in trace.segments if s.phase == "data") / NS_PER_S
    operations: list[Operation] = []

    def add(name: str, phase: Phase, duration_s: float, after: Sequence[int] = ()) -> None:
        """Add an operation, by default after the last one."""
        waits_for = tuple(after) or tuple(range(len(operations)))[-1:]
        operations.append(Operation(name=name, phase=phase, duration_s=duration_s, after=waits_for))

    add("data loading", "data", data if data_s is None else data_s)
    if copy_s is not None:
        add("host to device", "copy", copy_s)
    first = len(operations)
    computing = [s for s in trace.segments if s.phase in ("forward", "backward")]
    after = _dependencies(trace, computing)
    for index, segment in enumerate(computing):
        waits_for = sorted(first + before for before in after[index]) or [first - 1]
        add(segment.name, segment.phase, segment.duration_ns / NS_PER_S, waits_for)
    gradients = _gradients(trace, computing, model, first)
    for label, seconds in exchange:
        add(label, "finalize", seconds)
    for segment in trace.segments:
        if segment.phase == "update":
            add(segment.name, "update", segment.duration_ns / NS_PER_S)
    parameters = trainable_parameters(model)
    return Profile(
        model=name,
        device=next(iter(parameters.values())).device.type,
        workers=workers,
        iterations=iterations,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def across_ranks(
    trace: SegmentTrace, group: dist.ProcessGroup, device: torch.device
) -> SegmentTrace:
    """Return rank 0's trace with every duration replaced by the median over the ranks.

    A rank whose operations differ from rank 0's (a branch that depends on the data) is left out.
    """
    names = [segment.name for segment in trace.segments]
    mine = {"names": names, "ns": [segment.duration_ns for segment in trace.segments]}
    everyone = gather_json(mine, group, device)
    same = [other["ns"] for other in everyone if other["names"] == everyone[0]["names"]]
    medians = [round(median(values)) for values in zip(*same, strict=True)]
    own = [s._replace(duration_ns=d) for s, d in zip(trace.segments, medians, strict=False)]
    shared = share_json(own, group, device)
    return trace._replace(segments=msgspec.convert(shared, list[Segment]))


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that get gradients, by name; shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype as profiles and plans write it."""
    return str(dtype).removeprefix("torch.")


def unpack_seconds(parameters: Mapping[str, nn.Parameter]) -> float:
    """Return how long DDP takes to copy exchanged buckets back into gradients that are no views.

    Returns 0 on CUDA, where the copies run behind the launches and cost next to nothing.
    """
    first = next(iter(parameters.values()))
    if first.device.type != "cpu":
        return 0.0
    size_bytes = [p.numel() * p.element_size() for p in parameters.values()]
    buckets = torch.empty(sum(size_bytes), dtype=torch.uint8)
    copies = [torch.empty_like(part) for part in buckets.split(size_bytes)]

    def unpack() -> None:
        for copy, part in zip(copies, buckets.split(size_bytes), strict=True):
            copy.copy_(part)

    return median(timeit.repeat(unpack, number=1, repeat=3)[1:])


def _dependencies(trace: SegmentTrace, computing: list[Segment]) -> list[list[int]]:
    """Return, for each computing segment, the earlier ones whose results it needs."""
    after: list[list[int]] = [[index - 1] if index else [] for index in range(len(computing))]
    if trace.graph is None:
        return after
    graph = trace.graph
    forward_of = _forward_segments_of_nodes(trace, computing)
    backward_of = {s.node: i for i, s in enumerate(computing) if s.node is not None}
    last_forward = max((i for i, s in enumerate(computing) if s.phase == "forward"), default=0)
    found: list[set[int]] = [set() for _ in computing]
    for node, consumers in enumerate(graph.consumers):
        made_in = forward_of.get(node)
        for consumer in consumers:
            used_in = forward_of.get(consumer)
            if made_in is not None and used_in is not None and made_in < used_in:
                found[used_in].add(made_in)
        runs_in = backward_of.get(node)
        if runs_in is None:
            continue
        if made_in is not None:
            found[runs_in].add(made_in)
        found[runs_in].update(backward_of[c] for c in consumers if c in backward_of)
        if not consumers:
            found[runs_in].add(last_forward)
    return [
        sorted(before for before in known if before < index) or after[index]
        for index, known in enumerate(found)
    ]


def _forward_segments_of_nodes(trace: SegmentTrace, computing: list[Segment]) -> dict[int, int]:
    """Return the forward segment in which each autograd node was made, by sequence numbers."""
    assert trace.graph is not None
    forward = [(i, s.first_event) for i, s in enumerate(computing) if s.first_event >= 0]
    begins = [(trace.sequence_at[event], index) for index, event in forward]
    return {
        node: before[-1]
        for node, sequence in enumerate(trace.graph.sequence)
        if (before := [index for begin, index in begins if begin < sequence])
    }


def _gradients(
    trace: SegmentTrace, computing: list[Segment], model: nn.Module, first: int
) -> list[Gradient]:
    parameters = trainable_parameters(model)
    ready_after = {name: i for i, s in enumerate(computing) for name in s.ready}
    unknown = ready_after.keys() - parameters.keys()
    if unknown:
        raise MismatchError(f"gradients of unknown parameters were seen: {sorted(unknown)}")
    # A parameter without a gradient is exchanged all the same, from when backward begins.
    begin = max((i for i, s in enumerate(computing) if s.phase == "forward"), default=0)
    entered = first_forward_segment(trace)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    unused = [name for name in parameters if name not in ready_after]
    result = []
    for name in [*unused, *trace.ready_order]:
        parameter = parameters[name]
        needed = [
            first + entered[module]
            for owner in owners[id(parameter)]
            if (module := _called(owner, entered)) is not None
        ]
        result.append(
            Gradient(
                name=name,
                elements=parameter.numel(),
                dtype=dtype_name(parameter.dtype),
                ready_after=first + (begin if name in unused else ready_after[name]),
                needed_by=min(needed, default=None),
            )
        )
    return sorted(result, key=lambda gradient: gradient.ready_after)


def _called(owner: str, entered: Mapping[str, int]) -> str | None:
    """Return the module that reads a parameter: its owner, or the innermost one around it that ran.

    Attention reads the weights of its projection without calling it. None if only the whole model
    ran, which may read the parameter at any time.
    """
    if owner in entered:
        return owner
    around = owner.rpartition(".")[0]
    return _called(around, entered) if around else None


def _endless(batches: Iterable[Any]) -> Any:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise UserError("profiling needs at least one batch, the given batches are empty")


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
