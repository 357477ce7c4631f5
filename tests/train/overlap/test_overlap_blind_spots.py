"""What cannot be seen is what the documentation says, and ``synchronize`` is the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.overlap import overlap_blind_spots
from tests.train.overlap.overlap_blind_spots import BLIND, NEVER_SEEN, table
from tests.workers import WorkerPool

PAGE = Path(__file__).parents[3] / "docs" / "overlap-features.md"
BEGIN, END = "<!-- blind spots: begin -->\n", "<!-- blind spots: end -->\n"


@pytest.mark.parametrize("guard", [False, True])
def test_blind_spots(workers: WorkerPool, guard: bool) -> None:
    """Where one is found to see, the list is to be shortened."""
    for found in workers.run(overlap_blind_spots.look, 2, guard):
        assert found == {text: (not guard or text in NEVER_SEEN, True) for text in BLIND}


def test_the_page_has_them() -> None:
    """To write them: python -m tests.train.overlap.test_overlap_blind_spots"""
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:begin] + table() + page[end:])
