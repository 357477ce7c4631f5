"""``Group``: ranks that run collectives on memory, whatever owns it."""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from typing import Any

from syncline import _native
from syncline.collectives import Collective
from syncline.errors import MismatchError, PeerError, UserError
from syncline.groups.choice import Choice, choose
from syncline.groups.compiled import Compiled, compiled
from syncline.groups.elements import COLLECTIVES, SIZES_BYTES, dtype_code, reduction_code
from syncline.groups.rendezvous import Introduced, Store, introduce
from syncline.groups.watch import GOODBYE, Watch

__all__ = ["DEFAULT_TIMEOUT_S", "Group", "Pending"]

DEFAULT_TIMEOUT_S = 300.0
FRAGMENT_BYTES = 64 * 1024
WINDOW = 8
SPIN_S = 20e-6
"""A rank that has a processor to itself looks so long for news before it sleeps: longer than a
fragment takes, shorter than falling asleep and waking."""


class Pending:
    """A collective under way."""

    __slots__ = ("_group", "_keep", "_native")

    def __init__(self, group: Group, native: _native.Operation, keep: object) -> None:
        self._group = group
        self._native = native
        self._keep = keep  # memory that it reads or writes

    @property
    def done(self) -> bool:
        """Whether the result is in place."""
        return self._native.done

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the result is in place.

        Args:
            timeout_s: how long at most; None: as long as the group's own timeout.

        Raises:
            PeerError: a rank has ended, or did not take part in time. The group is of no use then.
            MismatchError: the ranks called different collectives.
        """
        if not self._native.done:
            self._group._wait(self._native, timeout_s)
        self._keep = None


class Group:
    """Ranks of one host that run collectives through shared memory.

    All ranks must start the same collectives in the same order; several may be under way at once.
    Buffers are given by their address and must stay valid, and alone, until the collective is done.
    Counts are of elements. Results have the same bits on all ranks.

    Args:
        store: where all ranks look for each other.
        rank: this rank.
        ranks: how many there are.
        name: of the group, the same on all its ranks; no other group may have it in this store.
        timeout_s: deadline for meeting, and for every wait that is not given its own.

    Raises:
        PeerError: a rank did not come.
        UserError: the ranks are not all on one host, or cannot share memory.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        name: str = "default",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not 0 <= rank < ranks:
            raise UserError(f"expected a rank from 0 to {ranks - 1}, found {rank}")
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        segment = _new_segment(ranks)
        peers: list[Introduced] = []
        try:
            peers = introduce(store, name, rank, ranks, segment, timeout_s=timeout_s)
            segments = [peer.segment for peer in peers]
            segments.insert(rank, segment)
            self._native = _native.SharedGroup(
                rank, segments, FRAGMENT_BYTES, WINDOW, SPIN_S if ranks <= _processors() else 0.0
            )
        finally:
            os.close(segment)
            for peer in peers:
                os.close(peer.segment)
        self._peers = peers
        self._watch = Watch(peers, self._native.lose)

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self,
        input_: int,
        output: int,
        count: int,
        dtype: str,
        reduction: str = "sum",
        *,
        choice: Choice | None = None,
        attended: bool = False,
        keep: object = None,
    ) -> Pending:
        """Reduce ``count`` elements over all ranks; every rank gets the result.

        Args:
            input_: address of this rank's elements.
            output: address of the result; may be that of the input.
            count: how many elements.
            dtype: of the elements, such as ``"float32"``.
            reduction: sum, avg, min, max, product, band, bor or bxor.
            choice: the algorithm; None: whatever is fastest.
            attended: whether the caller is about to wait for it. Otherwise a thread works on it.
            keep: an object that owns the memory.

        Raises:
            UserError: the dtype or reduction is unknown.
            PeerError: the group has failed.
        """
        size_bytes = count * SIZES_BYTES.get(dtype, 1)
        choice = choice or choose("all-reduce", self.ranks, size_bytes)
        code = self._compiled("all-reduce", choice)
        if input_ != output and not (code.out_of_place and self.ranks > 1):
            ctypes.memmove(output, input_, size_bytes)
            input_ = output
        return self._start(
            "all-reduce",
            code,
            choice,
            count,
            dtype,
            reduction,
            input_,
            output,
            (0, count),
            0,
            attended,
            keep,
        )

    def broadcast(
        self,
        buffer: int,
        count: int,
        dtype: str,
        *,
        root: int = 0,
        choice: Choice | None = None,
        attended: bool = False,
        keep: object = None,
    ) -> Pending:
        """Copy the root's elements to all ranks; arguments as of :meth:`all_reduce`."""
        self._require_rank(root)
        choice = choice or choose("broadcast", self.ranks, count * SIZES_BYTES.get(dtype, 1))
        code = self._compiled("broadcast", choice, root)
        return self._start(
            "broadcast",
            code,
            choice,
            count,
            dtype,
            "sum",
            buffer,
            buffer,
            (0, 0),
            0,
            attended,
            keep,
            root,
        )

    def reduce(
        self,
        input_: int,
        output: int,
        count: int,
        dtype: str,
        reduction: str = "sum",
        *,
        root: int = 0,
        choice: Choice | None = None,
        attended: bool = False,
        keep: object = None,
    ) -> Pending:
        """Reduce over all ranks; the root gets the result. Other ranks' outputs are not used."""
        self._require_rank(root)
        size_bytes = count * SIZES_BYTES.get(dtype, 1)
        choice = choice or choose("reduce", self.ranks, size_bytes)
        code = self._compiled("reduce", choice, root)
        work, result = output, (0, count)
        if self.rank != root:
            work, keep = _scratch(size_bytes if any(code.changed) else 0, keep)
            result = (0, 0)
        if input_ != work and not (code.out_of_place and self.ranks > 1):
            ctypes.memmove(work, input_, size_bytes)
            input_ = work
        return self._start(
            "reduce",
            code,
            choice,
            count,
            dtype,
            reduction,
            input_,
            work,
            result,
            0,
            attended,
            keep,
            root,
        )

    def all_gather(
        self,
        input_: int,
        output: int,
        count: int,
        dtype: str,
        *,
        choice: Choice | None = None,
        attended: bool = False,
        keep: object = None,
    ) -> Pending:
        """Collect ``count`` elements of every rank, in the order of ranks, on all ranks."""
        size_bytes = count * SIZES_BYTES.get(dtype, 1)
        choice = choice or choose("all-gather", self.ranks, size_bytes * self.ranks)
        code = self._compiled("all-gather", choice)
        own = output + self.rank * size_bytes
        if own != input_:
            ctypes.memmove(own, input_, size_bytes)
        return self._start(
            "all-gather",
            code,
            choice,
            count * self.ranks,
            dtype,
            "sum",
            output,
            output,
            (0, 0),
            0,
            attended,
            keep,
        )

    def reduce_scatter(
        self,
        input_: int,
        output: int,
        count: int,
        dtype: str,
        reduction: str = "sum",
        *,
        choice: Choice | None = None,
        attended: bool = False,
        keep: object = None,
    ) -> Pending:
        """Reduce ``count`` elements a rank over all ranks; rank r gets the r-th part.

        The input, of ``count`` elements for every rank, is left as it is.
        """
        element = SIZES_BYTES.get(dtype, 1)
        choice = choice or choose("reduce-scatter", self.ranks, count * self.ranks * element)
        code = self._compiled("reduce-scatter", choice)
        start, stop = self.rank * count, (self.rank + 1) * count
        whole_bytes = count * self.ranks * element
        shard = len(code.changed) // self.ranks
        own = range(self.rank * shard, (self.rank + 1) * shard)
        if self.ranks == 1:
            ctypes.memmove(output, input_, whole_bytes)
            input_ = output
        inside = all(block in own for block, changed in enumerate(code.changed) if changed)
        if inside and (code.out_of_place or self.ranks == 1):
            work, result = output - start * element, 0
        else:
            work, keep = _scratch(whole_bytes, keep)
            result = output
            if not code.out_of_place:
                ctypes.memmove(work, input_, whole_bytes)
                input_ = work
        return self._start(
            "reduce-scatter",
            code,
            choice,
            count * self.ranks,
            dtype,
            reduction,
            input_,
            work,
            (start, stop),
            result,
            attended,
            keep,
        )

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave the group; what is under way is given up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in self._peers:
            try:
                peer.connection.send(GOODBYE)
            except OSError:
                continue  # it has ended before
        self._watch.close()
        for peer in self._peers:
            peer.connection.close()
            os.close(peer.process)

    # ------------------------------------------------------------------ inside

    def _compiled(self, collective: Collective, choice: Choice, root: int = 0) -> Compiled:
        return compiled(collective, choice.algorithm, self.rank, self.ranks, choice.blocks, root)

    def _start(
        self,
        collective: Collective,
        code: Compiled,
        choice: Choice,
        count: int,
        dtype: str,
        reduction: str,
        input_: int,
        work: int,
        result: tuple[int, int],
        output: int,
        attended: bool,
        keep: object,
        root: int = 0,
    ) -> Pending:
        variant = zlib.crc32(f"{choice.algorithm}/{choice.blocks}/{root}".encode())
        try:
            native = self._native.start(
                code.native,
                count,
                variant,
                COLLECTIVES[collective],
                dtype_code(dtype),
                reduction_code(reduction, dtype),
                input_,
                work,
                *result,
                output,
                attended,
            )
        except _native.LinkFailure as error:
            raise self._explained(error) from None
        return Pending(self, native, keep)

    def _wait(self, native: _native.Operation, timeout_s: float | None) -> None:
        try:
            self._native.wait(native, self.timeout_s if timeout_s is None else timeout_s)
        except (_native.LinkFailure, _native.WaitTimeout) as error:
            raise self._explained(error) from None

    def _explained(self, error: Any) -> PeerError | MismatchError:
        if isinstance(error, _native.WaitTimeout):
            return PeerError(f"{error} within the timeout; see that rank's output")
        what, peer, disagrees = error.args
        if disagrees:
            return MismatchError(f"the ranks called different collectives: {what}")
        del peer
        return PeerError(f"rank {self.rank}: {what}")

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise UserError(f"expected a root from 0 to {self.ranks - 1}, found {rank}")


def _new_segment(ranks: int) -> int:
    """Return memory that has no name, so that nothing of it is ever left behind."""
    segment = os.memfd_create("syncline", os.MFD_CLOEXEC)
    os.ftruncate(segment, _native.segment_bytes(ranks, FRAGMENT_BYTES, WINDOW))
    return segment


def _scratch(size_bytes: int, keep: object) -> tuple[int, object]:
    memory = (ctypes.c_char * size_bytes)()
    return ctypes.addressof(memory), (memory, keep)


def _processors() -> int:
    return len(os.sched_getaffinity(0))
