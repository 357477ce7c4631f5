"""The script for a machine with 16 cores and a GPU: its plan, its figures, and its small form."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks.device_day import PARTS, Part, Settings, rows_of, run_part

from benchmarks import device_day
from tests.lab.testbed.machine import require_namespaces
from tests.programs import ran

ROOT = Path(__file__).parents[1]
SMALL_S = 1800.0  # on a machine that is busy with other tests


def test_all_parts_fit_into_nine_minutes() -> None:
    assert sum(part.budget_s for part in PARTS.values()) <= device_day.WHOLE_S
    lines = [*device_day.plan([*PARTS], small=False)]
    assert lines[-1] == "all: 535 s"
    for part in PARTS.values():
        names = [name for name, _, _ in part.steps(False)]
        assert len(set(names)) == len(names), "expected names by which steps are found again"
        assert part.steps(False)[0][1] <= part.budget_s


def test_a_run_goes_on_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def step(name: str, expected_s: float) -> device_day.Step:
        def run(_: Settings) -> list[device_day.Row]:
            ran.append(name)
            if name == "breaks" and ran.count(name) == 1:
                raise RuntimeError("no GPU")
            return [{"value": len(ran)}]

        return name, expected_s, run

    steps = [step("first", 1.0), step("breaks", 1.0), step("long", 1000.0)]
    monkeypatch.setitem(PARTS, "C", Part(lambda _: steps, "steps", 10.0))
    rows = tmp_path / "rows.jsonl"
    run_part("C", Settings(False, time.monotonic() + 100), rows)
    assert ran == ["first", "breaks"]
    said = [(row["step"], row.get("failed")) for row in rows_of("C", rows)]
    assert said[1:] == [("breaks", "RuntimeError: no GPU"), ("long", "there was no time for it")]
    assert [row["step"] for row in device_day.failures("C", rows)] == ["breaks"]
    run_part("C", Settings(False, time.monotonic() + 2000), rows)
    assert ran == ["first", "breaks", "breaks", "long"]
    assert [row["value"] for row in rows_of("C", rows)] == [1, 3, 4]


def test_the_figures_of_a_training() -> None:
    """Two rounds: speed-ups are those of the same round."""
    times = [
        {"alone": 1.0, "ddp": 2.0, "ddp-5mb": 1.8, "ddp-100mb": 2.2, "syncline": 1.0},
        {"alone": 1.0, "ddp": 4.0, "ddp-5mb": 3.6, "ddp-100mb": 4.4, "syncline": 2.0},
    ]
    lines: list[device_day.Row] = [
        {"parameters": 10, "exchange_s": 1.25, "first_s": times[0]},
        *({"round": n, "iteration_s": each, "busy": each} for n, each in enumerate(times)),
        {"record": "syncline", "decision": "planned", "predicted_s": 1.8},
    ]
    row = device_day.summed_up(lines)
    assert row["best bucket"] == "ddp-5mb"
    faster = {"as ddp": 2.0, "as the best bucket": pytest.approx(1.8)}
    assert row["times as fast"] == {"syncline": faster}
    assert row["share of the bound"]["syncline"] == pytest.approx(1.25 / 1.5)
    assert row["prediction error"] == {"syncline": pytest.approx(0.2)}
    assert "times as fast" not in device_day.summed_up(lines[:1])


@pytest.mark.slow
def test_its_small_form_runs_every_part(tmp_path: Path) -> None:
    require_namespaces()
    tool = (ROOT / "tools" / "device-day", "--small", "--out", tmp_path, "--seconds", str(SMALL_S))
    done = ran(*tool, timeout_s=2 * SMALL_S, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = device_day.read(tmp_path / "rows-small.jsonl")
    assert not [row for row in rows if "failed" in row]
    names = {(name, step) for name, part in PARTS.items() for step, _, _ in part.steps(True)}
    assert {(row["part"], row["step"]) for row in rows} == names
    record = json.loads((tmp_path / "device-day-small.json").read_text())
    assert [*record["parts"]] == [*PARTS]
    (trained,) = (row for row in rows if row["part"] == "A" and "rounds" in row)
    assert {*trained["iteration_s"]} == {*device_day.CONTESTANTS}
