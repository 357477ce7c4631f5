"""``torch.distributed.init_process_group("syncline")``: torch's collectives on our groups."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.comm.backend.flight_recorder import Dumper, FlightRecorder, Record, from_torch
from syncline.comm.backend.gpus import Gpus, Linear
from syncline.comm.backend.monitored_barrier import monitored_barrier
from syncline.comm.backend.tensors import (
    MOVED,
    REDUCED,
    as_dense,
    copying,
    elements_of,
    parts_of,
    plain,
    reduction_of,
)
from syncline.comm.backend.work import BackendWork, Completer, profiled
from syncline.comm.devices.device_group import DeviceWork
from syncline.comm.groups import Elements, Group, Pending, Transport
from syncline.comm.groups.choices import Wanted
from syncline.comm.groups.group import Composed, leaving
from syncline.comm.groups.notes import WatchedStore
from syncline.errors import PeerError, UserError
from syncline.torch_entry import NAME, register
from syncline.torch_private import known_groups, profiling, untraced

__all__ = ["NAME", "Options", "ProcessGroup", "register"]

# Its stubs have overloads for calls that only C++ makes.
TorchsProcessGroup: Any = dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``pg_options`` may say; :class:`~syncline.comm.groups.Group` says what it means."""

    transport: Transport = "auto"  # such as ``"tcp"``: no shared memory, also inside a host
    interface: str | None = None
    """Network device at which other hosts reach this rank; None: GLOO_SOCKET_IFNAME, else any."""
    choices: Wanted = "measured"
    """The algorithms to use by size; rank 0's choices apply to all ranks."""
    flight_recorder_prefix: str | None = None
    """When an operation fails, each rank writes its last ones to a file of this name, followed by
    the rank and ``.json``. None: torch's variable TORCH_FR_DUMP_TEMP_FILE, if it is set; else,
    where a number of entries is given, torch's file in the user's cache."""
    flight_recorder_entries: int | None = None
    """How many operations are kept. None: torch's variable TORCH_FR_BUFFER_SIZE, else 2000."""


def created(group: Any, options: Options | None) -> ProcessGroup:
    """Make a process group from torch's description of it, and the caller's ``pg_options``."""
    if not isinstance(options, Options | None):
        raise UserError(
            "backend syncline expects pg_options of syncline.comm.backend.process_group.Options, "
            f"found {type(options).__name__}; give those, or leave them out"
        )
    place = group.store, group.group_rank, group.group_size
    ranks = group.global_ranks_in_group
    return ProcessGroup(*place, group.timeout, options or Options(), ranks)


@untraced
class ProcessGroup(TorchsProcessGroup):  # type: ignore[misc]
    """A process group of torch that runs on a :class:`~syncline.comm.groups.Group`.

    ``ranks`` are their numbers in the default group; empty for that group itself.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Options,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._store = store
        self._options = options
        self._name = self._description = ""
        prefix, entries = from_torch(
            options.flight_recorder_prefix, options.flight_recorder_entries, os.environ
        )
        # Without dumps, nobody reads the records.
        self.flight_recorder = FlightRecorder(entries if prefix is not None else 0)
        self._on_failure: Callable[[], str] = str
        self._dump_no_more: Callable[[], object] = str
        self._outer = self._joined("calls", partial(_require_alive, rank, ranks))
        self._inner: Group | None = None
        own = weakref.ref(self)
        self._gpus = Gpus(own)
        self._monitored_barriers = 0
        self._completer = Completer()
        # Runs also when the group is collected, even on that thread.
        self._complete_no_more = leaving(self, self._completer.close)
        if prefix is not None and entries > 0:
            meeting = self._outer.meeting
            dumper = Dumper(prefix, store, meeting, rank, size, lambda: _recorded(own()))
            self._dump_no_more = leaving(self, dumper.close)
            self._on_failure = self._outer.on_failure = dumper.failed

    @property
    def _group(self) -> Group:
        """The group that a collective runs on.

        Collectives that a future's callback begins have a group of their own: among those of the
        main thread, their order would differ between the ranks.
        """
        if threading.get_ident() != self._completer.ident:
            return self._outer
        if self._inner is None:
            self._inner = self.joined("calls of futures")
        return self._inner

    def joined(self, name: str) -> Group:
        """Make another group of the ranks; all of them must call."""
        return self._joined(name, self._outer.require_whole)

    def _joined(self, name: str, require_alive: Callable[[], None]) -> Group:
        group = Group(
            WatchedStore(self._store, require_alive),
            self._rank,
            self._size,
            name=name,
            timeout_s=self._timeout.total_seconds(),
            transport=self._options.transport,
            interface=self._options.interface,
            choices=self._options.choices,
        )
        group.on_failure = self._on_failure
        return group

    @property
    def choices_source(self) -> str:
        """Where the choice of algorithms comes from: built-in, or a date and a file."""
        return self._outer.chooser.source

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name to give to ``init_process_group``."""
        return NAME

    # Torch's own class asks its backends for these; this group has none.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch has given to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch has given to the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description."""
        self._description = description

    @property
    def timeout(self) -> timedelta:
        """Deadline of every wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of waits that begin from now on."""
        if timeout <= timedelta(0):
            raise UserError(f"expected a timeout above 0, found {timeout}")
        self._timeout = timeout
        for group in (self._inner, self._outer):
            if group is not None:
                group.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts from 0, as on Gloo."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations this rank has begun."""
        return self.flight_recorder.begun

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return the backend of a device: this group, or another backend's."""
        found = torch.device(device)
        return self if found.type == "cpu" else self._gpus.other(found) or self

    def get_group_store(self) -> Any:
        """Return the store through which the ranks have met."""
        return self._store

    def _has_hooks(self) -> bool:
        """Return False: no hooks are called on completion, as on Gloo."""
        return False

    def shutdown(self) -> None:
        """Leave the group, even if operations are in flight, once the ranks' GPUs are done."""
        self._gpus.close()
        self.abort()

    def abort(self) -> None:
        """Leave the group without waiting for GPUs, whose work may read what is freed."""
        self._complete_no_more()
        self._dump_no_more()
        self._gpus.leave()
        for group in (self._inner, self._outer):
            if group is not None:
                group.close()

    # If ``asyncOp`` says that the caller waits at once, and no preparation is needed, the call
    # waits here and returns no work object, which torch allows: making one takes as long as a
    # collective of 4 KiB.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> BackendWork | None:
        """Reduce each tensor over all ranks, in place."""
        reduction, blocking = reduction_of(opts, tensors), _blocking(opts)
        if blocking and _alone(tensors) and (given := plain(tensors[0], REDUCED)):
            record = self.flight_recorder.begin("all_reduce", tensors)
            pending = self._group.all_reduce(given, None, reduction, blocking=True)
            return _waited(pending, record)
        if other := self._other(tensors):
            return other.allreduce(tensors, *_options(opts))
        start = partial(self._group.all_reduce, reduction=reduction, blocking=blocking)
        linear = Linear("all-reduce", reduction)
        return self._begun(
            "all_reduce", tensors, partial(self._each, tensors, start, linear=linear)
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> BackendWork | None:
        """Copy the root's tensors to all ranks."""
        root, blocking = opts.rootRank, _blocking(opts)
        if blocking and _alone(tensors) and (given := plain(tensors[0], MOVED)):
            record = self.flight_recorder.begin("broadcast", tensors)
            return _waited(self._group.broadcast(given, root=root, blocking=True), record)
        if other := self._other(tensors):
            return other.broadcast(tensors, *_options(opts))
        start = partial(self._group.broadcast, root=root, blocking=blocking)
        linear, changes = Linear("broadcast", root=root), self._rank != root
        begin = partial(self._each, tensors, start, copies=True, changes=changes, linear=linear)
        return self._begun("broadcast", tensors, begin)

    def reduce(self, tensors: list[Tensor], opts: Any) -> BackendWork | None:
        """Reduce each tensor over all ranks; the root gets the result, in place."""
        reduction, root, blocking = reduction_of(opts, tensors), opts.rootRank, _blocking(opts)
        if blocking and _alone(tensors) and (given := plain(tensors[0], REDUCED)):
            record = self.flight_recorder.begin("reduce", tensors)
            pending = self._group.reduce(given, None, reduction, root=root, blocking=True)
            return _waited(pending, record)
        if other := self._other(tensors):
            return other.reduce(tensors, *_options(opts))
        start = partial(self._group.reduce, reduction=reduction, root=root, blocking=blocking)
        linear, changes = Linear("reduce", reduction, root), self._rank == root
        begin = partial(self._each, tensors, start, changes=changes, linear=linear)
        return self._begun("reduce", tensors, begin)

    def barrier(self, opts: Any = None) -> BackendWork | None:
        """Return once all ranks have called this."""
        blocking = _blocking(opts)
        mark = bytearray(1)  # cheaper than a tensor
        address = ctypes.addressof(ctypes.c_char.from_buffer(mark))
        given = Elements(address, 1, "uint8", mark)
        group = self._group
        if blocking and not profiling():
            record = self.flight_recorder.begin("barrier")
            return _waited(group.all_reduce(given, blocking=True), record)

        def begin() -> BackendWork:
            return BackendWork([group.all_reduce(given, blocking=blocking)], [], self._completer)

        return self._begun("barrier", [], begin)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return once all ranks have called this; see :func:`monitored_barrier`."""
        record = self.flight_recorder.begin("barrier")
        self._monitored_barriers += 1
        try:
            monitored_barrier(
                self._store,
                f"monitored barrier/{self._outer.meeting}/{self._monitored_barriers}",
                self._rank,
                self._size,
                timeout_s=(self._timeout if timeout is None else timeout).total_seconds(),
                wait_all_ranks=wait_all_ranks,
            )
        except PeerError as error:
            raise PeerError(f"{error}{self._on_failure()}") from None
        if record is not None:
            record.end()

    def all_gather_single(
        self, output: Tensor, given: Tensor, opts: Any = None
    ) -> BackendWork | None:
        """Collect every rank's tensor in one, in the order of ranks."""
        blocking = _blocking(opts)
        if (
            blocking
            and not profiling()
            and (part := plain(given, MOVED))
            and (whole := plain(output, MOVED))
        ):
            record = self.flight_recorder.begin("_all_gather_base", [given], [output])
            return _waited(self._group.all_gather(part, whole, blocking=True), record)
        if other := self._other([given]):
            return other._allgather_base(output, given, *_options(opts))
        begin = partial(self._gather_single, output, given, blocking)
        return self._begun("_all_gather_base", [given], begin, outputs=[output])

    _allgather_base = all_gather_single

    def _gather_single(self, output: Tensor, given: Tensor, blocking: bool) -> BackendWork:
        start = partial(self._group.all_gather, blocking=blocking)
        return self._into(output, given, start, copies=True)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Collect every rank's tensor in a list, in the order of ranks."""
        if other := self._other(inputs):
            return other.allgather(outputs, inputs, *_options(opts))
        works = (self._gather_all(*pair) for pair in zip(outputs, inputs, strict=True))
        return self._all_begun("all_gather", inputs, works, outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Collect several tensors; ``outputs[r]`` are those of rank r."""
        if other := self._other(inputs):
            return other.allgather_coalesced(outputs, inputs, *_options(opts))
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        works = (self._gather_all(*pair) for pair in pairs)
        return self._all_begun("all_gather", inputs, works, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Collect several tensors, each in one."""
        if other := self._other(inputs):
            return other.allgather_into_tensor_coalesced(outputs, inputs, *_options(opts))
        pairs = zip(outputs, inputs, strict=True)
        works = (self._gather_single(*pair, _blocking(opts)) for pair in pairs)
        return self._all_begun("all_gather_into_tensor_coalesced", inputs, works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None
    ) -> BackendWork | None:
        """Reduce a tensor over all ranks; rank r gets the r-th part."""
        reduction, blocking = reduction_of(opts, [given]), _blocking(opts)
        if (
            blocking
            and not profiling()
            and (whole := plain(given, REDUCED))
            and (part := plain(output, REDUCED))
        ):
            record = self.flight_recorder.begin("_reduce_scatter_base", [given], [output])
            pending = self._group.reduce_scatter(whole, part, reduction, blocking=True)
            return _waited(pending, record)
        if other := self._other([given]):
            return other._reduce_scatter_base(output, given, *_options(opts))
        begin = partial(self._scatter_single, output, given, reduction, blocking)
        return self._begun("_reduce_scatter_base", [given], begin, outputs=[output])

    _reduce_scatter_base = reduce_scatter_single

    def _scatter_single(
        self, output: Tensor, given: Tensor, reduction: str, blocking: bool
    ) -> BackendWork:
        start = partial(self._group.reduce_scatter, reduction=reduction, blocking=blocking)
        return self._into(output, given, start)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> BackendWork:
        """Reduce a list of tensors over all ranks; rank r gets the r-th."""
        if other := self._other(outputs):
            return other.reduce_scatter(outputs, inputs, *_options(opts))

        def begin(output: Tensor, parts: list[Tensor]) -> BackendWork:
            reduction = reduction_of(opts, parts)
            if len({part.numel() for part in parts}) != 1:
                return self._reduce_to_each(output, parts, reduction)
            whole = torch.cat([part.reshape(-1) for part in parts])
            return self._scatter_single(output, whole, reduction, _blocking(opts))

        works = (begin(*pair) for pair in zip(outputs, inputs, strict=True))
        return self._all_begun("reduce_scatter", _flat(inputs), works, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Reduce several tensors over all ranks; rank r gets the r-th part of each."""
        if other := self._other(inputs):
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, *_options(opts))
        works = (
            self._scatter_single(output, given, reduction_of(opts, [given]), _blocking(opts))
            for output, given in zip(outputs, inputs, strict=True)
        )
        return self._all_begun("reduce_scatter_tensor_coalesced", inputs, works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> BackendWork:
        """Collect every rank's tensor at the root."""
        if other := self._other(inputs):
            return other.gather(outputs, inputs, *_options(opts))
        root, is_root = opts.rootRank, self._rank == opts.rootRank
        works = (
            self._to_each("gather", {root: given}, dict(enumerate(outputs[n])) if is_root else {})
            for n, given in enumerate(inputs)
        )
        return self._all_begun("gather", inputs, works, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> BackendWork:
        """Give every rank one of the root's tensors."""
        if other := self._other(outputs):
            return other.scatter(outputs, inputs, *_options(opts))
        root, is_root = opts.rootRank, self._rank == opts.rootRank
        works = (
            self._to_each("scatter", dict(enumerate(inputs[n])) if is_root else {}, {root: output})
            for n, output in enumerate(outputs)
        )
        return self._all_begun("scatter", _flat(inputs), works, outputs)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Send the r-th tensor to rank r; get the r-th from it."""
        if other := self._other(inputs):
            return other.alltoall(outputs, inputs, *_options(opts))
        sent, taken = dict(enumerate(inputs)), dict(enumerate(outputs))
        begin = partial(self._to_each, "all-to-all", sent, taken, outputs)
        return self._begun("all_to_all", inputs, begin, outputs=outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> BackendWork:
        """Send the r-th part to rank r; get the r-th from it. Sizes are of the first dimension."""
        if other := self._other([given]):
            sizes = list(output_sizes or ()), list(input_sizes or ())
            return other.alltoall_base(output, given, *sizes, *_options(opts))
        taken = dict(enumerate(parts_of(output, output_sizes, self._size)))
        sent = dict(enumerate(parts_of(given, input_sizes, self._size)))
        begin = partial(self._to_each, "all-to-all", sent, taken, [output])
        return self._begun("all_to_all", [given], begin, outputs=[output])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> BackendWork:
        """Send tensors to one rank."""
        if other := self._other(tensors):
            return other.send(tensors, peer, tag)
        begin = partial(self._messages, tensors, peer, tag, receives=False)
        return self._begun("send", tensors, begin, peer=peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> BackendWork:
        """Receive what a rank sends next."""
        if other := self._other(tensors):
            return other.recv(tensors, peer, tag)
        begin = partial(self._messages, tensors, peer, tag, receives=True)
        return self._begun("recv", tensors, begin, peer=peer)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> BackendWork:
        """Receive from whichever rank sends first; ``BackendWork._source_rank()`` says which."""
        if other := self._other(tensors):
            return other.recv_anysource(tensors, tag)
        begin = partial(self._messages, tensors, None, tag, receives=True)
        return self._begun("recv", tensors, begin, peer=-1)

    def _other(self, tensors: Sequence[Tensor]) -> ProcessGroup | None:
        """Return torch's group of another backend for the device of these tensors, if any."""
        if not tensors or tensors[0].is_cpu:
            return None
        found: ProcessGroup | None = self._gpus.other(tensors[0].device)
        return found

    def _begun(
        self,
        name: str,
        tensors: Sequence[Tensor],
        begin: Callable[[], BackendWork],
        *,
        outputs: Sequence[Tensor] | None = None,
        peer: int | None = None,
    ) -> BackendWork:
        """Begin an operation that the flight recorder and the profiler see."""
        record = self.flight_recorder.begin(name, tensors, outputs, peer)

        def recorded() -> BackendWork:
            work = begin()
            if record is None:
                return work
            record.tasks = [pending.task for pending in work.pending]
            work.record = record
            return work

        return profiled(name, tensors, recorded) if profiling() else recorded()

    def _all_begun(
        self, name: str, tensors: Sequence[Tensor], works: Iterable[BackendWork], results: list[Any]
    ) -> BackendWork:
        """Begin several works as one operation; the results are tensors or lists of them."""
        outputs = _flat([each if isinstance(each, list) else [each] for each in results])
        begin = partial(self._together, works, results)
        return self._begun(name, tensors, begin, outputs=outputs)

    def _each(
        self,
        tensors: Sequence[Tensor],
        start: Callable[[Elements], Pending],
        *,
        copies: bool = False,
        changes: bool = True,
        ordered: bool = True,
        linear: Linear | None = None,
    ) -> BackendWork:
        """Start a collective or a message on each tensor; GPUs of one host run it as ``linear``."""
        finishes: list[Callable[[], None]] = []
        pending: list[Pending | DeviceWork] = []
        for tensor in tensors:
            if linear is not None and not tensor.is_cpu:
                name = "GPUs" if self._group is self._outer else "GPUs, of futures"
                begun = self._gpus.begin(linear, tensor, name)
                if begun is not None:
                    pending.append(begun[0])
                    finishes += begun[1]
                    continue
            given = plain(tensor, MOVED if copies else REDUCED)
            if given is None:
                prepared = as_dense(tensor)
                if changes and prepared is not tensor:
                    finishes.append(copying(tensor, prepared))
                given = elements_of(prepared, copies=copies)
            pending.append(start(given))
        return BackendWork(pending, tensors, self._completer if ordered else None, finishes)

    def _messages(
        self,
        tensors: Sequence[Tensor],
        peer: int | None,
        tag: int = 0,
        part_of: Composed | None = None,
        *,
        receives: bool,
    ) -> BackendWork:
        call: Callable[..., Pending] = self._group.receive if receives else self._group.send
        start = partial(call, peer=peer, tag=tag, part_of=part_of)
        return self._each(tensors, start, copies=True, changes=receives, ordered=False)

    def _into(
        self,
        output: Tensor,
        given: Tensor,
        start: Callable[[Elements, Elements], Pending],
        *,
        copies: bool = False,
    ) -> BackendWork:
        """Start a collective from one tensor into another."""
        result = as_dense(output)
        finishes = [] if result is output else [copying(output, result)]
        into = elements_of(result, copies=copies)
        pending = start(elements_of(as_dense(given), copies=copies), into)
        return BackendWork([pending], [output], self._completer, finishes)

    def _gather_all(self, parts: Sequence[Tensor], given: Tensor) -> BackendWork:
        if all(part.numel() == given.numel() for part in parts):
            whole = given.new_empty(len(parts) * given.numel())
            work = self._gather_single(whole, given.reshape(-1), blocking=False)
            chunks = whole.view(len(parts), given.numel())
            pairs = zip(parts, chunks, strict=True)
            finishes = [copying(part, chunk.view(part.shape)) for part, chunk in pairs]
            return self._together([work], parts, finishes)
        copying(parts[self._rank], given.reshape(parts[self._rank].shape))()
        works = [
            self._each([part], partial(self._group.broadcast, root=rank), copies=True)
            for rank, part in enumerate(parts)
        ]
        return self._together(works, parts)

    def _reduce_to_each(
        self, output: Tensor, parts: Sequence[Tensor], reduction: str
    ) -> BackendWork:
        """Reduce parts that differ in size."""
        dense = [part.contiguous().clone() for part in parts]
        works = [
            self._each([part], partial(self._group.reduce, reduction=reduction, root=rank))
            for rank, part in enumerate(dense)
        ]
        own = dense[self._rank].view(output.shape)
        return self._together(works, [output], [copying(output, own)])

    def _together(
        self,
        works: Iterable[BackendWork],
        results: Any,
        finishes: Sequence[Callable[[], None]] = (),
    ) -> BackendWork:
        works = list(works)
        pending = [pending for work in works for pending in work.pending]
        finishes = [*(finish for work in works for finish in work.finishes), *finishes]
        return BackendWork(pending, results, self._completer, finishes)

    def _to_each(
        self,
        part_of: Composed,
        sent: dict[int, Tensor],
        taken: dict[int, Tensor],
        results: Any = None,
    ) -> BackendWork:
        """Send a tensor to each of some ranks, and receive one from each of some."""
        if self._rank in sent and self._rank in taken:
            copying(taken[self._rank], sent[self._rank].reshape(taken[self._rank].shape))()
        works = [
            self._messages([tensor], peer, part_of=part_of, receives=receives)
            for receives, tensors in ((False, sent), (True, taken))
            for peer, tensor in tensors.items()
            if peer != self._rank
        ]
        return self._together(works, results)


def _waited(pending: Pending, record: Record | None) -> BackendWork | None:
    """Wait; return None, which torch takes for a finished call."""
    if record is None:
        pending.wait()
        return None
    record.tasks = (pending.task,)
    pending.wait()
    record.end()
    return None


def _recorded(group: ProcessGroup | None) -> tuple[int, list[tuple[ProcessGroup, list[int]]]]:
    """Return this process's rank, and its groups with their global ranks, ``group`` among them."""
    known = [each for each in known_groups() if isinstance(each, ProcessGroup)]
    groups = [(each, dist.get_process_group_ranks(each)) for each in known]
    if group is not None and group not in known:
        groups.append((group, list(range(group.size()))))
    own = group.rank() if group is not None else 0
    return dist.get_rank() if dist.is_initialized() else own, groups


def _require_alive(own: int, ranks: Sequence[int]) -> None:
    """Raise PeerError if one of the ranks that are to join a group is known to have ended."""
    for known in known_groups():
        if isinstance(known, ProcessGroup):
            numbers = dist.get_process_group_ranks(known)
            for rank, how in known._outer.ended.items():
                if numbers[rank] in ranks:
                    raise PeerError(
                        f"rank {own}: the process of rank {ranks.index(numbers[rank])} {how}, and "
                        "so does not join the group"
                    )


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _alone(tensors: Sequence[Tensor]) -> bool:
    """Say whether this is one tensor and no profiler runs."""
    return len(tensors) == 1 and not profiling()


def _options(opts: Any) -> tuple[Any, ...]:
    """Return options as an argument: torch's own groups do not take None."""
    return () if opts is None else (opts,)


def _blocking(opts: Any) -> bool:
    """Say whether the caller waits at once, so that no other thread is woken."""
    return not getattr(opts, "asyncOp", True)
