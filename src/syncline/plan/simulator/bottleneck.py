"""What limits a point, in one sentence, and the smallest change that lifts the limit."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from syncline.plan.network import Network
from syncline.plan.plan import Plan, Tensor
from syncline.plan.simulator.analysis import PathStep, critical_path, path_parts
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.whatif import Change, Planned, WhatIfSimulator
from syncline.plan.simulator.workers import ALIKE
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS
from syncline.plan.whatif import BOUND_SHARE, Bottleneck, Point, Split

Number = TypeVar("Number", int, float)

LADDER_GBIT_S = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0)
"""Bandwidths of Ethernet and InfiniBand links that one can buy."""
BYTES_PER_GBIT = 125e6
MOST_OF_IT = 0.8
"""Layers are named until they cover this share of the messages' time on the critical path."""
MOST_RANGES = 2  # most ranges of layers that a sentence names
LOADERS = (1, 2, 4, 8, 16, 32, 64)  # numbers of loader processes that are tried
NAMES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "finalize": "unpacking gradients",
    "update": "the update",
}


def bottleneck(
    simulator: WhatIfSimulator, change: Change, point: Point, index: int, planner: str
) -> Bottleneck:
    """Return what limits a planner at a point; ``change`` and ``index`` are the point's own."""
    planned = simulator.plan_at(change, planner)
    steps = critical_path(planned.scenario.profile, planned.plan, planned.steady)
    split = point.split(point.of(planner))
    kind = split.bound
    share = split.shares[kind]
    bandwidth: float | None = None
    workers: int | None = None
    if kind == "communication":
        sentence, bandwidth, workers = _communication(simulator, change, planned, steps, share)
    elif kind == "loading":
        sentence = _loading(simulator, change, share)
    elif kind == "straggler":
        sentence = _straggler(simulator, change, planned, planner, share)
    else:
        sentence = _compute(steps, share, split.shares["communication"])
    return Bottleneck(
        point=index,
        planner=planner,
        kind=kind,
        share=share,
        sentence=sentence,
        split=split,
        path=path_parts(steps),
        cure_bandwidth_bytes_per_s=bandwidth,
        cure_workers=workers,
    )


def _fastest(simulator: WhatIfSimulator, change: Change) -> Split:
    """Return the parts of the fastest planner's iteration under a change."""
    point = simulator.point(change)
    return point.split(point.best)


def _hides_messages(simulator: WhatIfSimulator, change: Change) -> bool:
    return _fastest(simulator, change).shares["communication"] < BOUND_SHARE


def _first(values: Sequence[Number], holds: Callable[[Number], bool]) -> Number | None:
    """Return the first value from which on a condition holds."""
    if not values or not holds(values[-1]):
        return None
    return values[bisect.bisect_left(values, True, key=holds)]


def _most_workers(simulator: WhatIfSimulator, change: Change, network: Network) -> int | None:
    """Return the largest smaller power of two of workers, on full hosts, that hides messages."""
    on_host = network.workers // network.hosts if network.hosts else 1
    least = max((rank + 1 for rank, _ in change.behaviour.stragglers), default=1)
    powers = [1 << k for k in reversed(range(1, network.workers.bit_length()))]
    counts = [n for n in powers if least <= n < network.workers and n % on_host == 0]
    return _first(counts, lambda n: _hides_messages(simulator, change._replace(workers=n)))


def _communication(
    simulator: WhatIfSimulator,
    change: Change,
    planned: Planned,
    steps: Sequence[PathStep],
    share: float,
) -> tuple[str, float | None, int | None]:
    """Return the sentence, and the bandwidth or worker count that would lift the limit."""
    profile, network, *_ = planned.scenario
    said = (
        f"communication-bound: {_percent(share)} of the iteration is exposed "
        f"{_exchange(planned)} of {layers_of(planned.plan, profile.tensors, steps)}; "
    )
    rate = _first(
        LADDER_GBIT_S,
        lambda rate: _hides_messages(
            simulator, change._replace(bandwidth_bytes_per_s=rate * BYTES_PER_GBIT)
        ),
    )
    if rate is not None:
        bandwidth = rate * BYTES_PER_GBIT
        then = _fastest(simulator, change._replace(bandwidth_bytes_per_s=bandwidth)).bound
        return f"{said}{rate:g} Gbit/s would make it {then}-bound", bandwidth, None
    said += f"no bandwidth up to {LADDER_GBIT_S[-1]:g} Gbit/s would change that"
    latency_s = network.all_reduce.latency_s
    if latency_s > BOUND_SHARE / (1 - BOUND_SHARE) * planned.prediction.computation_s:
        said += f", since each message takes {latency_s * 1e3:.3g} ms to start"
    if not simulator.replans:
        return said, None, None
    workers = _most_workers(simulator, change, network)
    if workers is None:
        return f"{said}, nor would fewer workers", None, None
    then = _fastest(simulator, change._replace(workers=workers)).bound
    return f"{said}, but {workers} workers would make it {then}-bound", None, workers


def _exchange(planned: Planned) -> str:
    if any(task.lane == "push" for task in planned.steady.dag.messages):
        return "push and pull"
    algorithm = planned.scenario.network.algorithm
    if algorithm in SPARSE_ALGORITHMS:
        return f"{algorithm} exchange"
    kinds = dict.fromkeys(message.collective for message in planned.plan.messages)
    return " and ".join(kinds)


def _loading(simulator: WhatIfSimulator, change: Change, share: float) -> str:
    said = f"loading-bound: {_percent(share)} of the iteration is waiting for the batch; "
    ahead = STRATEGIES["pytorch"]
    for loaders in LOADERS:
        strategy = msgspec.structs.replace(ahead, loaders=loaders, ahead=max(2, 2 * loaders))
        if _fastest(simulator, change._replace(strategy=strategy)).bound == "loading":
            continue
        if loaders == 1:
            return f"{said}reading and copying ahead (--strategy pytorch) would hide it"
        return f"{said}{loaders} loader processes that read ahead would hide it"
    return f"{said}not even {LOADERS[-1]} loader processes that read ahead would hide it"


def _straggler(
    simulator: WhatIfSimulator, change: Change, planned: Planned, planner: str, share: float
) -> str:
    slowest = max(planned.steady.dag.classes, key=lambda c: c.factor)
    if change.behaviour.jitter:
        who = "whichever worker is the slowest"
    elif slowest.size > 1:
        who = (
            f"{slowest.size} workers such as rank {slowest.first}, which compute "
            f"{slowest.factor:.3g} times as long"
        )
    else:
        who = f"rank {slowest.first}, which computes {slowest.factor:.3g} times as long"
    alike = simulator.point(change._replace(behaviour=ALIKE), (planner,)).best
    return (
        f"straggler-bound: {_percent(share)} of the iteration is waiting for {who}; among equal "
        f"workers it would take {alike.iteration_s * 1e3:.4g} ms"
    )


def _compute(steps: Sequence[PathStep], share: float, exposed: float) -> str:
    time_ns: Counter[str] = Counter()
    for step in steps:
        if step.kind in NAMES:
            time_ns[step.kind] += step.duration_ns
    most = max(time_ns, key=lambda kind: time_ns[kind], default="")
    of_it = f", most of it {NAMES[most]}" if most else ""
    gain = f"at most {_percent(exposed)}" if exposed >= 0.01 else "less than 1 %"
    return (
        f"compute-bound: {_percent(share)} of the iteration is computing{of_it}; a faster network "
        f"would save {gain}"
    )


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else "less than 1 %"


def layers_of(plan: Plan, ready: Iterable[Tensor], steps: Sequence[PathStep]) -> str:
    """Return the layers of most of the messages' time on a path, such as ``"layers fc6-fc7"``.

    ``ready`` are the plan's tensors in ready order. A layer is a tensor's name up to the last dot.
    """
    time_ns: Counter[int] = Counter()
    for step in steps:
        if step.message is not None:
            time_ns[step.message] += step.duration_ns
    owners = [_layer(tensor) for tensor in ready]
    names = list(dict.fromkeys(reversed(owners)))  # in forward order
    place = {name: index for index, name in enumerate(names)}
    tensors = plan.message_tensors()
    wanted_ns = MOST_OF_IT * sum(time_ns.values())
    found: set[int] = set()
    for message in sorted(time_ns, key=lambda m: (-time_ns[m], m)):
        if wanted_ns <= 0:
            break
        wanted_ns -= time_ns[message]
        found.update(place[_layer(plan.tensors[tensor])] for tensor in tensors[message])
    if len(found) in (0, len(names)):
        return "all layers"
    ranges = _ranges(sorted(found))
    said = [names[a] if a == b else f"{names[a]}-{names[b]}" for a, b in ranges]
    if len(ranges) > MOST_RANGES:
        longest = max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])
        first, last = ranges[longest]
        said = [said[longest], f"{len(found) - (last + 1 - first)} others"]
    return f"layer{'s' if len(found) > 1 else ''} {' and '.join(said)}"


def _layer(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0] or tensor.name


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as (first, last) of each run of consecutive ones."""
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        ranges.append((members[0], members[-1]))
    return ranges
