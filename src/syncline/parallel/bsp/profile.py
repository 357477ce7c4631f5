"""``IterationProfile``: how an iteration divides into communication and computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from syncline.measure.statistics import median

__all__ = ["IterationProfile", "profile_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationProfile:
    """An iteration on the root, from the start of its forward pass to the end of its update.

    Source: linear-pipeline, Table 2; medians in place of averages.
    """

    communication_s: float
    """For which computation waited: exchanges that it hides do not count."""
    computation_s: float
    """The rest."""

    @property
    def communication_share(self) -> float:
        """Communication over the whole iteration (the paper's %), from 0 to 1."""
        whole_s = self.communication_s + self.computation_s
        return self.communication_s / whole_s if whole_s > 0 else 0.0

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float]]) -> Self:
        """Summarise iterations, each ``(communication_s, iteration_s)``; at least one."""
        return cls(
            communication_s=median([waited for waited, _ in samples]),
            computation_s=median([whole - waited for waited, whole in samples]),
        )


def profile_table(rows: Iterable[tuple[str, IterationProfile]]) -> str:
    """Return a table as in linear-pipeline's Table 2, a line each."""
    lines = [f"{'':<16}{'comm':>12}{'compt':>12}{'%':>8}"]
    for name, row in rows:
        lines.append(
            f"{name:<16}{row.communication_s * 1e3:>9.2f} ms{row.computation_s * 1e3:>9.2f} ms"
            f"{row.communication_share * 100:>8.1f}"
        )
    return "\n".join(lines)
