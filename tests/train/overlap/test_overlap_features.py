"""Everything that users do with training ends with DDP's bits, and as its row says.

What cannot be seen is what the documentation says, and ``synchronize`` is the cure.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import first_few
from tests.train.overlap import overlap_blind_spots as blind_spots
from tests.train.overlap import overlap_jobs
from tests.train.overlap.features import GROUPS, features, section, table, write_section
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import STEPS, SYNCHRONOUS
from tests.workers import WorkerPool

AT_ONCE = 6  # rows that one job runs
HELD = 0.0
SHORT = 13
"""Steps under other plans. Every script has done what it does at some step by the twelfth."""
OTHERS = [
    (Style(aligned=True, piece_elements=60, in_flight=1), 0.5),
    (Style(decoupled=True, order="7", piece_elements=77, in_flight=3), 0.3),
    (Style(aligned=True, order="ready", piece_elements=30, in_flight=4), 0.9),
]  # plans, and what part of their messages lands before ``backward`` ends


def chunks(rows: list[str]) -> list[list[str]]:
    return [rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE)]


def require_same(rows: list[str], results: list[dict[str, Any]], *, happens: bool = False) -> None:
    """Check that training ended with DDP's bits, and that what happened is as rows say."""
    found = dict(zip(rows, results, strict=True))
    assert {row: r.get("differences") for row, r in found.items()} == {row: [] for row in rows}
    if happens:
        expected = {row: features()[row].happens for row in rows}
        assert {row: r["happened"] for row, r in found.items()} == expected


ALL = [chunk for rows in GROUPS.values() for chunk in chunks([*rows])]
WAITING = [row for row, loop in features().items() if loop.happens == SYNCHRONOUS]
"""Rows whose steps wait for all messages: under other plans only every fourth runs."""
SOME = chunks([row for row in features() if row not in WAITING or row in WAITING[::4]])
NUMBERS = sorted(range(len(SOME)), key=lambda number: "compile" in " ".join(SOME[number]))
ROUNDED = first_few(
    [
        [
            "`clip_grad_norm_`",
            "gradients of several dtypes",
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
FEW = 10  # how many of these run with every change under other plans: none that compiles


@pytest.mark.parametrize("rows", first_few(ALL), ids=lambda rows: rows[0])
def test_bits_are_those_of_ddp(workers: WorkerPool, rows: list[str]) -> None:
    """With every message on its way when ``step`` is called."""
    for results in workers.run(overlap_jobs.beside_ddp, 2, rows, Style(), HELD):
        require_same(rows, results, happens=True)


@pytest.mark.parametrize("number", first_few(NUMBERS, FEW), ids=lambda number: SOME[number][0])
def test_bits_under_other_plans(workers: WorkerPool, number: int) -> None:
    """With some messages there and some not, in other pieces and other orders; on our backend."""
    rows, (style, let_through) = SOME[number], OTHERS[number % len(OTHERS)]
    job = overlap_jobs.beside_ddp
    for results in workers.run(job, 2, rows, style, let_through, SHORT, backend="syncline"):
        require_same(rows, results)


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
    job, steps = overlap_jobs.beside_ddp, STEPS if let_through == HELD else SHORT
    for results in workers.run(job, 2, rows, style, let_through, steps, backend="syncline"):
        require_same(rows, results, happens=let_through == HELD)


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
    for results in workers.run(overlap_jobs.guarded_beside_ddp, 2, rows, HELD):
        assert results[-1]["differences"] == []
        require_same(rows, results[:-1], happens=True)


@pytest.mark.parametrize("guard", [False, True])
def test_blind_spots(workers: WorkerPool, guard: bool) -> None:
    """Where one is found to see, the list is to be shortened."""
    for found in workers.run(blind_spots.look, 2, guard):
        assert found == {
            text: (not guard or text in blind_spots.NEVER_SEEN, True) for text in blind_spots.BLIND
        }


SECTIONS = {"rows": table, "blind spots": blind_spots.table}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_them(name: str) -> None:
    """To write them: python -m tests.train.overlap.test_overlap_features"""
    assert section(name) == SECTIONS[name]()


if __name__ == "__main__":
    for name, text_of in SECTIONS.items():
        write_section(name, text_of())
