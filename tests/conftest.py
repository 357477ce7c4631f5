"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """A pool of worker processes; see :class:`tests.workers.WorkerPool`."""
    pool = WorkerPool()
    yield pool
    pool.close()
