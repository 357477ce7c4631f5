"""Making the next batch while the present one is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["made_ahead"]

T = TypeVar("T")


def made_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield ``items`` in order, making each while the one before it is in use.

    An error while an item is made is raised where the item would have been yielded.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="syncline-batch") as pool:
        coming = pool.submit(next, items, end)
        while True:
            item = coming.result()
            if item is end:
                return
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]
