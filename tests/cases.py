"""Which cases of a test run with every change, and which only in CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_few(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Return cases for ``pytest.mark.parametrize``: the first ``count``, and the others as slow."""
    return [case if number < count else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
