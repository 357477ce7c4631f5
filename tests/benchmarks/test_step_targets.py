"""What ``benchmarks.step_time`` says of its targets, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from benchmarks.step_cells import TARGET_CELLS, Cell, table
from benchmarks.step_results import Forecast, Measured, Results, Turn, load, save
from benchmarks.step_targets import verdicts

from syncline.errors import FileError
from syncline.plan.network import Network

RESNET50, DENSENET201, _, VGG16 = TARGET_CELLS


def cell_of(
    times_s: Mapping[str, Sequence[float]],
    cell: Cell = RESNET50,
    *,
    computation_s: float = 1.2,
    all_reduce_s: Sequence[float] = (1.25, 1.3, 1.4),
    predicted_s: Mapping[str, float] | None = None,
    busy: float | None = None,
) -> Measured:
    measured = Measured(
        model=cell.model,
        workers=cell.workers,
        rate=cell.rate,
        date="2026-01-01",
        iterations=2,
        warmup=2,
        computation_s=computation_s,
        all_reduce_s=tuple(all_reduce_s),
        network=Network.line(workers=cell.workers, a_s=1e-3, b_s_per_byte=1e-8),
        forecasts={
            name: Forecast(messages=1, iteration_s=s, communication_s=1.0, lower_bound_s=1.0)
            for name, s in (predicted_s or {}).items()
        },
    )
    for name, values in times_s.items():
        for number, value in enumerate(values):
            measured = measured.with_turn(name, turn_of(number, value, busy))
    return measured


def turn_of(number: int, iteration_s: float, busy: float | None = None) -> Turn:
    return Turn(
        round=number,
        iteration_s=iteration_s,
        settled_s=iteration_s,
        idle_s=0.0,
        steps_s=(iteration_s,),
        wall_s=iteration_s,
        busy=busy,
    )


def results_of(*cells: Measured) -> Results:
    results = Results()
    for cell in cells:
        results = results.with_cell(cell)
    return results


def test_nothing_is_met_before_it_is_measured() -> None:
    assert {(v.met, v.word) for v in verdicts(Results())} == {(None, "not measured")}


DEFAULT, BEST = "1.30x as fast as DDP's default", "DDP's best bucket size"
PREDICTED = "within 10% of its prediction"
BUCKETS = {"ddp": [2.0], "ddp-1mb": [3.0], "ddp-5mb": [1.9], "overlap": [1.5]}
ALL_BUCKETS = cell_of({**BUCKETS, "ddp-100mb": [1.8]})
SLOWER = cell_of({"ddp": [1.0, 1.0, 1.0, 1.0], "overlap": [1.1, 1.11, 1.1, 1.12]})
NOISY = cell_of({"ddp": [1.0, 1.3, 0.9, 1.0], "overlap": [1.1, 1.0, 1.2, 1.0]}, VGG16)
FASTER = cell_of({"ddp": [1.0], "overlap": [0.9]}, DENSENET201)
UNKNOWN = cell_of({"ddp": [1.0]}, Cell(model="lstm", workers=2, rate="10gbit"))
PLANS = cell_of(
    # torch's own DDP is not one of our plans.
    {"wfbp": [1.0], "single": [1.08], "ddp": [9.0]},
    predicted_s={"wfbp": 0.97, "single": 1.0, "ddp": 1.0, "merge": 1.0},
)
SATURATED = cell_of({"wfbp": [1.0]}, DENSENET201, predicted_s={"wfbp": 0.8}, busy=0.93)
CORES = "; the cores were the limit of 1, worst 20.0%"
LINKED = cell_of({"wfbp": [1.0]}, predicted_s={"wfbp": 0.97}, busy=0.77)


@pytest.mark.parametrize(
    ("cells", "target", "met", "measured"),
    [
        # In the second round everything took twice as long, which changes no ratio.
        ([cell_of({"ddp": [2, 4, 2], "overlap": [1.53, 3.06, 1.53]})], DEFAULT, True, "1.307 ("),
        ([cell_of({"ddp": [2, 4, 2], "overlap": [1.55, 3.1, 1.55]})], DEFAULT, False, "1.290 ("),
        ([cell_of(BUCKETS)], BEST, None, "-"),
        ([ALL_BUCKETS], BEST, True, "1.200 (1.200 .. 1.200)x over ddp-100mb"),
        ([cell_of({"overlap": [1.42]})], "within 1.10 of the bound", True, "1.092 ("),
        ([cell_of({"overlap": [1.44]})], "within 1.10 of the bound", False, "1.108 ("),
        ([cell_of({"overlap": [1.36]})], "within 1.05 of the bound", True, "1.046 ("),
        ([cell_of({"overlap": [1.42]})], "within 1.05 of the bound", False, "1.092 ("),
        ([NOISY, FASTER, UNKNOWN], "no cell where", True, "0 of 2 cells"),
        ([SLOWER, FASTER], "no cell where", False, f"1 of 2 cells; {RESNET50}: "),
        ([PLANS], PREDICTED, True, "2 of 2; median 5.2%, worst 7.4% (single, "),
        ([PLANS], "within 5% of its prediction", False, "1 of 2; "),
        ([LINKED], PREDICTED, True, "1 of 1; "),
        ([SATURATED, LINKED], PREDICTED, False, "1 of 2; median 11.5%, worst 20.0%"),
    ],
)
def test_verdicts(cells: list[Measured], target: str, met: bool | None, measured: str) -> None:
    (found,) = [v for v in verdicts(results_of(*cells)) if target in v.target]
    assert found.met is met
    assert found.measured.startswith(measured)
    assert (CORES in found.measured) == (SATURATED in cells)


def test_rounds_are_paired_by_number() -> None:
    measured = cell_of({"ddp": [2.0, 4.0, 6.0], "overlap": [1.0, 1.0]})
    assert measured.speed_ups("overlap", "ddp") == [2.0, 4.0]
    assert measured.speed_ups("overlap", "single") == []


def test_the_bound_is_of_compute_and_a_whole_all_reduce() -> None:
    assert cell_of({}).bound_s == 1.3
    assert cell_of({}, computation_s=2.0).bound_s == 2.0


def test_errors_are_of_plans_that_were_measured() -> None:
    assert PLANS.prediction_error("merge") is None
    assert PLANS.prediction_error("wfbp") == pytest.approx(-0.03)


def test_results_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "step_time.json"
    assert load(path) == Results()
    measured = cell_of({"ddp": [1.0, 2.0]}, predicted_s={"ddp": 1.0}, busy=0.5).with_failure(
        "fsdp2", "why"
    )
    save(path, results_of(measured), "the command")
    found = load(path)
    assert found.cells == (measured,)
    assert found.command == "the command"
    assert found.machine["cores"] >= 1


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_time.json"
    path.write_text('{"cells": 3}')
    with pytest.raises(FileError, match="begin anew with --fresh"):
        load(path)
    path.write_text('{"form": 99}')
    with pytest.raises(FileError, match="results of form 99"):
        load(path)


def test_a_cell_keeps_its_place_when_it_is_measured_further() -> None:
    first, second = cell_of({"ddp": [1.0]}), cell_of({"ddp": [2.0]}, VGG16)
    again = cell_of({"ddp": [1.0], "overlap": [1.0]})
    assert results_of(first, second, again).cells == (again, second)


def test_cells_of_targets_come_first() -> None:
    cells = table(["lstm", "vgg16", "resnet50"], [2, 4], ["1gbit", "10gbit"])
    assert cells[:2] == [RESNET50, VGG16]
    assert len(cells) == len(set(cells)) == 12
    assert [c.rate for c in cells] == ["1gbit"] * 6 + ["10gbit"] * 6


def test_computation_is_scaled_with_the_rate() -> None:
    slow, fast = (Cell(model="lstm", workers=4, rate=rate) for rate in ("1gbit", "10gbit"))
    assert fast.profile().computation_s == pytest.approx(slow.profile().computation_s / 10)
    assert fast.ring_s == pytest.approx(slow.ring_s / 10)
    assert RESNET50.ring_s == pytest.approx(1.5 * 25_557_032 * 4 * 8 / 1e9)
