"""What ``step_time`` measures: cells of the table, contestants, and which cells come first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from benchmarks.step_models import MODELS, profile_of
from benchmarks.step_peers import PEERS
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Operation, Profile
from syncline.plan.quantities import parse_bandwidth
from syncline.plan.recipe import Rounded

__all__ = [
    "CONTESTANTS",
    "DDP_NAMES",
    "NOMINAL_RATE",
    "OURS",
    "RATES",
    "SHARDED",
    "TARGET_CELLS",
    "TITLES",
    "WIRES",
    "WORKERS",
    "Cell",
    "planner_of",
    "table",
    "wire_of",
]

WORKERS = (2, 4, 8)
NOMINAL_RATE = "1gbit"
RATES = (NOMINAL_RATE, "10gbit")

OURS = (
    "wfbp",
    "single",
    "mgwfbp",
    "merge",
    "buckets",
    "horovod",
    "dear",
    "tictac",
    "p3",
    "bytescheduler",
    "pace",
    "overlap-bf16",
    "overlap-int8",
    "overlap-shard",
    "overlap",
)
"""Plans that run on our engine, by planner. DDP's buckets are there as torch runs them."""
WIRES: dict[str, Rounded] = {"bf16": "bfloat16", "int8": "int8"}
"""What the name of a contestant ends with where gradients travel in another type -> that type."""
SHARDED = "-shard"
"""What the name of a planner ends with where each rank updates its share."""
DDP_NAMES = ("ddp", "ddp-1mb", "ddp-5mb", "ddp-100mb")
"""DDP with each size of bucket; the first is its default."""
CONTESTANTS = (*PEERS, *OURS)
TITLES = {name: peer.title for name, peer in PEERS.items()} | {
    name: f"Syncline: {name}" for name in OURS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on so many hosts, with links of one rate."""

    model: str
    workers: int
    rate: str
    clip: bool = False
    """Whether every step clips the norm of the gradients."""
    scaled: bool = False
    """Whether every step scales the loss, too, and unscales the gradients before it clips."""
    computation_s: float | None = None
    """Of one iteration; by default in proportion to the time of sending the gradients."""
    adamw: bool = False
    """Whether AdamW updates the parameters; else nothing does."""

    @property
    def scale(self) -> float:
        """Durations of the profile are multiplied by this.

        With links ten times as fast computation takes a tenth, as their ratio decides what there is
        to gain.
        """
        if self.computation_s is not None:
            return self.computation_s / MODELS[self.model].computation_s
        return parse_bandwidth(NOMINAL_RATE) / parse_bandwidth(self.rate)

    @property
    def rate_bytes_per_s(self) -> float:
        """Of each link, in each direction."""
        return parse_bandwidth(self.rate)

    @property
    def ring_s(self) -> float:
        """Seconds of a ring all-reduce of all gradients at the full rate."""
        size_bytes = self.profile().gradient_bytes
        return 2 * (self.workers - 1) / self.workers * size_bytes / self.rate_bytes_per_s

    def profile(self, *, update_s: float = 0.0) -> Profile:
        """Return what each worker replays.

        Args:
            update_s: how long it clips, unscales and updates, which no replay emulates but a plan
                counts.
        """
        profile = profile_of(MODELS[self.model], scale=self.scale)
        last = len(profile.operations) - 1
        update = Operation(name="update", phase="update", duration_s=update_s, after=(last,))
        operations = (*profile.operations, update) if update_s else profile.operations
        norm = "2" if self.clip or self.scaled else None
        return msgspec.structs.replace(profile, operations=operations, norm=norm)

    def __str__(self) -> str:
        recipe = (", clipped" if self.clip else "") + (", scaled" if self.scaled else "")
        recipe += ", AdamW" if self.adamw else ""
        if self.computation_s is not None:
            recipe += f", computing {self.computation_s:g} s"
        return f"{MODELS[self.model].title}, {self.workers} hosts, {self.rate}{recipe}"


TARGET_CELLS = (
    Cell(model="resnet50", workers=4, rate=NOMINAL_RATE),
    Cell(model="densenet201", workers=8, rate=NOMINAL_RATE),
    Cell(model="resnet152", workers=8, rate=NOMINAL_RATE),
    Cell(model="vgg16", workers=4, rate=NOMINAL_RATE),
)
"""Those that the targets are about, quickest first."""


def table(models: list[str], workers: list[int], rates: list[str]) -> list[Cell]:
    """Return the cells to measure: those of targets first, the slower links before the faster."""
    asked = [
        Cell(model=model, workers=count, rate=rate)
        for rate, count, model in itertools.product(rates, workers, models)
    ]
    return [c for c in TARGET_CELLS if c in asked] + [c for c in asked if c not in TARGET_CELLS]


def planner_of(contestant: str) -> str:
    """Return the name of the planner of one of ours."""
    planner, _, wire = contestant.rpartition("-")
    return planner if wire in WIRES else contestant.removesuffix(SHARDED)


def wire_of(contestant: str) -> Rounded | None:
    """Return the type in which gradients travel, if not their own; also of torch's hooks."""
    return WIRES.get(contestant.rpartition("-")[2])


assert set(map(planner_of, OURS)) <= set(PLANNERS)
