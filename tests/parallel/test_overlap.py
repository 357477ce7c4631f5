"""Every feature beside stock DDP, bit for bit; and the table of what overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import overlap_jobs
from tests.parallel.features import features, table
from tests.parallel.overlap_plans import Style
from tests.workers import WorkerPool

TABLE = Path(__file__).parents[2] / "docs" / "overlap-features.md"
STYLES = {
    "held": (Style(), 0.0),
    "some landed": (Style(aligned=True, piece_elements=60, in_flight=1), 0.5),
    "halves": (Style(halves=True, order="7", piece_elements=77, in_flight=3), 0.3),
}
"""Plans, and the part of their messages that lands before backward ends."""


@pytest.mark.parametrize("row", features())
def test_bits_agree_with_stock_ddp_and_the_table_is_right(workers: WorkerPool, row: str) -> None:
    for name, (style, let_through) in STYLES.items():
        for results in workers.run(overlap_jobs.beside_stock, 2, [row], style, let_through):
            (result,) = results
            assert result["differences"] == [], name
            if not let_through:
                assert result["happened"] == features()[row].happens


def test_the_table_in_the_documentation_is_generated() -> None:
    assert table() in TABLE.read_text(), f"write tests.parallel.features.table() into {TABLE.name}"
