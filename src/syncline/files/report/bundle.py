"""``Bundle``: what a report directory holds, and how it is read and written."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from syncline.errors import FileError, UserError, quoted
from syncline.plan.document import Document
from syncline.plan.files import require_own_folder
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.plan.run import Run
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import WhatIf

DOCUMENTS: dict[str, tuple[str, type[Document]]] = {
    "run": ("run.json", Run),
    "profile": ("profile.json", Profile),
    "network": ("network.json", Network),
    "plan": ("plan.json", Plan),
    "comparison": ("comparison.json", Comparison),
    "what_if": ("what-if.json", WhatIf),
    "timeline_predicted": ("timeline-predicted.json", Timeline),
    "timeline_measured": ("timeline-measured.json", Timeline),
}
"""Field of the bundle -> its file and noun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one run, or one simulation, leaves behind; at least one part is required."""

    run: Run | None = None
    profile: Profile | None = None
    network: Network | None = None
    plan: Plan | None = None
    comparison: Comparison | None = None
    what_if: WhatIf | None = None
    timeline_predicted: Timeline | None = None
    timeline_measured: Timeline | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise UserError("report: nothing to report on; give at least one of its parts")
        for source in ("predicted", "measured"):
            timeline = getattr(self, f"timeline_{source}")
            if timeline is not None and timeline.source != source:
                raise UserError(
                    f"report: expected a {source} timeline as timeline_{source}, "
                    f"{quoted(timeline.name)} says that it is {timeline.source}"
                )

    def timelines(self) -> tuple[Timeline, ...]:
        """Return the timelines of this bundle, the predicted one first."""
        both = (self.timeline_predicted, self.timeline_measured)
        return tuple(timeline for timeline in both if timeline is not None)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Bundle:
        """Read the files of a report directory."""
        folder = Path(directory)
        parts = {
            field: noun.load(folder / name)
            for field, (name, noun) in DOCUMENTS.items()
            # lexists, so that a dangling link is an error and not a missing file
            if os.path.lexists(folder / name)
        }
        if not parts:
            names = ", ".join(name for name, _ in DOCUMENTS.values())
            problem = "holds none of" if folder.is_dir() else "is no directory; expected one with"
            raise FileError(
                f"{folder}: {problem} {names}; 'syncline train' and save_report() write them"
            )
        try:
            return cls(**parts)  # type: ignore[arg-type]  # DOCUMENTS pairs each field with its noun
        except UserError as error:
            raise FileError(f"{folder}: {error}") from None

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the parts; the directory is created if need be.

        A file of an earlier report that this one does not replace is renamed to ``*.old``, so that
        a later :meth:`load` does not mix two runs.
        """
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            require_own_folder(folder)
            for field, (name, _) in DOCUMENTS.items():
                if getattr(self, field) is None and (folder / name).exists():
                    (folder / name).replace(folder / f"{name}.old")
        except OSError as error:
            raise FileError(f"{folder}: cannot be written: {error.strerror}") from None
        for field, (name, _) in DOCUMENTS.items():
            document = getattr(self, field)
            if document is not None:
                document.save(folder / name)
