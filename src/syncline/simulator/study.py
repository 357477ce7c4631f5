"""A whole what-if: points, crossings, and what limits one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.whatif import Point, WhatIf
from syncline.simulator.bottleneck import bottleneck
from syncline.simulator.crossings import crossings
from syncline.simulator.whatif import Change, WhatIfSimulator

__all__ = ["chosen_index", "study"]


def study(
    simulator: WhatIfSimulator,
    points: Sequence[Change],
    *,
    model: str,
    chosen: int | None = None,
    notes: Iterable[str] = (),
    track: Callable[[Sequence[Change]], Iterable[Change]] = iter,
) -> WhatIf:
    """Simulate a sweep.

    Args:
        simulator: what to simulate with.
        points: the sweep, at least one point.
        model: name of what is trained.
        chosen: index of the point of which to say what limits it; None: the first of those with the
            most workers.
        notes: what else to say of the figures.
        track: told of the points, so that it can show how far the sweep is.

    Raises:
        UserError: a point is impossible, or there is no point of that index.
    """
    if chosen is not None and not 0 <= chosen < len(points):
        raise UserError(
            f"there is no point {chosen + 1}; the sweep has {len(points)} "
            f"point{'' if len(points) == 1 else 's'}, numbered from 1"
        )
    made = tuple(simulator.sweep(track(points)))
    index = chosen_index(made) if chosen is None else chosen
    return WhatIf(
        model=model,
        network=simulator.network.name,
        points=made,
        crossings=crossings(made),
        bottleneck=bottleneck(
            simulator, points[index], made[index], index, made[index].best.planner
        ),
        notes=(*notes, *_left_out(points, simulator.network)),
    )


def chosen_index(points: Sequence[Point]) -> int:
    """Return the first of the points with the most workers."""
    return max(range(len(points)), key=lambda index: (points[index].setting.workers, -index))


def _left_out(points: Iterable[Change], network: Network) -> Iterable[str]:
    """Yield what the figures do not count."""
    points = list(points)
    if any(change.wire is not None for change in points):
        yield (
            "Converting gradients to and from the type in which they travel is not charged, nor is "
            "what the sum loses in it."
        )
    sparse = network.density is not None or any(change.density is not None for change in points)
    if sparse and network.sparse is None:
        yield "Selecting and merging the elements of a sparse exchange is not charged."
    if any(change.compute_scale != 1 for change in points):
        yield "A compute scale leaves reading, copying and the host's launching as they are."
