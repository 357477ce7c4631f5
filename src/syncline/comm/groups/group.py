"""``Group``: ranks that run collectives on memory, whatever owns it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from syncline import _native
from syncline.comm.groups.choices import Choice, Wanted, agreed_chooser
from syncline.comm.groups.compiled import Compiled, compiled
from syncline.comm.groups.elements import COLLECTIVES, Elements, dtype_code, reduction_code
from syncline.comm.groups.meeting import Connected, Introduced
from syncline.comm.groups.messages import announce_shutdown, out_of_descriptors, require_descriptors
from syncline.comm.groups.notes import Store
from syncline.comm.groups.rendezvous import Reception
from syncline.comm.groups.site import APART
from syncline.comm.groups.ucx import addresses, new_worker
from syncline.comm.groups.watch import Watch
from syncline.errors import MismatchError, PeerError, SynclineError, UserError, require_known

Transport = Literal["auto", "shared", "tcp", "ucx", "shared+ucx"]
"""``"auto"``: shared memory inside a host, TCP between hosts; ``"shared"``: refuse ranks of other
hosts; ``"tcp"``: TCP to all ranks; ``"ucx"``: UCX to all ranks; ``"shared+ucx"``: shared memory
inside a host, UCX between hosts. UCX is for RDMA."""

LEAVING = 1  # priority of the process's finalizers: after those that finish exchanges
DEFAULT_TIMEOUT_S = 300.0
FRAGMENT_BYTES = 64 * 1024
WINDOW, LEAST_WINDOW = 16, 8
"""Fragments in flight in shared memory: to all peers together, and at least to each. 16 to one peer
fill a core's own cache, so most lines have left it before they are written again. 8 to each of
several peers are a small part of the shared cache."""
TCP_FRAGMENT_BYTES = 256 * 1024
PAUSE_S = 20e-6  # busy-poll this long, which is longer than a fragment takes
SPIN_S = 200e-6
"""Then poll, yielding the processor between polls, this long before blocking: a sleep and wake
costs at least 60 us on a VM."""
CROWDED_SPIN_S = 20e-6
"""The same if there are more ranks than processors. A rank then yields at once."""
UCX_DESCRIPTORS, SPARE_DESCRIPTORS = 16, 8
"""File descriptors that UCX needs, and that stores and other threads may need meanwhile."""
ANY_RANK = -1
MOST_TAG = 2**32 - 1
Composed = Literal["gather", "scatter", "all-to-all"]  # collectives that are composed of messages
SLICE_S = 0.25  # how often a wait lets Python handle signals, such as that of Ctrl-C
FEW = 64  # operations in flight, all of which are looked at for those that are done
MOST_CALLS = 512  # a group keeps at most this many prepared calls


class PreparedCall(NamedTuple):
    """A collective on vectors of one count and dtype, ready to be called."""

    start: Callable[[int, int, int, bool], _native.Operation | None]
    code: Compiled
    part_bytes: int  # of each rank's part of the vector, where it has equal parts


class Pending:
    """A collective in flight."""

    __slots__ = ("_group", "_keep", "task")

    def __init__(self, group: Group | None, task: _native.Task | None, keep: object) -> None:
        self._group = group
        self.task = task
        """The native task, which does not keep the memory alive; None: it was done at once."""
        self._keep = keep  # memory that it reads or writes

    @property
    def done(self) -> bool:
        """Whether the result is in place."""
        return self.task is None or self.task.done

    @property
    def peer(self) -> int | None:
        """The other rank of a message, once it is known; None for a collective."""
        if not isinstance(self.task, _native.Message) or self.task.peer == ANY_RANK:
            return None
        return self.task.peer

    @property
    def ended(self) -> bool:
        """Whether the result is in place, or never will be."""
        return self.done or (self._group is not None and self._group.failed)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the result is in place, within ``timeout_s``; None: the group's timeout.

        After a shorter time the collective stays in flight, and may be waited for again. After the
        group's timeout the rank gives up, which ends the group on all ranks.

        Raises:
            PeerError: a rank has ended, or did not take part in time.
            MismatchError: the ranks called different collectives.
            UserError: this is a fork of the process that began it.
        """
        if self.task is None or self._group is None:
            return
        if not self.task.done:
            self._group._wait(self.task, timeout_s)
        self._keep = None
        self._group._forget_done()


DONE = Pending(None, None, None)


class Group:
    """Ranks that run collectives, through shared memory inside a host and TCP between hosts.

    All ranks must start the same collectives in the same order; several may be in flight at once.
    Elements must be left alone until the collective is done. Results have the same bits on all
    ranks.

    The ranks find each other in the store under ``name``, which an earlier group may have used.
    ``timeout_s`` is for joining, and for every wait that is not given its own. ``interface`` is the
    network device at which ranks of other hosts reach this one over TCP; None: that of
    ``GLOO_SOCKET_IFNAME``, else any with a route between the two. All ranks use rank 0's
    ``choices``.

    Raises:
        PeerError: a rank did not join in time.
        UserError: UCX is needed and missing, or ranks cannot share memory; measured choices are
            damaged, or of other hosts.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        name: str = "default",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: Transport = "auto",
        interface: str | None = None,
        choices: Wanted = "measured",
    ) -> None:
        require_known("transport", transport, get_args(Transport))
        self.rank = rank
        self.ranks = ranks
        self._require_rank(rank)
        self.timeout_s = timeout_s
        self.on_failure: Callable[[], str] = str
        """Called when an operation fails on this rank; returns the end of the error message."""
        self._lock = threading.Lock()
        self._begun: deque[Pending] = deque()  # collectives that may be in flight, in order
        self._looked_at = FEW  # how many of them there are when all are looked at
        self._calls: dict[tuple[object, ...], PreparedCall] = {}
        deadline = time.monotonic() + timeout_s
        with Reception(store, name, rank, ranks, deadline) as reception:
            near = [rank] if transport in APART else reception.neighbours
            remote = [other for other in range(ranks) if other not in near]
            if remote and transport == "shared":
                there, here = (reception.cards[each].name for each in (remote[0], rank))
                raise UserError(
                    f"rank {remote[0]} is on host {there!r} and rank {rank} on {here!r}: shared "
                    "memory joins ranks of one host"
                )
            self.site = reception.site("auto" if transport == "shared" else transport)
            notes = reception.notes
            self.meeting = notes.prefix
            """The same on all ranks, and unique to this group, even if another has its name."""
            self.hosts = self.site.layout
            """The ranks of each host; without shared memory each counts as a host of its own."""
            crowded = len(reception.neighbours) > len(os.sched_getaffinity(0))
            self._peers: list[Introduced] = []
            own: list[int] = []
            """This rank's memory segment and, with other hosts, the eventfd that wakes it."""
            far: list[Connected] = []
            try:
                by_ucx = bool(remote) and "ucx" in transport
                require_descriptors(_most_descriptors(len(near), len(remote), by_ucx), rank)
                own.append(_new_segment(len(near), rank))
                if remote:
                    own.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                worker = new_worker(rank) if by_ucx else None
                ways = addresses(worker, notes, remote) if worker else []
                others = [other for other in near if other != rank]
                self._peers = reception.meet(others, own)
                if remote and not by_ucx:
                    far = reception.connect(remote, interface)
                # Only now: meeting the other ranks shows whether one has ended.
                self.chooser = agreed_chooser(choices, self.site, notes)
                """Chooses the algorithm; also says where the choice comes from."""
                neighbours = [
                    (member, passed[0], passed[1] if remote else -1)
                    for member, passed in [(rank, own), *((p.rank, p.passed) for p in self._peers)]
                ]
                self._native = _native.NativeGroup(
                    rank,
                    sorted(neighbours),
                    [(peer.rank, peer.connection.fileno()) for peer in far],
                    ways,
                    worker,
                    FRAGMENT_BYTES,
                    _window(len(near)),
                    FRAGMENT_BYTES if by_ucx else TCP_FRAGMENT_BYTES,
                    0.0 if crowded else PAUSE_S,
                    CROWDED_SPIN_S if crowded else SPIN_S,
                    max(deadline - time.monotonic(), 0.0),
                )
                self._watch = Watch(self._peers, self._native)
            except _native.LinkFailure as error:
                what, peer, _ = error.args
                lost = PeerError(
                    f"rank {rank}: {what}; see that rank's output, and whether the two hosts have "
                    "a network in common: UCX_NET_DEVICES names its device"
                )
                self._abandon(lost, own)
                notes.require_joining(peer)
                raise lost from None
            except OSError as error:  # memory cannot be mapped, or a thread not started
                refused = out_of_descriptors(rank, error) or UserError(
                    f"rank {rank}: {error}; see the limits of this process (ulimit -v, -u)"
                )
                self._abandon(refused, own)
                raise refused from error
            except BaseException as error:
                self._abandon(error, own)
                raise
            finally:
                for each in far:  # the group has copies
                    each.close()
        # Memory stays mapped without its descriptor.
        for passed in (own, *(peer.passed for peer in self._peers)):
            os.close(passed.pop(0))
        self._leave = leaving(self, _leave, self._watch, self._native, self._peers, own)

    def all_reduce(
        self,
        given: Elements,
        result: Elements | None = None,
        reduction: str = "sum",
        *,
        choice: Choice | None = None,
        blocking: bool = False,
    ) -> Pending:
        """Reduce elements over all ranks; every rank gets the same result, in place by default.

        The reduction is sum, avg, min, max, product, band, bor or bxor. ``choice`` is the
        algorithm; None: what :attr:`chooser` says for the size. ``blocking``: the caller will wait
        at once; otherwise a thread of the group works on it.

        Raises:
            UserError: the dtype, the reduction or the algorithm is unknown, or counts do not fit.
            PeerError: the group has failed.
        """
        work = given if result is None else _fitting(given, result, 1)
        key = "all-reduce", given.count, given.dtype, choice, reduction
        call = self._calls.get(key) or self._prepared(key, result=(0, given.count))
        if work is not given:
            given = _placed(given, work, call.code, copies=self.ranks == 1)
        return self._start(call, given.address, work.address, blocking, given.owner, work.owner)

    def broadcast(
        self,
        buffer: Elements,
        *,
        root: int = 0,
        choice: Choice | None = None,
        blocking: bool = False,
    ) -> Pending:
        """Copy the root's elements to all ranks; see :meth:`all_reduce`."""
        key = "broadcast", buffer.count, buffer.dtype, choice, "sum", root
        call = self._calls.get(key) or self._prepared(key, root)
        return self._start(call, buffer.address, buffer.address, blocking, buffer.owner)

    def reduce(
        self,
        given: Elements,
        result: Elements | None = None,
        reduction: str = "sum",
        *,
        root: int = 0,
        choice: Choice | None = None,
        blocking: bool = False,
    ) -> Pending:
        """Reduce over all ranks; only the root gets the result, in place by default.

        Other ranks' elements are not changed, unless they are given as the result too: then the
        algorithm works in them and needs no other memory. See :meth:`all_reduce`.
        """
        ours = (0, given.count) if self.rank == root else (0, 0)
        key = "reduce", given.count, given.dtype, choice, reduction, root
        call = self._calls.get(key) or self._prepared(key, root, ours)
        if result is None:
            elsewhere = self.rank != root and call.code.changes
            work = _scratch(given) if elsewhere else given
        else:
            work = _fitting(given, result, 1)
        given = _placed(given, work, call.code, copies=self.ranks == 1)
        return self._start(call, given.address, work.address, blocking, given.owner, work.owner)

    def all_gather(
        self,
        given: Elements,
        result: Elements,
        *,
        choice: Choice | None = None,
        blocking: bool = False,
    ) -> Pending:
        """Collect equally many elements of every rank, in the order of ranks, on all ranks."""
        key = "all-gather", result.count, result.dtype, choice, "sum", given.count, given.dtype
        call = self._calls.get(key)
        if call is None:
            _fitting(given, result, self.ranks)
            call = self._prepared(key)
        own = result.address + self.rank * call.part_bytes
        # This rank's part is sent from where it was given, and copied meanwhile.
        source = result.address + given.address - own
        copies = source != result.address
        if copies and (not call.code.out_of_place or _overlap(given, result)):
            _native.move(own, given.address, call.part_bytes)
            source, copies = result.address, False
        pending = self._start(call, source, result.address, blocking, given.owner, result.owner)
        if copies:
            _native.move(own, given.address, call.part_bytes)
        return pending

    def reduce_scatter(
        self,
        given: Elements,
        result: Elements,
        reduction: str = "sum",
        *,
        choice: Choice | None = None,
        blocking: bool = False,
    ) -> Pending:
        """Reduce over all ranks; rank r gets the r-th of equal parts. ``given`` is not changed."""
        counts = given.count, given.dtype, choice, reduction, result.count, result.dtype
        key = "reduce-scatter", *counts
        call = self._calls.get(key)
        if call is None:
            _fitting(result, given, self.ranks)
            part = self.rank * result.count, (self.rank + 1) * result.count
            call = self._prepared(key, result=part)
        code = call.code
        own = given.address + self.rank * call.part_bytes
        tangled = result.address != own and _overlap(given, result)
        if tangled or code.spills or not code.out_of_place or self.ranks == 1:
            work = _scratch(given)
            owners = given.owner, work.owner, result.owner
            placed = _placed(given, work, code, copies=tangled or self.ranks == 1).address
            return self._start(call, placed, work.address, blocking, owners, None, result.address)
        # The program writes only this rank's part, directly to its place.
        before = result.address - self.rank * call.part_bytes
        return self._start(call, given.address, before, blocking, given.owner, result.owner)

    def send(
        self, given: Elements, *, peer: int, tag: int = 0, part_of: Composed | None = None
    ) -> Pending:
        """Send elements to the rank ``peer``.

        Messages with one tag, from 0 to 2**32 - 1, arrive in the order in which they are sent. The
        receiver must ask for the same tag or, where the message is ``part_of`` a collective, for
        the same collective; the tag is ignored then.
        """
        return self._message(self._native.send, given, peer, tag, part_of)

    def receive(
        self, result: Elements, *, peer: int | None, tag: int = 0, part_of: Composed | None = None
    ) -> Pending:
        """Receive what ``peer`` sends next with this tag, of the same count and dtype.

        From whoever sends first if ``peer`` is None, see :attr:`Pending.peer`. The rest is as for
        :meth:`send`.
        """
        return self._message(self._native.receive, result, peer, tag, part_of)

    @property
    def failed(self) -> bool:
        """Whether collectives in flight will never be done."""
        return self._native.failed()

    @property
    def ended(self) -> dict[int, str]:
        """The ranks that are known to have ended, and what is known of each."""
        cut_off = "has ended, or cannot be reached any more"
        return dict.fromkeys(self._native.cut_off(), cut_off) | dict.fromkeys(
            tuple(self._watch.ended), "has ended"
        )

    def require_whole(self) -> None:
        """Raise PeerError if the group has failed, or a rank is known to have ended."""
        if self.failed:
            self.receive(Elements(0, 0, "uint8"), peer=None)  # raises why
        for rank, how in self.ended.items():
            raise PeerError(f"rank {self.rank}: the process of rank {rank} {how}")

    def close(self) -> None:
        """Leave the group; collectives in flight are abandoned. In a fork this does nothing."""
        if self._native.forked:
            return
        self._leave()
        with self._lock:
            self._begun.clear()

    def _abandon(self, reason: BaseException, own: Sequence[int]) -> None:
        """Close what was opened for a group that cannot be made."""
        if hasattr(self, "_native"):  # ranks of other hosts wait for it, and it writes to ``own``
            self._native.close()
        for peer in self._peers:
            peer.part(reason)
        for descriptor in own:
            os.close(descriptor)

    def _prepared(
        self, key: tuple[Any, ...], root: int = 0, result: tuple[int, int] = (0, 0)
    ) -> PreparedCall:
        """Prepare a call, of which this rank gets the part ``result``, and keep it by its key."""
        collective, count, dtype, choice, reduction = key[:5]
        self._require_rank(root)
        size_bytes = Elements(0, count, dtype).size_bytes
        if choice is None:
            choice = self.chooser.choose(collective, size_bytes)
        code = compiled(collective, choice, self.rank, self.hosts, root)
        native = _native.NativeCall(
            self._native,
            code.native,
            count,
            code.variant,
            COLLECTIVES[collective],
            dtype_code(dtype),
            reduction_code(reduction, dtype),
            *result,
        )
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        call = self._calls[key] = PreparedCall(native.start, code, size_bytes // self.ranks)
        return call

    def _message(
        self,
        begin: Callable[[int, int, int, int, int, int], _native.Message],
        buffer: Elements,
        peer: int | None,
        tag: int,
        part_of: Composed | None,
    ) -> Pending:
        if peer is None:
            peer = ANY_RANK
        else:
            self._require_rank(peer)
            if peer == self.rank:
                raise UserError(f"rank {peer} cannot send to itself, or receive from itself")
        if not 0 <= tag <= MOST_TAG:
            raise UserError(f"expected a tag from 0 to {MOST_TAG}, found {tag}")
        dtype, kind = dtype_code(buffer.dtype), COLLECTIVES[part_of or "exchange"]
        try:
            native = begin(buffer.address, buffer.count, dtype, peer, 0 if part_of else tag, kind)
        except (_native.LinkFailure, _native.Forked) as error:
            raise self._not_begun(error) from None
        return self._in_flight(native, buffer.owner)

    def _start(
        self,
        call: PreparedCall,
        given: int,
        work: int,
        blocking: bool,
        owner: object,
        other: object = None,
        output: int = 0,
    ) -> Pending:
        """Begin a program that reads at ``given`` and writes at ``work``, memory of two owners."""
        try:
            native = call.start(given, work, output, blocking)
        except (_native.LinkFailure, _native.Forked) as error:
            raise self._not_begun(error) from None
        return DONE if native is None else self._in_flight(native, (owner, other))

    def _in_flight(self, native: _native.Task, keep: object) -> Pending:
        """Return a pending operation, which keeps its memory alive even if nobody waits for it."""
        pending = Pending(self, native, keep)
        with self._lock:
            self._begun.append(pending)
        self._forget_done()
        return pending

    def _forget_done(self) -> None:
        """Forget collectives that are done, which refer to the group."""
        if self._native.forked:
            return  # the fork has no thread that could release the lock
        with self._lock:
            while self._begun and self._begun[0].done:
                self._begun.popleft()
            if len(self._begun) >= self._looked_at:  # behind one that is not done for long
                self._begun = deque(each for each in self._begun if not each.done)
                self._looked_at = 2 * len(self._begun) + FEW

    def _wait(self, native: _native.Task, timeout_s: float | None) -> None:
        if timeout_s is None:
            timeout_s = self.timeout_s
        gives_up = timeout_s >= self.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            # In slices, between which Python handles signals: Ctrl-C ends the wait.
            while (left_s := deadline - time.monotonic()) > SLICE_S:
                with contextlib.suppress(_native.WaitTimeout):
                    self._native.wait(native, SLICE_S, False)
                    return
            self._native.wait(native, max(left_s, 0.0), gives_up)
        except _native.WaitTimeout as error:
            again = self.on_failure() if gives_up else ", or wait again: it is still under way"
            raise PeerError(f"{error}; see that rank's output{again}") from None
        except (_native.LinkFailure, _native.Forked) as error:
            raise self._explained(error) from None

    def _not_begun(self, error: Exception) -> SynclineError:
        if isinstance(error, _native.LinkFailure) and not self._leave.still_active():
            return UserError(f"rank {self.rank}: this group was closed")
        return self._explained(error)

    def _explained(self, error: Exception) -> SynclineError:
        if isinstance(error, _native.Forked):
            return UserError(
                f"{error}; a fork takes no part in the group that its parent joined: call it in "
                "the parent, or make a new group in the fork"
            )
        what, _, disagrees = error.args
        what += self.on_failure()
        if disagrees:
            return MismatchError(f"the ranks called different collectives: {what}")
        own = f"rank {self.rank}"
        return PeerError(what if what.startswith(f"{own} waited ") else f"{own}: {what}")

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise UserError(f"expected a rank from 0 to {self.ranks - 1}, found {rank}")


def leaving(owner: object, leave: Callable[..., None], *arguments: object) -> Finalize[None]:
    """Call ``leave`` once: when asked to, when its owner is collected, or when the process ends.

    At the end of the process it runs after the exchanges have been finished, also in a child of
    ``multiprocessing``; a fork does not call it. The arguments must not refer to the owner.
    """
    return Finalize(owner, leave, arguments, exitpriority=LEAVING)


def _leave(
    watch: Watch, native: _native.NativeGroup, peers: Sequence[Introduced], own: Sequence[int]
) -> None:
    for peer in peers:
        announce_shutdown(peer.connection)
    watch.close()
    native.close()  # every wait ends; what was sent to other hosts arrives
    for peer in peers:
        peer.close()
    for descriptor in own:
        os.close(descriptor)


def _most_descriptors(near: int, remote: int, by_ucx: bool) -> int:
    """Return how many descriptors a rank needs while it joins, with some to spare."""
    # For each peer on its host: a connection, a process, a segment and an event. For each on
    # another host: a connection, which for a moment is open twice.
    return 4 * near + 2 * remote + (UCX_DESCRIPTORS if by_ucx else 0) + SPARE_DESCRIPTORS


def _window(ranks: int) -> int:
    """Return how many fragments may be in flight from a rank to another on its host."""
    return max(WINDOW // max(ranks - 1, 1), LEAST_WINDOW)


def _new_segment(ranks: int, rank: int) -> int:
    """Return a descriptor of the memory that this rank shares with the ranks of its host."""
    size_bytes = _native.segment_bytes(ranks, FRAGMENT_BYTES, _window(ranks))
    try:
        return _sealed_memory(size_bytes)
    except OSError as error:
        raise UserError(
            f"rank {rank}: {size_bytes} bytes of shared memory cannot be allocated: {error}"
        ) from error


def _sealed_memory(size_bytes: int) -> int:
    """Return a descriptor of unnamed memory, which can neither shrink nor outlive its processes."""
    descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _scratch(like: Elements) -> Elements:
    memory = np.empty(like.size_bytes, np.uint8)
    return Elements(memory.ctypes.data, like.count, like.dtype, memory)


def _placed(given: Elements, work: Elements, code: Compiled, *, copies: bool) -> Elements:
    """Return where a program reads its input: as given if it can, else copied to ``work``."""
    if given.address != work.address and (copies or not code.out_of_place):
        _native.move(work.address, given.address, given.size_bytes)
        return work
    return given


def _overlap(a: Elements, b: Elements) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes


def _fitting(part: Elements, whole: Elements, times: int) -> Elements:
    if part.dtype != whole.dtype or part.count * times != whole.count:
        raise UserError(
            f"expected {part.count * times} elements of {part.dtype}, {part.count} for each rank, "
            f"found {whole.count} of {whole.dtype}"
        )
    return whole
