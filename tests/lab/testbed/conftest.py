"""Fixtures for tests that need an emulated cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from syncline.lab.testbed import Cluster, Testbed

from .machine import require_namespaces


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where the machine has no namespaces to give."""
    require_namespaces()


@pytest.fixture(scope="module")
def bed(namespaces: None) -> Iterator[Testbed]:
    """Three hosts; host 1 has a slower link."""
    cluster = Cluster.of(hosts=3, rate="1gbit", hosts_rate=["1:100mbit"])
    with Testbed(cluster) as bed:
        yield bed
