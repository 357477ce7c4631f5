"""The record of a run."""

from __future__ import annotations

import math

import msgspec
import pytest

from syncline.errors import FileError
from syncline.plan.run import Run
from tests.plan.documents import RUN, rate

BOTH: dict[str, object] = {"baseline": rate(2.0), "planned": rate(1.6)}
BOTH |= {"predicted_baseline_s": 2.2, "predicted_planned_s": 1.2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # What ran in the end is what counts: the plan, or DDP.
        ({**BOTH, "decision": "planned"}, -0.25),
        ({**BOTH, "decision": "reverted"}, 0.1),
        ({**BOTH, "decision": "ddp"}, 0.1),
        # In the long run, where it was long enough.
        ({**BOTH, "decision": "planned", "steady": rate(1.0)}, 0.2),
        ({**BOTH, "decision": "ddp", "steady": rate(1.1)}, 1.0),
        # Nothing to compare.
        ({**BOTH, "decision": "planned", "predicted_planned_s": None}, None),
        ({**BOTH, "decision": "planned", "planned": None}, None),
        ({**BOTH, "decision": "ddp", "baseline": None}, None),
    ],
)
def test_the_error_of_the_prediction(changes: dict[str, object], expected: float | None) -> None:
    error = msgspec.structs.replace(RUN, **changes).prediction_error
    assert error == (None if expected is None else pytest.approx(expected))


def test_a_run_that_diverged_can_be_read_again() -> None:
    run = msgspec.structs.replace(RUN, results={"loss": math.nan, "accuracy": 0.1})
    assert '"loss": null' in run.to_json()
    read = Run.from_json(run.to_json())
    assert math.isnan(read.results["loss"])
    assert read.results["accuracy"] == 0.1


def test_results_that_are_no_text() -> None:
    text = RUN.to_json().encode().replace(b'"results": {', b'"results": {"\xff": 1,', 1)
    with pytest.raises(FileError, match="not valid JSON"):
        Run.from_json(text)


def test_a_file_of_an_earlier_release_has_no_phases() -> None:
    fields = msgspec.json.decode(RUN.to_json())
    assert fields.pop("phases")
    assert Run.from_json(msgspec.json.encode(fields)).phases == ()


@pytest.mark.parametrize(
    ("changes", "phase", "expected"),
    [
        ({"decision": "undecided"}, "trying merge", "trying merge"),
        ({**BOTH, "decision": "planned"}, "steady", "running merge, 1.25x DDP"),
        ({**BOTH, "decision": "planned"}, "recording", "running merge, 1.25x DDP"),
        ({"decision": "planned", "baseline": None}, "steady", "running merge"),
        ({**BOTH, "decision": "reverted"}, "steady", "running DDP"),
        ({"decision": "ddp"}, "steady", "running DDP"),
    ],
)
def test_a_phase_in_words(changes: dict[str, object], phase: str, expected: str) -> None:
    assert msgspec.structs.replace(RUN, **changes).phase_text(phase) == expected
