"""Workers of a process group, as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.timeouts import TIMEOUT

Each = Callable[[Callable[[int, dist.ProcessGroup], Any]], list[Any]]


@pytest.fixture(scope="module", params=(1, 2, 3, 4))
def each(request: pytest.FixtureRequest) -> Iterator[Each]:
    """Call a function on every worker, a thread with a process group of its own."""
    workers = request.param
    store = dist.HashStore()

    def joined(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, workers, TIMEOUT)

    with ThreadPoolExecutor(workers) as threads:
        groups = list(threads.map(joined, range(workers)))
        yield lambda work: list(threads.map(work, range(workers), groups))
