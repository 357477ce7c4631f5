"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.workers import WorkerPool

# How long an example takes says how busy the machine is.
settings.register_profile("syncline", deadline=None)
settings.load_profile("syncline")


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """A pool of worker processes; see :class:`tests.workers.WorkerPool`."""
    pool = WorkerPool()
    yield pool
    pool.close()
