"""Everything that users do with training ends with DDP's bits, and as its row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import first_few
from tests.train.overlap import overlap_jobs
from tests.train.overlap.features import GROUPS, features, table
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import STEPS
from tests.workers import WorkerPool

PAGE = Path(__file__).parents[3] / "docs" / "overlap-features.md"
BEGIN, END = "<!-- rows: begin -->\n", "<!-- rows: end -->\n"
AT_ONCE = 6
"""Rows that one job runs."""
HELD = 0.0
SHORT = 13
"""Steps under other plans. Every script has done what it does at some step by the twelfth."""
OTHERS = [
    (Style(aligned=True, piece_elements=60, in_flight=1), 0.5),
    (Style(decoupled=True, order="7", piece_elements=77, in_flight=3), 0.3),
    (Style(aligned=True, order="ready", piece_elements=30, in_flight=4), 0.9),
]
"""Plans, and what part of their messages lands before ``backward`` ends."""


def chunks(group: str) -> list[list[str]]:
    rows = [row.text for row in features().values() if row.group == group]
    return [rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE)]


ALL = [chunk for group in GROUPS for chunk in chunks(group)]
NUMBERS = sorted(range(len(ALL)), key=lambda number: "compile" in " ".join(ALL[number]))
ROUNDED = first_few(
    [
        [
            "`clip_grad_norm_`",
            "gradient accumulation without `no_sync`",
            "unused parameters, other ones on every rank (`find_unused_parameters=True`)",
            "a language model's script (nanoGPT): `require_backward_grad_sync`, clipping, "
            "`GradScaler`, decay for matrices only, shared embedding",
        ],
        [
            "gradient accumulation under `no_sync`",
            "`static_graph=True`, shared and tied parameters",
            "two optimizers on one model, stepped in turns",
            "reinforcement learning (PPO): rollouts without gradients, several backward passes and "
            "steps for each, clipping",
        ],
    ]
)
FEW = 14
"""How many of these run with every change under other plans: none that compiles."""


@pytest.mark.parametrize("rows", first_few(ALL), ids=lambda rows: rows[0])
def test_bits_are_those_of_stock_ddp(workers: WorkerPool, rows: list[str]) -> None:
    """With every message on its way when ``step`` is called."""
    for results in workers.run(overlap_jobs.beside_stock, 2, rows, Style(), HELD):
        assert {row: r["differences"] for row, r in zip(rows, results, strict=True)} == {
            row: [] for row in rows
        }
        assert {row: r["happened"] for row, r in zip(rows, results, strict=True)} == {
            row: features()[row].happens for row in rows
        }


@pytest.mark.parametrize("number", first_few(NUMBERS, FEW), ids=lambda number: ALL[number][0])
def test_bits_under_other_plans(workers: WorkerPool, number: int) -> None:
    """With some messages there and some not, in other pieces and other orders; on our backend."""
    rows, (style, let_through) = ALL[number], OTHERS[number % len(OTHERS)]
    job = overlap_jobs.beside_stock
    for results in workers.run(job, 2, rows, style, let_through, SHORT, backend="syncline"):
        assert {row: r["differences"] for row, r in zip(rows, results, strict=True)} == {
            row: [] for row in rows
        }


@pytest.mark.parametrize(
    ("style", "let_through"),
    [
        (Style(wire="bfloat16"), HELD),
        (Style(wire="float16", decoupled=True, order="7", piece_elements=77, in_flight=3), 0.3),
    ],
    ids=["bfloat16", "float16, decoupled"],
)
@pytest.mark.parametrize("rows", ROUNDED, ids=lambda rows: rows[0])
def test_bits_in_16_bits_are_those_of_a_hook(
    workers: WorkerPool, rows: list[str], style: Style, let_through: float
) -> None:
    """On our backend two ranks add up exactly alike, whole or decoupled."""
    job, steps = overlap_jobs.beside_stock, STEPS if let_through == HELD else SHORT
    for results in workers.run(job, 2, rows, style, let_through, steps, backend="syncline"):
        assert {row: r["differences"] for row, r in zip(rows, results, strict=True)} == {
            row: [] for row in rows
        }
        if let_through == HELD:
            assert {row: r["happened"] for row, r in zip(rows, results, strict=True)} == {
                row: features()[row].happens for row in rows
            }


def test_bits_with_the_guard(workers: WorkerPool) -> None:
    """Of rows that go through every way of the guard; all were tried."""
    rows = [
        "Adam, foreach",
        "`p.grad` read after `step`, every tenth step",
        "gradient accumulation without `no_sync`",
        "parameters read in every way after `step`",
        "hooks on parameters and on accumulated gradients",
        "the gradients of the last step kept, and read after the next",
        "the model exported, traced or scripted in between",
    ]
    for results in workers.run(overlap_jobs.guarded_beside_stock, 2, rows, HELD):
        assert [r["differences"] for r in results] == [[]] * (len(rows) + 1)
        assert [r["happened"] for r in results[:-1]] == [features()[row].happens for row in rows]


def test_the_page_has_the_rows() -> None:
    """To write them: python -m tests.train.overlap.test_overlap_features"""
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:begin] + table() + page[end:])
