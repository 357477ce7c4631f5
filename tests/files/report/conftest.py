"""A realistic report, as it is, with every part, and with names that try to break its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.files.report.bundle import Bundle

from .examples import HOSTILE, make_bundle, make_overlapped, with_names
from .whatif_examples import few


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """The realistic report."""
    return make_bundle()


@pytest.fixture(scope="session")
def whole(bundle: Bundle) -> Bundle:
    """The realistic report with every part that a report can have."""
    return replace(bundle, what_if=few().what_if)


@pytest.fixture(scope="session")
def hostile(bundle: Bundle) -> Bundle:
    """The report with names that try to break out of the page."""
    return with_names(bundle, HOSTILE)


@pytest.fixture(scope="session")
def overlapped() -> Bundle:
    """The report on an iteration that waits for messages."""
    return make_overlapped()
