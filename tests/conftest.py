"""Fixtures for all tests."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.mortal import Mortals
from tests.workers import WorkerPool

# Before anything imports Triton, which looks when it defines its own functions.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes says how busy the machine is. A change is judged by the same examples
# every time; "random" looks for others, as often as one likes.
settings.register_profile("small", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("large", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("random", deadline=None)
settings.load_profile("small")

# Whoever starts the tests with nohup, or by "&" in a script, has these ignored, and so would have
# every program that the tests start and interrupt.
for ignored, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, handler)


def pytest_collection_finish() -> None:
    """Do not look for garbage among what was collected: that took 9 % of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what this machine's user has measured out of the tests, and theirs out of his cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _cache_of_one_test(
    _cache_of_the_tests: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Let no test run plans that another one has found."""
    folder = _cache_of_the_tests / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(scope="session")
def mortals() -> Iterator[Mortals]:
    """Processes for ranks that may die; see :class:`tests.mortal.Mortals`."""
    started = Mortals()
    yield started
    started.close()


@pytest.fixture(scope="session")
def workers(mortals: Mortals) -> Iterator[WorkerPool]:
    """A pool of worker processes; see :class:`tests.workers.WorkerPool`."""
    pool = WorkerPool(mortals)
    yield pool
    pool.close()
