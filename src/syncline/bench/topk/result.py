"""``Selections``: what selecting took, by contestant, size and density."""

from __future__ import annotations

from statistics import median
from typing import ClassVar

from syncline.errors import UserError, quoted
from syncline.model.document import Document, Value

__all__ = ["FUSED", "READ", "SELECT", "TORCH", "TORCH_FUSED", "Selections", "Timed"]

SELECT = "select"
"""The k largest of a vector."""
FUSED = "fused"
"""The check for NaN, the gradient added to the residual, and the k largest taken out of it."""
TORCH = "torch"
"""``torch.topk`` of the magnitudes."""
TORCH_FUSED = "torch-fused"
"""What ``fused`` does, in operations of torch."""
READ = "read"
"""One read of the vector: torch's sum."""


class Timed(Value, frozen=True, kw_only=True):
    """What one contestant took."""

    contestant: str
    elements: int
    density: float
    """0 where it selects nothing."""
    rounds_s: tuple[float, ...]
    """In each round: seconds of one call, all contestants having a turn."""

    def __post_init__(self) -> None:
        if not self.rounds_s or min(self.rounds_s) <= 0:
            raise UserError(
                f"selection by {quoted(self.contestant)} of {self.elements} elements: expected "
                f"times above 0 s, found {self.rounds_s}"
            )

    @property
    def time_s(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_s)


class Selections(Document, frozen=True, kw_only=True):
    """What a benchmark of selection measured, on one core or on a GPU."""

    KIND: ClassVar[str] = "selections"
    VERSION: ClassVar[int] = 1

    machine: str
    versions: dict[str, str]
    instructions: str
    """The vector instructions that were used, on the CPU."""
    device: str = "cpu"
    """That, or the name of a GPU."""
    entries: tuple[Timed, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise UserError("benchmark of selection: no entries")
        if len({len(entry.rounds_s) for entry in self.entries}) > 1:
            raise UserError(
                "benchmark of selection: entries were measured in different numbers of rounds"
            )

    @property
    def place(self) -> str:
        """What selected."""
        return f"one core, {self.instructions}" if self.device == "cpu" else self.device

    def of(self, contestant: str, elements: int, density: float) -> Timed | None:
        """Return one entry, or None if that was not measured."""
        wanted = contestant, elements, 0.0 if contestant == READ else density
        return next(
            (e for e in self.entries if (e.contestant, e.elements, e.density) == wanted), None
        )

    def times_faster(self, contestant: str, other: str, elements: int, density: float) -> float:
        """Return the median over the rounds of the ratio: both had a turn in every round.

        Raises:
            UserError: one of them was not measured.
        """
        a, b = (self.of(name, elements, density) for name in (contestant, other))
        if a is None or b is None:
            raise UserError(
                f"{quoted(contestant)} and {quoted(other)} were not both measured at {elements} "
                f"elements and density {density}"
            )
        return median(y / x for x, y in zip(a.rounds_s, b.rounds_s, strict=True))

    @property
    def cases(self) -> tuple[tuple[int, float], ...]:
        """Elements and density of everything measured, in the order of the entries."""
        return tuple(dict.fromkeys((e.elements, e.density) for e in self.entries if e.density))
