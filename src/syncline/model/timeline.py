"""``Timeline``: what ran when, predicted or measured, in the same form."""

from __future__ import annotations

from typing import ClassVar, Literal

from syncline.errors import UserError
from syncline.model.document import Document, Value
from syncline.model.profile import Phase

__all__ = ["COMMUNICATION", "COMPUTE", "Span", "SpanKind", "Timeline"]

SpanKind = Phase | Literal["message"]

COMPUTE = "compute"
COMMUNICATION = "communication"


class Span(Value, frozen=True, kw_only=True):
    """One thing that ran on one lane from ``start_ns`` to ``stop_ns``."""

    lane: str
    start_ns: int
    stop_ns: int
    label: str
    kind: SpanKind
    size_bytes: int | None = None
    """Bytes of the message; None for computation."""


class Timeline(Document, frozen=True, kw_only=True):
    """Spans on an integer-nanosecond clock that starts with the iteration.

    Raises:
        UserError: on construction, if a span ends before it starts or starts before 0, or the
            iteration takes less than 0.
    """

    KIND: ClassVar[str] = "timeline"
    VERSION: ClassVar[int] = 1

    name: str
    source: Literal["predicted", "measured"]
    iteration_ns: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if self.iteration_ns < 0:
            raise UserError(f"timeline: iteration_ns is negative: {self.iteration_ns}")
        for index, span in enumerate(self.spans):
            if not 0 <= span.start_ns <= span.stop_ns:
                raise UserError(
                    f"timeline: spans[{index}] {span.label!r} runs from {span.start_ns} ns to "
                    f"{span.stop_ns} ns; a span starts at 0 or later and does not stop before it "
                    "starts"
                )

    def lanes(self) -> tuple[str, ...]:
        """Return the names of the lanes in the order in which they first appear."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))
