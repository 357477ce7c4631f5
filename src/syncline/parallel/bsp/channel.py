"""``Channel``: collectives on tensors by one family of algorithms, and how long they held us up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from syncline.collectives.table import PROGRAMS, Collective, Pipelined
from syncline.errors import UserError, did_you_mean
from syncline.groups import Choice, Elements, Group, Pending
from syncline.parallel.tensors import elements_of

__all__ = ["BLOCK_BYTES", "FAMILIES", "ROOT", "Channel"]

ROOT = 0
"""The rank that owns the weights in Algorithms 1 and 2."""

BLOCK_BYTES = 64 * 1024
"""Of a pipeline. Source: linear-pipeline, section 3.2 ("around 64 KB")."""

FAMILIES = tuple(
    name
    for name in PROGRAMS["broadcast"]
    if name in PROGRAMS["reduce"] and name in PROGRAMS["all-reduce"]
)
"""Algorithms that have all three collectives."""


class Channel:
    """Starts collectives, and adds up the time for which computation waits for them.

    Args:
        group: the ranks.
        family: one of :data:`FAMILIES`; None: what is fastest for each size.

    Raises:
        UserError: there is no such family.
    """

    def __init__(self, group: Group, family: str | None) -> None:
        if family is not None and family not in FAMILIES:
            raise UserError(
                f"unknown collectives {family!r}{did_you_mean(family, FAMILIES)} "
                f"(known: {', '.join(FAMILIES)})"
            )
        self.group = group
        self.family = family
        self.waited_s = 0.0
        """Seconds in :meth:`waiting` so far."""
        self._depth = 0

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.group.rank == ROOT

    # "attended" says that the caller is about to wait: then it does the work itself.

    def broadcast(self, buffer: Tensor, *, attended: bool = False) -> Pending:
        """Start to copy the root's elements to all ranks."""
        elements = elements_of(buffer, copies=True)
        choice = self._choice("broadcast", elements)
        return self.group.broadcast(elements, root=ROOT, choice=choice, attended=attended)

    def reduce(self, buffer: Tensor, *, attended: bool = False) -> Pending:
        """Start to add the elements of all ranks; the sum replaces those of the root.

        What other ranks have in the buffer at the end is not said.
        """
        elements = elements_of(buffer, copies=False)
        choice = self._choice("reduce", elements)
        return self.group.reduce(elements, elements, root=ROOT, choice=choice, attended=attended)

    def all_reduce(self, buffer: Tensor, *, attended: bool = False) -> Pending:
        """Start to add the elements of all ranks; the sum replaces those of every rank."""
        elements = elements_of(buffer, copies=False)
        choice = self._choice("all-reduce", elements)
        return self.group.all_reduce(elements, choice=choice, attended=attended)

    def _choice(self, collective: Collective, elements: Elements) -> Choice | None:
        if self.family is None:
            return None
        if isinstance(PROGRAMS[collective][self.family], Pipelined):
            return Choice(self.family, max(-(-elements.size_bytes // BLOCK_BYTES), 1))
        return Choice(self.family)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as time for which computation waits for communication."""
        self._depth += 1
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.waited_s += time.perf_counter() - start_s
