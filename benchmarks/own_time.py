"""How long a thread runs in given functions, without what they call of each other."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

__all__ = ["OwnTimes", "Watched"]


EMPTY_CALLS = 10_000


class Watched(NamedTuple):
    """A method that is timed, under a name that several may share."""

    name: str
    owner: Any
    """A class, or one object."""
    method: str


class OwnTimes:
    """Adds up processor time of the calling thread; each call counts without watched calls in it.

    What timing an empty call gives is taken off each call.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside: list[float] = []
        """Of each watched call under way: what watched calls in it took."""
        self._empty_s = 0.0
        empty = self._timed("", _empty)
        for _ in range(EMPTY_CALLS):
            empty()
        self._empty_s = self.seconds.pop("") / self.calls.pop("")

    @contextlib.contextmanager
    def watching(self, methods: Sequence[Watched]) -> Iterator[None]:
        """Time these methods for a while."""
        with contextlib.ExitStack() as stack:
            for name, owner, method in methods:
                timed = self._timed(name, getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, timed))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.thread_time() - began_s
                self.seconds[name] += took_s - self._inside.pop() - self._empty_s
                self.calls[name] += 1
                if self._inside:
                    self._inside[-1] += took_s

        return timed


def _empty() -> None:
    pass
