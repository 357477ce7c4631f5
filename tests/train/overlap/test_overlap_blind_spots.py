"""What cannot be seen is what the documentation says, and ``synchronize`` is the cure."""

from __future__ import annotations

import pytest

from tests.train.overlap import overlap_blind_spots
from tests.train.overlap.features import section, write_section
from tests.train.overlap.overlap_blind_spots import BLIND, NEVER_SEEN, table
from tests.workers import WorkerPool


@pytest.mark.parametrize("guard", [False, True])
def test_blind_spots(workers: WorkerPool, guard: bool) -> None:
    """Where one is found to see, the list is to be shortened."""
    for found in workers.run(overlap_blind_spots.look, 2, guard):
        assert found == {text: (not guard or text in NEVER_SEEN, True) for text in BLIND}


def test_the_page_has_them() -> None:
    """To write them: python -m tests.train.overlap.test_overlap_blind_spots"""
    assert section("blind spots") == table()


if __name__ == "__main__":
    write_section("blind spots", table())
