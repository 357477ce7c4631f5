"""What-if options: lists of values, and the points that they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.progress import MofNCompleteColumn

from syncline.cli.networks import algorithm_named, density_of
from syncline.cli.progress import LateBar
from syncline.errors import UserError, unknown
from syncline.plan.collective_costs import SERVER_ALGORITHMS
from syncline.plan.quantities import (
    BYTES_PER_ELEMENT,
    LARGEST_JOBS,
    LARGEST_WORKERS,
    parse_bandwidth,
    parse_duration,
    parse_workers,
    require_count,
)
from syncline.plan.simulator.strategy import STRATEGIES, strategy_named
from syncline.plan.simulator.whatif import MOST_POINTS, Change, changes
from syncline.plan.simulator.workers import Workers, parse_stragglers

WIRES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LARGEST_DEVIATION = 2.0
MOST_BATCHES = 10_000  # micro-batches of one update
T = TypeVar("T")
Asked = Mapping[str, str | None]  # parameter -> what-if option as it was given; None: not given


def is_plain(asked: Asked) -> bool:
    """Return whether at most one worker count and one algorithm are asked for, and nothing else."""
    given = {name for name, text in asked.items() if text is not None}
    single = len(worker_counts(asked)) < 2 and len(algorithms(asked)) < 2
    return given <= {"workers", "algorithm"} and single


def worker_counts(asked: Asked) -> tuple[int, ...]:
    """Return the worker counts asked for."""
    text = asked.get("workers")
    return () if text is None else parse_workers(text)


def algorithms(asked: Asked) -> list[str]:
    """Return the algorithms asked for, by their full names."""
    return _values(asked, "algorithm", algorithm_named, "ring,double-tree")


def points_of(asked: Asked, own_workers: int) -> list[Change]:
    """Return the points of the sweep; ``own_workers`` is the network's own worker count."""
    named = asked.get("strategy")
    if named != "all" and "all" in (named or "").split(","):
        raise UserError("--strategy all stands alone; leave the other names out")
    strategies = list(STRATEGIES.values())
    if named != "all":
        strategies = _values(asked, "strategy", strategy_named, "caffe-mpi,pytorch")
    served = [s.name for s in strategies if s.exchange == "parameter-server"]
    others = [a for a in algorithms(asked) if a not in SERVER_ALGORITHMS]
    if served and (others or asked.get("density")):
        raise UserError(
            f"--strategy {served[0]} pushes and pulls over the server's link, so --algorithm "
            "and --density would do nothing; leave them or that strategy out"
        )
    fixed_shares = _values(asked, "batch_fixed", _number, "0,0.1")
    if fixed_shares and asked.get("batch") is None:
        raise UserError("--batch-fixed says how a batch of another size computes; give --batch too")
    micro_batches = partial(_count, "micro-batches to accumulate", MOST_BATCHES)
    return changes(
        workers=worker_counts(asked),
        bandwidth_bytes_per_s=_values(asked, "bandwidth", parse_bandwidth, "1gbit,10gbit"),
        latency_s=_values(asked, "latency", parse_duration, "5us,20us"),
        algorithms=algorithms(asked),
        densities=_values(asked, "density", _density, "none,0.001"),
        jobs=_values(asked, "jobs", partial(_count, "jobs", LARGEST_JOBS), "1,2"),
        wire=_values(asked, "wire", _wire, "fp32,bf16"),
        compute_scale=_values(asked, "compute_scale", _number, "1,0.5"),
        batch=_values(asked, "batch", _number, "1,2"),
        batch_fixed=fixed_shares,
        accumulate=_values(asked, "accumulate", micro_batches, "1,4"),
        behaviour=_behaviours(asked, own_workers),
        strategy=strategies,
    )


def measured_iterations(text: str) -> dict[int, float]:
    """Read ``--calibrate``: seconds of an iteration by number of workers."""

    def read(part: str) -> tuple[int, float]:
        count, _, duration = part.partition("=")
        workers, seconds = _count("workers", LARGEST_WORKERS, count), parse_duration(duration)
        if seconds <= 0:
            raise UserError(f"an iteration's time must be above 0 s, found {duration}")
        return workers, seconds

    found = _values({"calibrate": text}, "calibrate", read, "8=350ms,16=410ms")
    if len(dict(found)) < len(found):
        raise UserError("--calibrate names a number of workers twice; name it once")
    return dict(found)


def _behaviours(asked: Asked, own_workers: int) -> list[Workers]:
    stragglers = _values(asked, "straggler", _stragglers, "none,1.2@3")
    spreads = _values(asked, "spread", _deviation, "0,0.1")
    jitters = _values(asked, "jitter", _deviation, "0,0.05")
    seeds = _values(asked, "seed", _seed, "0,1")
    if seeds and not any((*spreads, *jitters)):
        raise UserError(
            "--seed has nothing to draw; give --spread 0.1 or --jitter 0.05 with it, or leave it "
            "out"
        )
    fewest_workers = min(worker_counts(asked), default=own_workers)
    rank = max((rank for pairs in stragglers for rank, _ in pairs), default=0)
    if rank >= fewest_workers:
        raise UserError(
            f"--straggler names rank {rank}, but of {fewest_workers} workers the ranks are 0 to "
            f"{fewest_workers - 1}; name a lower rank, such as 1.2@0, or more --workers"
        )
    if math.prod(len(v) or 1 for v in (stragglers, spreads, jitters, seeds)) > MOST_POINTS:
        raise UserError(
            "--straggler, --spread, --jitter and --seed stand for more than "
            f"{MOST_POINTS} combinations; shorten a list"
        )
    return [
        Workers(stragglers=pairs, spread=spread, jitter=jitter, seed=seed)
        for pairs, spread, jitter, seed in itertools.product(
            stragglers or [()], spreads or [0.0], jitters or [0.0], seeds or [0]
        )
    ]


def _values(asked: Asked, name: str, read: Callable[[str], T], example: str) -> list[T]:
    """Read the list of an option; every error names the option and shows an example."""
    text, option = asked.get(name), f"--{name.replace('_', '-')}"
    if text is None:
        return []
    made: list[T] = []
    for part in map(str.strip, text.split(",")):
        try:
            value = read(part)
        except ValueError as error:  # UserErrors too
            reason = str(error) if isinstance(error, UserError) else f"cannot read {part!r}"
            raise UserError(f"{option}: {reason}; an example: {option} {example}") from None
        if value in made:
            raise UserError(f"{option}: {part!r} is named twice; name it once")
        made.append(value)
        if len(made) > MOST_POINTS:
            raise UserError(f"{option}: more than {MOST_POINTS} values; shorten the list")
    return made


def _wire(text: str) -> str:
    name = WIRES.get(text, text)
    if name not in BYTES_PER_ELEMENT:
        raise UserError(unknown("type", text, [*WIRES, "int8"], also=BYTES_PER_ELEMENT))
    return name


def _density(text: str) -> float | None:
    return None if text == "none" else density_of(text)


def _count(what: str, most: int, text: str) -> int:
    count = int(text)
    require_count(what, count, most)
    return count


def _stragglers(text: str) -> tuple[tuple[int, float], ...]:
    return () if text == "none" else parse_stragglers(text.replace("+", ","))


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _deviation(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= LARGEST_DEVIATION:
        raise UserError(f"a deviation must be between 0 and {LARGEST_DEVIATION:g}, found {text}")
    return value


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 1 << 64:
        raise UserError(f"a seed must be at least 0 and below 2^64, found {text}")
    return seed


def tracked(items: Sequence[T]) -> Iterator[T]:
    """Yield the items, with a bar on a terminal's standard error once it takes over two seconds."""
    with LateBar("simulating", MofNCompleteColumn()) as bar:
        for done, item in enumerate(items):
            bar(done, len(items))
            yield item
