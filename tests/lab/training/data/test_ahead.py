"""Items made ahead come in order, one ahead, and bring their errors to the right place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from syncline.lab.training.data.sampling import prefetched


def test_order_and_end() -> None:
    assert list(prefetched(iter(range(20)))) == list(range(20))
    assert list(prefetched(iter(()))) == []


def test_an_error_is_raised_where_the_item_would_have_been() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("broken")

    ahead = prefetched(items())
    assert (next(ahead), next(ahead)) == (1, 2)
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_leaving_early_ends_the_thread() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    for item in prefetched(items()):
        if item == 3:
            break
    assert len(made) <= 6
