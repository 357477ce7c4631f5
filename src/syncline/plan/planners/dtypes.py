"""Messages of one dtype each, as collectives need them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s


def of_one_dtype(plan: Plan, profile: Profile, network: Network) -> Plan:
    """Return the plan with tensors grouped by dtype, and messages of one dtype each.

    :func:`apart` cuts the messages. A dtype with few bytes, such as that of norms, would then pay a
    startup with every message of the others. So pieces of successive messages are joined until they
    take as long as one startup or four, or are as large as the plan's largest message; the
    simulator judges the results.
    """
    cut = apart(plan)
    if len(cut.messages) == len(plan.messages):
        return cut
    curve = network.collective("all-reduce", in_flight=plan.in_flight)
    startup_s, s_per_byte = curve.linearised(profile.gradient_bytes)
    least_bytes = startup_s / s_per_byte if s_per_byte else 0.0
    most_bytes = max(plan.message_bytes())
    found = [cut, *(_joined(cut, least) for least in (least_bytes, 4 * least_bytes, most_bytes))]
    possible = [p for p in found if _gathers_whole_sums(p)] or [cut]
    try:
        return min(
            possible, key=lambda p: (predict_iteration_s(profile, network, p), len(p.messages))
        )
    except UserError:  # it takes too long to be simulated; whoever predicts the plan says so
        return cut


def apart(plan: Plan) -> Plan:
    """Return the plan with tensors grouped by dtype, and messages cut where the dtype changes.

    Tensors of one dtype keep their order, so a message's pieces are contiguous. They follow each
    other in its place. O(tensors of all messages).
    """
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in plan.tensors))
    if len(dtypes) == 1:
        return plan
    order = sorted(range(len(plan.tensors)), key=lambda t: dtypes.index(plan.tensors[t].dtype))
    tensors = tuple(plan.tensors[t] for t in order)
    first = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]
    grouped = itertools.accumulate((tensor.elements for tensor in tensors), initial=0)
    shift = {t: start - first[t] for t, start in zip(order, grouped, strict=False)}

    def pieces() -> Iterator[Message]:
        for message, members in zip(plan.messages, plan.message_tensors(), strict=True):
            spans: dict[str, tuple[int, int]] = {}
            for t in members:
                start = shift[t] + max(message.start, first[t])
                stop = shift[t] + min(message.stop, first[t + 1])
                dtype = plan.tensors[t].dtype
                spans[dtype] = spans.get(dtype, (start, stop))[0], stop
            for start, stop in spans.values():
                if start < stop:
                    yield msgspec.structs.replace(message, start=start, stop=stop)

    messages = tuple(pieces()) or (Message(start=0, stop=0),)
    return msgspec.structs.replace(plan, tensors=tensors, messages=messages)


def _joined(plan: Plan, least_bytes: float) -> Plan:
    """Return the plan with successive pieces of a dtype that touch joined up to ``least_bytes``.

    Joined sums are sent in the place of the one that is ready last; joined gathers in that of the
    first, but after their sums.
    """
    found: list[Message] = []
    places: list[float] = []
    latest: dict[tuple[str, str], tuple[int, int]] = {}  # where the last of a kind is, its bytes
    sizes = zip(plan.messages, plan.message_bytes(), plan.message_tensors(), strict=True)
    for place, (message, size_bytes, members) in enumerate(sizes):
        kind = message.collective, plan.tensors[members[0]].dtype if members else ""
        at, held_bytes = latest.get(kind, (-1, 0))
        gathers = message.collective == "all-gather"
        touches = at >= 0 and (found[at].stop == message.start or message.stop == found[at].start)
        if touches and held_bytes < least_bytes:
            start, stop = min(found[at].start, message.start), max(found[at].stop, message.stop)
            if message.stop == stop and not gathers:
                places[at] = place
            found[at] = msgspec.structs.replace(
                message, start=start, stop=stop, delay_s=max(found[at].delay_s, message.delay_s)
            )
        else:
            at, held_bytes = len(found), 0
            found.append(message)
            places.append(place)
        latest[kind] = at, held_bytes + size_bytes
    for at, message in enumerate(found):
        if message.collective == "all-gather":
            sums = (
                place + 0.5
                for other, place in zip(found, places, strict=True)
                if other.collective == "reduce-scatter"
                and max(other.start, message.start) < min(other.stop, message.stop)
            )
            places[at] = max(places[at], *sums)
    order = sorted(range(len(found)), key=places.__getitem__)
    return msgspec.structs.replace(plan, messages=tuple(found[at] for at in order))


def _gathers_whole_sums(plan: Plan) -> bool:
    """Return whether every all-gather begins and ends with a reduce-scatter."""
    sums = [m for m in plan.messages if m.collective == "reduce-scatter"]
    bounds = {bound for m in sums for bound in (m.start, m.stop)}
    gathers = (m for m in plan.messages if m.collective == "all-gather")
    return all({m.start, m.stop} <= bounds for m in gathers)
