"""Conversion between the layers of layer-wise formats and the operations of a profile.

A layer table has no edges. Its layers run forward one after another and backward in reverse; the
papers draw the iteration the same way (dag-model, Fig. 1; MG-WFBP, Fig. 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline.errors import UserError
from syncline.files.traces.trace import bare_profile, sized_gradient, unique_names
from syncline.plan.profile import Gradient, Operation, Phase, Profile

MOST_LAYERS = 100_000  # a file with more rows is not a layer table


@dataclass(slots=True, kw_only=True)
class Layer:
    """One layer; times in seconds."""

    name: str
    forward_s: float = 0.0
    weight_s: float = 0.0  # backward time until the gradient of its parameters is ready
    input_s: float = 0.0  # backward time after that: the gradient with respect to its input
    gradient_bytes: int = 0
    message_s: float = 0.0  # the all-reduce of its gradient, where a table times it
    update_s: float = 0.0
    gradients: list[str] = field(default_factory=list)
    """Names of the tensors that make up its bytes, where they are known."""


@dataclass(slots=True, kw_only=True)
class LayerTable:
    """The layers of a profile."""

    data_s: float  # reading and copying the batch
    layers: list[Layer]
    lost: list[str]  # what the layers cannot express of the profile, one phrase each


def profile_of(
    layers: Sequence[Layer], *, model: str, data_s: float = 0.0, iterations: int = 1
) -> Profile:
    """Return the profile of layers, in forward order, that run one after another.

    ``data_s`` is the time of reading the batch; 0 for none.
    """
    operations: list[Operation] = []

    def add(name: str, phase: Phase, duration_s: float, *after: int) -> int:
        waits_for = tuple(sorted(set(after)))
        operations.append(Operation(name=name, phase=phase, duration_s=duration_s, after=waits_for))
        return len(operations) - 1

    before = [add("data", "data", data_s)] if data_s > 0 else []
    forward: list[int] = []
    for layer in layers:
        before = [add(layer.name, "forward", layer.forward_s, *before)]
        forward += before
    names = unique_names(layer.name for layer in reversed(layers) if layer.gradient_bytes)
    gradients: list[Gradient] = []
    updates: list[tuple[Layer, int]] = []
    for layer, own in zip(reversed(layers), reversed(forward), strict=True):
        ready = add(f"{layer.name} backward", "backward", layer.weight_s, own, *before)
        before = [ready]
        if layer.gradient_bytes:
            name, size_bytes = next(names), layer.gradient_bytes
            gradients.append(sized_gradient(name, size_bytes, ready_after=ready, needed_by=own))
        if layer.input_s > 0:
            before = [add(f"{layer.name} backward, input", "backward", layer.input_s, own, ready)]
        if layer.update_s > 0:
            updates.append((layer, ready))
    for layer, ready in updates:
        add(f"{layer.name} update", "update", layer.update_s, ready)
    return bare_profile(model, operations, gradients, iterations=iterations)


def layers_of(profile: Profile) -> LayerTable:
    """Cut a profile into layers: one for each forward (or, without any, backward) operation.

    The page "Algorithms and costs" says to which layer a backward operation belongs.
    """
    lost: list[str] = []
    operations = profile.operations
    passes = [o for o in operations if o.phase in ("forward", "backward")]
    lane = "device" if any(o.lane == "device" for o in passes) else "host"
    hosted_s = sum(o.duration_s for o in operations if o.lane == "host")
    if lane == "device" and hosted_s:
        lost.append(
            f"{hosted_s * 1e3:.3g} ms of launching on the CPU: a layer has times on one device only"
        )
    others_s = sum(o.duration_s for o in passes if o.lane not in (lane, "host"))
    if others_s:
        lost.append(
            f"{others_s * 1e3:.3g} ms on further streams and of communication with other workers: "
            "layers run one after another"
        )
    rows = _rows(profile, lane)
    names = unique_names(operations[row].name.removesuffix(" backward") for row in rows)
    layers = {row: Layer(name=name) for row, name in zip(rows, names, strict=True)}
    owner = _owners(profile, layers)
    owned = [
        needed if (needed := g.needed_by) is not None and needed in layers else owner[g.ready_after]
        for g in profile.gradients
    ]
    _add_times(profile, layers, owner, lane)
    _share_update(profile, layers, owned, lane)
    for gradient, row in zip(profile.gradients, owned, strict=True):
        layers[row].gradient_bytes += gradient.size_bytes
        layers[row].gradients.append(gradient.name)
    first = layers[rows[0]]
    if not first.gradient_bytes:  # nothing is computed after its weight gradient
        first.weight_s, first.input_s = first.weight_s + first.input_s, 0.0
    position = {row: place for place, row in enumerate(layers)}
    if any(position[later] > position[earlier] for earlier, later in itertools.pairwise(owned)):
        lost.append(
            "the order in which gradients become ready: layers run backward in reverse order"
        )
    if len(set(owned)) < len(owned):
        lost.append(f"{len(owned)} gradient tensors are those of {len(set(owned))} layers")
    data_s = profile.phase_s("data", "copy")
    return LayerTable(data_s=data_s, layers=list(layers.values()), lost=lost)


def _rows(profile: Profile, lane: str) -> list[int]:
    """Return the operations that stand for the layers, in forward order."""
    for phase, step in (("forward", 1), ("backward", -1)):
        rows = [
            index
            for index, operation in enumerate(profile.operations)
            if operation.phase == phase and operation.lane == lane
        ][::step]
        if len(rows) > MOST_LAYERS:
            raise UserError(
                f"{profile.model}: {len(rows)} operations are too many for a table of layers"
            )
        if rows:
            return rows
    raise UserError(f"{profile.model}: no forward or backward operation to make a layer of")


def _add_times(profile: Profile, layers: dict[int, Layer], owner: list[int], lane: str) -> None:
    ready = {gradient.ready_after for gradient in profile.gradients}
    for index, operation in enumerate(profile.operations):
        layer = layers[owner[index]]
        if operation.lane != lane:
            continue
        if operation.phase == "forward":
            layer.forward_s += operation.duration_s
        elif operation.phase == "backward":
            layer.input_s += operation.duration_s
            if index in ready:  # all that was spent on this layer so far led to its gradient
                layer.weight_s += layer.input_s
                layer.input_s = 0.0


def _owners(profile: Profile, layers: dict[int, Layer]) -> list[int]:
    """Return, for each operation, the operation whose layer it belongs to."""
    needed_after = {g.ready_after: g.needed_by for g in profile.gradients if g.needed_by in layers}
    before = next(reversed(layers))
    owner: list[int] = []
    for index, operation in enumerate(profile.operations):
        if index in layers:
            before = index
        elif operation.phase == "backward":
            needed = needed_after.get(index)
            known = (o for o in operation.after if o in layers)
            before = max(known, default=before) if needed is None else needed
        owner.append(before)
    return owner


def _share_update(
    profile: Profile, layers: dict[int, Layer], owned: Sequence[int], lane: str
) -> None:
    """Give each layer its own update if each has one; otherwise share their total by bytes."""
    row_of = {g.ready_after: row for g, row in zip(profile.gradients, owned, strict=True)}
    phases = ("finalize", "update")
    updates = [o for o in profile.operations if o.phase in phases and o.lane == lane]
    own = [row_of[o.after[0]] for o in updates if len(o.after) == 1 and o.after[0] in row_of]
    if len(updates) > 1 and len(set(own)) == len(own) == len(updates):
        for operation, row in zip(updates, own, strict=True):
            layers[row].update_s += operation.duration_s
        return
    total_bytes = profile.gradient_bytes or 1
    common_s = sum(operation.duration_s for operation in updates)
    for gradient, row in zip(profile.gradients, owned, strict=True):
        layers[row].update_s += common_s * (gradient.size_bytes / total_bytes)
