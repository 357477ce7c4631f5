"""``torch.distributed.init_process_group("syncline")``: torch's collectives on our groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from syncline.errors import SynclineError, UserError
from syncline.groups import Elements, Group, Pending, Transport
from syncline.groups.chooser import Wanted
from syncline.parallel.untraced import untraced

__all__ = ["NAME", "Options", "ProcessGroup", "elements_of", "register"]

NAME = "syncline"
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
REDUCTIONS = {
    "SUM": "sum",
    "AVG": "avg",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "product",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
MOVED = {**DTYPES, torch.bool: "uint8"}
"""What elements that are only copied pass for, where their dtype is known."""
# Its stubs have overloads for calls that C++ alone makes.
TorchsProcessGroup: Any = dist.ProcessGroup
SUM = dist.ReduceOp.SUM
OPERATORS = {getattr(dist.ReduceOp, torchs): ours for torchs, ours in REDUCTIONS.items()}


def register() -> None:
    """Make the backend known to torch; doing so again changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _created, extended_api=True, devices=["cpu"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``pg_options`` of ``init_process_group`` and ``new_group`` may say.

    See :class:`~syncline.groups.Group` for what the values mean.
    """

    transport: Transport = "auto"
    """Such as ``"ucx"``: no shared memory, also inside a host."""
    choices: Wanted = "measured"
    """Which algorithm is taken for which size; those of rank 0 count."""


def _created(group: Any, options: Options | None) -> ProcessGroup:
    if not isinstance(options, Options | None):
        raise UserError(
            f"backend syncline expects pg_options of syncline.parallel.backend.Options, found "
            f"{type(options).__name__}; give those, or leave them out"
        )
    return ProcessGroup(
        group.store, group.group_rank, group.group_size, group.timeout, options or Options()
    )


@untraced
class Work(dist.Work):
    """Collectives under way, and what is left to do with their results."""

    def __init__(
        self,
        pending: Sequence[Pending],
        results: Any,
        completer: Completer,
        finishes: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__()
        self._completer = completer
        self.pending = pending
        self.finishes = finishes
        self._results = results
        self._lock = threading.Lock()
        self._future: Future | None = None
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Say whether the results are in place, or will never be."""
        if not all(pending.ended for pending in self.pending):
            return False
        with contextlib.suppress(SynclineError):  # exception() has it
            self.wait()
        return True

    def is_success(self) -> bool:
        """Say whether nothing went wrong so far."""
        return self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the results are in place.

        Args:
            timeout: how long at most; after less than the group's own timeout the work stays under
                way, and may be waited for again.

        Raises:
            PeerError: a rank has ended, or did not answer in time.
            MismatchError: the ranks called different collectives.
            UserError: this is a fork of the process that began it.
        """
        # torch gives 0 for none.
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        try:
            for pending in self.pending:
                if deadline_s is None:
                    pending.wait()
                else:
                    pending.wait(max(deadline_s - time.monotonic(), 0.0))
        except BaseException as error:
            if any(pending.ended and not pending.done for pending in self.pending):
                self._error = error
            raise
        with self._lock:
            for finish in self.finishes:
                finish()
            self.finishes = ()
        return True

    def then(self, finishes: Sequence[Callable[[], None]], results: Any) -> Work:
        """Return the same work with more to do at its end, and other results."""
        return Work(self.pending, results, self._completer, [*self.finishes, *finishes])

    def synchronize(self) -> None:
        """Return once the results are in place."""
        self.wait()

    def result(self) -> Any:
        """Return the tensors."""
        return self._results

    def get_future(self) -> Future:
        """Return a future of the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future(self._completer)
        self._future.complete(self._waited_for)
        return self._future

    def _waited_for(self) -> Any:
        self.wait()
        return self._results


class Completer:
    """A thread on which a group's futures are completed and what is chained to them runs.

    Both happen in the order in which the program asked for them, so in the same order on all ranks,
    wherever and whenever messages arrive. What is chained may begin collectives itself, and wait
    for them, as PowerSGD does.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()
        self.ident = 0
        """Of the thread, while it runs: whether the caller is on it is asked at every call."""

    def run(self, job: Callable[[], None]) -> None:
        """Run a job after those before it; from the thread itself, at once.

        Raises:
            UserError: this is a fork, which does not have the thread.
        """
        if os.getpid() != self._process:
            raise UserError(
                "a fork was to complete a future of a group that its parent joined; use the future "
                "in the parent, or make a new group in the fork"
            )
        if threading.get_ident() == self.ident:
            job()
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="syncline futures", daemon=True
                )
                self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once it has nothing left to do."""
        self._jobs.put(None)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            job()
            del job
        self.ident = 0  # another thread may be given it


@untraced
class Future(torch.futures.Future[Any]):
    """A future whose callbacks run on its group's thread, even if it is complete already."""

    def __init__(self, completer: Completer) -> None:
        super().__init__()
        self._completer = completer

    def complete(self, value: Callable[[], Any]) -> None:
        """Take what ``value`` returns, or raises, when it is its turn."""

        def job() -> None:
            try:
                result = value()
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(result)

        self._completer.run(job)

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Return a future of what ``callback`` makes of this one."""
        after = Future(self._completer)
        after.complete(lambda: callback(self))
        return after


@untraced
class ProcessGroup(TorchsProcessGroup):  # type: ignore[misc]
    """A process group of torch that runs on a :class:`~syncline.groups.Group`.

    Args:
        store: where the ranks meet; torch gives each group a part of its own.
        rank: this rank in the group.
        size: how many ranks it has.
        timeout: deadline of every wait.
        options: how the ranks are joined, and what they run.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, options: Options
    ) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._store = store
        self._options = options
        self._name = self._description = ""
        self._outer = self._joined("calls")
        self._inner: Group | None = None
        self._completer = Completer()
        # Also when nobody refers to the group any more, be it on that thread.
        self._complete_no_more = weakref.finalize(self, self._completer.close)

    @property
    def _group(self) -> Group:
        """What a collective runs on.

        Those begun where a future is completed have a group of their own: beside those of the main
        thread, they would come in another order on every rank.
        """
        if threading.get_ident() != self._completer.ident:
            return self._outer
        if self._inner is None:
            self._inner = self._joined("calls of futures")
        return self._inner

    def _joined(self, name: str) -> Group:
        return Group(
            self._store,
            self._rank,
            self._size,
            name=name,
            timeout_s=self._timeout.total_seconds(),
            transport=self._options.transport,
            choices=self._options.choices,
        )

    @property
    def choices_source(self) -> str:
        """Where the choice of algorithms comes from: built in, or measured when and kept where."""
        return self._outer.chooser.source

    # ------------------------------------------------------------------ what it is

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name to give to ``init_process_group``."""
        return NAME

    # Torch's own class keeps these in backends, of which this group has none.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch has given to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take a name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch has given to the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take a description."""
        self._description = description

    @property
    def timeout(self) -> timedelta:
        """Deadline of every wait."""
        return self._timeout

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def shutdown(self) -> None:
        """Leave the group."""
        self._complete_no_more()
        for group in (self._inner, self._outer):
            if group is not None:
                group.close()

    def abort(self) -> None:
        """Leave the group, whatever is under way."""
        self.shutdown()

    # ------------------------------------------------------------------ collectives

    # Where the caller waits at once, as ``asyncOp`` says, what needs no preparation is waited for
    # here and there is no Work, which torch allows: to make one would take as long as a collective
    # of 4 KiB.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work | None:
        """Reduce each tensor over all ranks, in place."""
        reduction, attended = _reduction(opts, tensors), _attended(opts)
        if attended and len(tensors) == 1 and (given := _plain(tensors[0], DTYPES)):
            return _waited(self._group.all_reduce(given, None, reduction, attended=True))
        return self._each(
            tensors,
            lambda given: self._group.all_reduce(given, reduction=reduction, attended=attended),
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work | None:
        """Reduce each tensor over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        """Copy the root's tensors to all ranks."""
        root, attended = opts.rootRank, _attended(opts)
        if attended and len(tensors) == 1 and (given := _plain(tensors[0], MOVED)):
            return _waited(self._group.broadcast(given, root=root, attended=True))
        return self._each(
            tensors,
            lambda given: self._group.broadcast(given, root=root, attended=attended),
            copies=True,
            changes=self._rank != root,
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        """Reduce each tensor over all ranks; the root gets the result, in place."""
        reduction, root, attended = _reduction(opts, tensors), opts.rootRank, _attended(opts)
        if attended and len(tensors) == 1 and (given := _plain(tensors[0], DTYPES)):
            return _waited(self._group.reduce(given, None, reduction, root=root, attended=True))
        return self._each(
            tensors,
            lambda given: self._group.reduce(
                given, reduction=reduction, root=root, attended=attended
            ),
            changes=self._rank == root,
        )

    def barrier(self, opts: Any = None) -> Work | None:
        """Return once all ranks have come here."""
        attended = _attended(opts)
        mark = bytearray(1)  # cheaper than a tensor
        address = ctypes.addressof(ctypes.c_char.from_buffer(mark))
        given = Elements(address, 1, "uint8", mark)
        pending = self._group.all_reduce(given, attended=attended)
        return _waited(pending) if attended else Work([pending], [], self._completer)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work | None:
        """Collect every rank's tensor in one, in the order of ranks."""
        attended = _attended(opts)
        if attended and (part := _plain(given, MOVED)) and (whole := _plain(output, MOVED)):
            return _waited(self._group.all_gather(part, whole, attended=True))
        return self._gather_single(output, given, attended)

    _allgather_base = all_gather_single

    def _gather_single(self, output: torch.Tensor, given: torch.Tensor, attended: bool) -> Work:
        return self._into(
            output,
            given,
            lambda result, part: self._group.all_gather(part, result, attended=attended),
            copies=True,
        )

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        """Collect every rank's tensor in a list, in the order of ranks."""
        del opts
        works = [self._gather_all(*pair) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        """Collect several tensors; ``outputs[r]`` are those of rank r."""
        del opts
        works = [
            self._gather_all([of_rank[number] for of_rank in outputs], tensor)
            for number, tensor in enumerate(inputs)
        ]
        return self._together(works, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors, each in one."""
        attended = _attended(opts)
        works = [self._gather_single(*pair, attended) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work | None:
        """Reduce a tensor over all ranks; rank r gets the r-th part."""
        reduction, attended = _reduction(opts, [given]), _attended(opts)
        if attended and (whole := _plain(given, DTYPES)) and (part := _plain(output, DTYPES)):
            return _waited(self._group.reduce_scatter(whole, part, reduction, attended=True))
        return self._scatter_single(output, given, reduction, attended)

    _reduce_scatter_base = reduce_scatter_single

    def _scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, reduction: str, attended: bool
    ) -> Work:
        return self._into(
            output,
            given,
            lambda result, whole: self._group.reduce_scatter(
                whole, result, reduction, attended=attended
            ),
        )

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> Work:
        """Reduce a list of tensors over all ranks; rank r gets the r-th."""
        works = []
        for output, parts in zip(outputs, inputs, strict=True):
            if len({part.numel() for part in parts}) == 1:
                whole = torch.cat([part.reshape(-1) for part in parts])
                reduction = _reduction(opts, parts)
                works.append(self._scatter_single(output, whole, reduction, _attended(opts)))
            else:
                works.append(self._reduce_to_each(output, parts, _reduction(opts, parts)))
        return self._together(works, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors over all ranks; rank r gets the r-th part of each."""
        works = [
            self._scatter_single(output, given, _reduction(opts, [given]), _attended(opts))
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._together(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        """Collect every rank's tensor at the root."""
        works = []
        for number, tensor in enumerate(inputs):
            sent = {opts.rootRank: tensor}
            taken = dict(enumerate(outputs[number])) if self._rank == opts.rootRank else {}
            works.append(self._to_each(sent, taken))
        return self._together(works, outputs)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> Work:
        """Give every rank one of the root's tensors."""
        works = []
        for number, tensor in enumerate(outputs):
            sent = dict(enumerate(inputs[number])) if self._rank == opts.rootRank else {}
            works.append(self._to_each(sent, {opts.rootRank: tensor}))
        return self._together(works, outputs)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Send the r-th tensor to rank r; get the r-th from it."""
        del opts
        return self._to_each(dict(enumerate(inputs)), dict(enumerate(outputs)), outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send the r-th part to rank r; get the r-th from it. Sizes are of the first dimension."""
        del opts
        taken = _parts(output, output_sizes, self._size)
        sent = _parts(given, input_sizes, self._size)
        return self._to_each(dict(enumerate(sent)), dict(enumerate(taken)), [output])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        """Send tensors to one rank."""
        return self._each(
            tensors,
            lambda given: self._group.send(given, peer=peer, tag=tag),
            copies=True,
            changes=False,
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        """Receive what a rank sends next."""
        return self._each(
            tensors, lambda result: self._group.receive(result, peer=peer, tag=tag), copies=True
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Refuse: this backend receives from ranks that are named.

        Raises:
            UserError: always.
        """
        del tensors, tag
        raise UserError("backend syncline: recv() needs the rank to receive from (src=...)")

    # ------------------------------------------------------------------ inside

    def _each(
        self,
        tensors: Sequence[torch.Tensor],
        start: Callable[[Elements], Pending],
        *,
        copies: bool = False,
        changes: bool = True,
    ) -> Work:
        """Start a collective on each tensor, in place where it changes them."""
        finishes: list[Callable[[], None]] = []
        pending = []
        for tensor in tensors:
            given = _plain(tensor, MOVED if copies else DTYPES)
            if given is None:
                dense = _dense(tensor)
                if changes and dense is not tensor:
                    finishes.append(_copying(tensor, dense))
                given = elements_of(dense, copies=copies)
            pending.append(start(given))
        return Work(pending, tensors, self._completer, finishes)

    def _into(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        start: Callable[[Elements, Elements], Pending],
        *,
        copies: bool = False,
    ) -> Work:
        """Start a collective from one tensor into another."""
        dense = _dense(output)
        finishes = [] if dense is output else [_copying(output, dense)]
        pending = start(
            elements_of(dense, copies=copies), elements_of(_dense(given), copies=copies)
        )
        return Work([pending], [output], self._completer, finishes)

    def _gather_all(self, parts: Sequence[torch.Tensor], given: torch.Tensor) -> Work:
        if all(part.numel() == given.numel() for part in parts):
            whole = given.new_empty(len(parts) * given.numel())
            work = self._gather_single(whole, given.reshape(-1), attended=False)
            chunks = whole.view(len(parts), given.numel())
            pairs = zip(parts, chunks, strict=True)
            return work.then(
                [_copying(part, chunk.view(part.shape)) for part, chunk in pairs], parts
            )
        _copying(parts[self._rank], given.reshape(parts[self._rank].shape))()
        works = [
            self._each([part], partial(self._group.broadcast, root=rank), copies=True)
            for rank, part in enumerate(parts)
        ]
        return self._together(works, parts)

    def _reduce_to_each(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: str
    ) -> Work:
        """Reduce parts that differ in size."""
        dense = [part.contiguous().clone() for part in parts]
        works = [
            self._each([part], partial(self._group.reduce, reduction=reduction, root=rank))
            for rank, part in enumerate(dense)
        ]
        own = dense[self._rank].view(output.shape)
        return self._together(works, [output]).then([_copying(output, own)], [output])

    def _together(self, works: Sequence[Work], results: Any) -> Work:
        pending = [pending for work in works for pending in work.pending]
        finishes = [finish for work in works for finish in work.finishes]
        return Work(pending, results, self._completer, finishes)

    def _to_each(
        self,
        sent: dict[int, torch.Tensor],
        taken: dict[int, torch.Tensor],
        results: Any = None,
    ) -> Work:
        """Send a tensor to each of some ranks, and take one from each of some."""
        if self._rank in sent and self._rank in taken:
            _copying(taken[self._rank], sent[self._rank].reshape(taken[self._rank].shape))()
        works = [self.send([t], peer) for peer, t in sent.items() if peer != self._rank]
        works += [self.recv([t], peer) for peer, t in taken.items() if peer != self._rank]
        return self._together(works, results if results is not None else list(taken.values()))


def _plain(tensor: torch.Tensor, dtypes: Mapping[torch.dtype, str]) -> Elements | None:
    """Return the elements of a tensor that is as it must be: in order in memory, of such a dtype.

    What :func:`_dense` and :func:`elements_of` do for all, in a fifth of their time.
    """
    dtype = dtypes.get(tensor.dtype)
    if (
        dtype is None
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    return Elements(tensor.data_ptr(), tensor.numel(), dtype, tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its elements in order: the same, where it does."""
    _require_dense(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous()


def _require_dense(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UserError(
            f"backend syncline exchanges dense tensors on the CPU, not {tensor.layout} on "
            f"{tensor.device}; for CUDA make a group of its own: "
            "torch.distributed.new_group(backend='nccl')"
        )


def elements_of(tensor: torch.Tensor, *, copies: bool) -> Elements:
    """Return a contiguous tensor's elements.

    Args:
        tensor: on the CPU, dense.
        copies: they are only moved, so they may as well be bytes.
    """
    _require_dense(tensor)
    if tensor.is_complex() and not copies:
        tensor = torch.view_as_real(tensor)
    dtype = DTYPES.get(tensor.dtype)
    if copies and (dtype is None or dtype == "bool"):
        return Elements(tensor.data_ptr(), tensor.nbytes, "uint8", tensor)
    if dtype is None:
        raise UserError(
            f"backend syncline cannot reduce elements of {tensor.dtype} "
            f"(it can: {', '.join(DTYPES.values())})"
        )
    return Elements(tensor.data_ptr(), tensor.numel(), dtype, tensor)


def _waited(pending: Pending) -> Work | None:
    """Wait; return what torch takes for the Work of a call that it need not wait for."""
    pending.wait()
    return None


def _attended(opts: Any) -> bool:
    """Say whether the caller waits at once, so that no other thread need be woken."""
    return not getattr(opts, "asyncOp", True)


def _reduction(opts: Any, tensors: Sequence[torch.Tensor]) -> str:
    operator = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if operator == SUM:
        return "sum"
    for torchs, ours in OPERATORS.items():
        if operator == torchs:
            if ours not in ("sum", "avg") and any(tensor.is_complex() for tensor in tensors):
                raise UserError(f"the reduction {ours!r} is not for complex numbers")
            return ours
    raise UserError(
        f"backend syncline does not know the reduction {operator} (known: {', '.join(REDUCTIONS)})"
    )


def _parts(
    tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int
) -> tuple[torch.Tensor, ...]:
    if sizes:
        return tuple(tensor.split(list(sizes)))
    if len(tensor) % ranks:
        raise UserError(f"a first dimension of {len(tensor)} cannot be shared out to {ranks} ranks")
    return tuple(tensor.chunk(ranks)) if len(tensor) else (tensor,) * ranks


def _copying(to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            to.copy_(source)

    return copy
