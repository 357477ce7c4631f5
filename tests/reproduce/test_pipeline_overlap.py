"""``pipeline_overlap`` puts what was measured beside what linear-pipeline prints."""

from __future__ import annotations

import json
import statistics

import pytest
from reproduce.common import load, tidy
from reproduce.pipeline_overlap import MEASURED, NAME, compute


def test_costs_are_those_of_section_3_3() -> None:
    result = compute()
    assert tidy(result) == load(NAME)  # else run `make reproduce` again
    medians = {
        (row["algorithm"], row["forward"] > 0): statistics.median(row["rounds_s"])
        for row in json.loads(MEASURED.read_text())["measured"]
        if row["forward"] == row["backward"]
    }
    computing_s = medians[None, True]
    for number, found in result["algorithms"].items():
        assert found["iteration_s"] == medians[number, True]
        parts_s = (medians[number, False], computing_s)
        printed_s = max(parts_s) if number == 1 else sum(parts_s)
        assert found["printed_s"] == pytest.approx(printed_s)
    assert result["longer_backward"]["iteration_s"] > result["algorithms"][1]["iteration_s"]
