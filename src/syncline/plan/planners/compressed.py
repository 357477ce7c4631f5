"""Plans whose messages are sparse, or rounded to 16 or 8 bits."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message, MessageCollective, Payload, Plan, Tensor
from syncline.plan.planners.base import Planner
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.dtypes import of_one_dtype
from syncline.plan.planners.overlap import candidates
from syncline.plan.planners.wfbp import Single
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.plan.recipe import Compression, Recipe, Rounded, compression_name, hook_for
from syncline.plan.simulator.predict import predict, predict_iteration_s
from syncline.plan.simulator.transformations import with_wire
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS


class CompressedChoice(NamedTuple):
    """The plans that were compared, and the one that was chosen."""

    comparison: Comparison
    """Of the compressed plans on :attr:`network`, and of DDP's buckets on the real network: dense
    and, if all elements are rounded, with torch's hook that rounds them."""
    plan: Plan
    network: Network  # what messages cost when they are compressed
    deferring: bool
    """Whether the plan's planner would let the forward pass wait for single gradients."""


def compressing(network: Network, compression: Compression) -> Network:
    """Return the network on which a plan's compressed messages are simulated.

    Rounding does not change it: a plan's messages say in which type they travel.
    """
    if network.workers == 1 or not isinstance(compression, Recipe):
        return network
    known = compression.algorithm in SPARSE_ALGORITHMS  # gtop-k-naive gathers like top-k
    sparse = network.replace(
        algorithm=compression.algorithm if known else "top-k", density=compression.density
    )
    return msgspec.structs.replace(sparse, pipelined=None)


def compressed(plan: Plan, compression: Compression) -> Plan:
    """Return the plan with its messages compressed, with as few other changes as possible.

    Only float32 is compressed. In 8 bits all-reduces are decoupled. Sparse messages hold whole
    tensors (:func:`uncut`); those of tensors that the recipe exchanges whole stay dense. Raise
    UserError if the recipe selects from the whole model, and the plan has several sparse messages.
    """
    if plan.is_lossy:
        payloads = {m.payload for m in plan.messages} - {"dense"}
        expected = "sparse" if isinstance(compression, Recipe) else compression
        if payloads != {expected}:
            raise UserError(
                f"the plan's messages travel as {', '.join(sorted(payloads))}, compression is "
                f"{compression_name(compression)}; give the one that the plan was made for"
            )
        return plan
    name = f"{plan.planner}+{compression_name(compression)}"
    if not isinstance(compression, Recipe):
        messages = decoupled(plan.messages) if compression == "int8" else plan.messages
        whole = msgspec.structs.replace(plan, planner=name, messages=tuple(messages))
        return _with_payload(whole, compression, lambda _: False)
    whole = msgspec.structs.replace(uncut(plan), planner=name)
    sparse = _with_payload(whole, "sparse", lambda t: compression.is_dense(t.name, t.elements))
    count = sum(message.payload == "sparse" for message in sparse.messages)
    if compression.unit == "model" and count > 1:
        raise UserError(
            "a recipe with unit 'model' selects from all gradients at once, so they travel in one "
            f"message; this plan has {count}: take the planner 'single'"
        )
    return sparse


def _with_payload(plan: Plan, payload: Payload, is_dense: Callable[[Tensor], bool]) -> Plan:
    """Return the plan with messages of a payload, except for those whose tensors are dense."""

    def payload_of(tensors: range) -> Payload:
        filling = [plan.tensors[index] for index in tensors if plan.tensors[index].elements]
        stays = filling and all(t.dtype != "float32" or is_dense(t) for t in filling)
        return "dense" if stays else payload

    messages = zip(plan.messages, plan.message_tensors(), strict=True)
    paid = (msgspec.structs.replace(m, payload=payload_of(tensors)) for m, tensors in messages)
    return msgspec.structs.replace(plan, messages=tuple(paid))


def decoupled(messages: Iterable[Message], *, at_once: bool = False) -> list[Message]:
    """Return the messages with each all-reduce as a reduce-scatter and an all-gather.

    The all-gather follows the next reduce-scatter or, if ``at_once``, its own.
    """
    found: list[Message] = []
    gathers: list[Message] = []
    for message in messages:
        whole = message.collective == "all-reduce"
        kind: MessageCollective = "reduce-scatter" if whole else message.collective
        gather = msgspec.structs.replace(message, collective="all-gather", delay_s=0.0)
        own = [gather] if whole else []
        found += [msgspec.structs.replace(message, collective=kind), *(own if at_once else gathers)]
        gathers = [] if at_once else own
    return [*found, *gathers]


def planned_in(planner: Planner, profile: Profile, network: Network, wire: Rounded) -> Plan:
    """Return a planner's plan of messages of which those of float32 travel in 16 or 8 bits."""
    own = {gradient.name: gradient.dtype for gradient in profile.gradients}
    narrow = planner.plan(with_wire(profile, wire, only="float32"), network.casting(wire))
    tensors = tuple(msgspec.structs.replace(t, dtype=own[t.name]) for t in narrow.tensors)
    narrow = of_one_dtype(msgspec.structs.replace(narrow, tensors=tensors), profile, network)
    if wire != "int8":
        return compressed(narrow, wire)
    # An all-gather after the next sum hides a latency; one right away may use an idle channel.
    plans = [
        compressed(msgspec.structs.replace(narrow, messages=tuple(messages)), wire)
        for messages in (decoupled(narrow.messages), decoupled(narrow.messages, at_once=True))
    ]
    return min(plans, key=lambda plan: predict_iteration_s(profile, network, plan))


def uncut(plan: Plan) -> Plan:
    """Return the plan with all-reduces of whole tensors, one at a time, as sparse messages need."""
    ends = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]

    def nearest(at: int) -> int:
        after = bisect.bisect_left(ends, at)
        return min(ends[max(after - 1, 0) : after + 1], key=lambda end: abs(end - at))

    moved = [
        Message(start=nearest(m.start), stop=nearest(m.stop))
        for m in plan.messages
        if m.collective != "reduce-scatter"
    ]
    messages = [m for m in moved if m.start < m.stop] or [Message(start=0, stop=plan.elements)]
    # Norms of sparse messages are not exchanged: an update that needs one waits for all messages.
    base = plan if plan.norm is None else plan.waiting_for_all()
    return msgspec.structs.replace(base, messages=tuple(messages), in_flight=1)


def choose_compressed(
    profile: Profile,
    network: Network,
    compression: Compression,
    *,
    planner: Planner | None = None,
    ddp: Ddp,
    defers: bool,
) -> CompressedChoice:
    """Simulate compressed plans and take the fastest, or that of ``planner``.

    Compression was asked for, so a compressed plan is taken even if DDP's dense buckets are
    predicted to be as fast; the reason then says so.
    """
    costs = compressing(network, compression)
    if isinstance(compression, Recipe):
        whole = compression.unit == "model"
        planners = (Single(),) if whole else candidates(defers=defers, in_flight=1)
        planners = planners if planner is None else (planner,)
        made = [compressed(each.plan(profile, costs), compression) for each in planners]
    else:
        # DDP's buckets are compared below, as torch's hook sends them.
        known = tuple(p for p in candidates(defers=defers) if p.NAME != Ddp.NAME)
        planners = known if planner is None else (planner,)
        made = [planned_in(each, profile, network, compression) for each in planners]
    plans = {plan.planner: plan for plan in made}
    deferring = {plan.planner for plan in made if plan.wait == "need"}
    if not defers:
        plans = {name: plan.waiting_for_all() for name, plan in plans.items()}
    predictions = [
        # A recipe may keep everything dense.
        predict(profile, costs if plan.is_sparse else network, plan).prediction
        for plan in plans.values()
    ]
    best = min(predictions, key=lambda p: (p.iteration_s, p.messages))
    ddp_plans, buckets = [ddp.plan(profile, network)], "dense buckets"
    if not isinstance(compression, Recipe):
        ddp_plans.insert(0, compressed(ddp_plans[0], hook_for(compression)))
        buckets = "buckets with or without a hook"
    baselines = [predict(profile, network, plan).prediction for plan in ddp_plans]
    least_s = min(each.iteration_s for each in baselines)
    gain_s = least_s - best.iteration_s
    name = compression_name(compression)
    if gain_s > 0:
        reason = (
            f"{name} was asked for, and is predicted to take {gain_s * 1e3:.2f} ms "
            f"({gain_s / least_s:.1%}) less an iteration than DDP's {buckets}"
        )
    else:
        reason = f"{name} was asked for; DDP's {buckets} are predicted to be as fast"
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=network.workers,
        predictions=(*(p for p in predictions if p.planner != baselines[0].planner), *baselines),
        chosen=best.planner,
        reason=reason,
    )
    return CompressedChoice(comparison, plans[best.planner], costs, best.planner in deferring)
