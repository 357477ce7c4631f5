"""``BackendWork``: what torch waits for, with its future and the profiler's ranges around it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from syncline.comm.backend.flight_recorder import Record
from syncline.comm.devices.device_group import DeviceWork
from syncline.comm.groups import Pending
from syncline.errors import SynclineError, UserError
from syncline.torch_private import (
    RecordFunction,
    end_range,
    make_wrapper_subclass,
    set_failed,
    tree_leaves,
    untraced,
)

Device = int | str | torch.device  # a device, as torch's futures take it


@untraced
class BackendWork(dist.Work):
    """Collectives or messages in flight, and functions to call with their results.

    The completer completes futures in the order in which they were asked for. Without one, a new
    thread completes this one. Messages between two ranks need that, since they may arrive in
    another order. The first wait that succeeds calls ``finishes``.
    """

    def __init__(
        self,
        pending: Sequence[Pending | DeviceWork],
        results: Any,
        completer: Completer | None,
        finishes: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__()
        self._completer = completer
        self.pending = pending
        self.finishes = finishes
        self._results = results
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self.record: Record | None = None
        self.profiled: torch.futures.Future[None] | None = None
        """Its completion ends the profiler's range. It comes before any wait returns, because the
        program may stop the profiler then, which frees the range."""

    def is_completed(self) -> bool:
        """Say whether the results are in place, or never will be."""
        if not all(pending.ended for pending in self.pending):
            return False
        with contextlib.suppress(SynclineError):  # exception() has it
            self.wait()
        return True

    def is_success(self) -> bool:
        """Say whether nothing has failed so far."""
        return self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if the operation has failed."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the results are in place; raise as :meth:`.Pending.wait` does.

        After a timeout below the group's own the work stays in flight, and may be waited for again.
        """
        # torch passes 0 for no timeout.
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        try:
            for pending in self.pending:
                left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
                pending.wait(left_s)
        except BaseException as error:
            if any(pending.ended and not pending.done for pending in self.pending):
                self._error = error
                with self._lock:
                    self._end_range()
            raise
        with self._lock:
            for finish in self.finishes:
                finish()
            self.finishes = ()
            self._end_range()
        if self.record is not None:
            self.record.end()
            self.record = None
        return True

    def _end_range(self) -> None:
        if self.profiled is not None and not self.profiled.done():
            self.profiled.set_result(None)

    def synchronize(self) -> None:
        """Return once the results are in place."""
        self.wait()

    def _source_rank(self) -> int:
        """Return the sender of a received message; raise RuntimeError if nothing was received."""
        peer = self.pending[0].peer if self.pending else None
        if peer is None:
            raise RuntimeError("only a receive has a source rank, and only once it is done")
        return peer

    source_rank = _source_rank

    def result(self) -> Any:
        """Return the tensors."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            # Waiting for the future makes the waiter's streams wait for those of this thread.
            tensors = [each for each in tree_leaves(self._results) if torch.is_tensor(each)]
            devices: list[Device] = list({each.device for each in tensors if not each.is_cpu})
            future: torch.futures.Future[Any] = (
                torch.futures.Future(devices=devices)
                if self._completer is None
                else Future(self._completer, devices)
            )
            self._future = future
        if isinstance(future, Future):
            future.complete(self._waited_for, self.pending)
        else:
            threading.Thread(
                target=_complete,
                args=(future, self._waited_for, self.pending),
                name="syncline future of a message",
                daemon=True,
            ).start()
        return future

    def _waited_for(self) -> Any:
        self.wait()
        return self._results


class Completer:
    """A thread that completes a group's futures and runs their callbacks.

    Both happen in the order in which the program asked for them, so in the same order on all ranks.
    A callback may begin collectives itself and wait for them, as PowerSGD's does.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()
        self.ident = 0
        """The thread's identifier while it runs: every call checks whether it is on this thread."""

    def run(self, job: Callable[[], None]) -> None:
        """Run a job after earlier ones, or at once on the thread itself; UserError in a fork."""
        if os.getpid() != self._process:
            raise UserError(
                "a fork cannot complete a future of a group that its parent joined; use the future "
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
        self.ident = 0  # another thread may get this identifier


@untraced
class Future(torch.futures.Future[Any]):
    """A future whose callbacks run on its group's thread, even if it is complete already."""

    def __init__(self, completer: Completer, devices: Sequence[Device] = ()) -> None:
        super().__init__(devices=list(devices))
        self._completer = completer
        self._devices = devices

    def complete(
        self, value: Callable[[], Any], awaited: Sequence[Pending | DeviceWork] = ()
    ) -> None:
        """Complete it with what ``value`` returns or raises, once ``awaited`` have ended."""
        self._completer.run(partial(_complete, self, value, awaited))

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Return a future of the result of ``callback``."""
        after = Future(self._completer, self._devices)
        after.complete(lambda: callback(self))
        return after


LONGEST_EXIT_S = 2.0
"""How long the end of the process waits for threads that are in torch, or in a callback."""
LATE = -1  # priority of the process's finalizer: after those that finish exchanges


class _UntilExit:
    """A context for several threads at once, which none can enter once the process is ending.

    A thread that tries blocks until the process has ended. Entering it twice is allowed.

    Threads that complete futures call torch only inside it. Python up to 3.13 stops a daemon thread
    that returns from native code once the interpreter is ending. Inside torch, that aborts the
    process ("terminate called without an active exception").
    """

    def __init__(self) -> None:
        self._process = -1
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}
        self._ending = False

    def __enter__(self) -> None:
        if os.getpid() != self._process:  # the first use, or a fork, where no thread is inside
            self._begin()
            self._process = os.getpid()
            Finalize(None, self._end, exitpriority=LATE)
        thread = threading.get_ident()
        with self._changed:
            if not self._ending or thread in self._depths:
                self._depths[thread] = self._depths.get(thread, 0) + 1
                return
        threading.Event().wait()

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._depths[thread] -= 1
            if not self._depths[thread]:
                del self._depths[thread]
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            own = {threading.get_ident()}
            self._changed.wait_for(lambda: self._depths.keys() <= own, LONGEST_EXIT_S)


until_exit = _UntilExit()


def _complete(
    future: torch.futures.Future[Any],
    value: Callable[[], Any],
    awaited: Sequence[Pending | DeviceWork],
) -> None:
    """Complete a future with what ``value`` returns or raises once ``awaited`` have ended."""
    for pending in awaited:
        with contextlib.suppress(SynclineError):  # value() raises it
            pending.wait()
    with until_exit:
        try:
            result = value()
        except Exception as error:
            set_failed(future, Failure.of(error), _raised)
        else:
            future.set_result(result)


class Failure(torch.Tensor):
    """The value of a failed future for C++: a tensor that raises the error whenever it is used.

    Only C++ can complete a future with an error. Torch's own ``set_exception`` completes it with
    the exception as its value. DDP's reducer then takes the first of no tensors, and crashes.
    """

    error: BaseException

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make one of an error."""
        made: Failure = make_wrapper_subclass(cls, (0,))
        made.error = error
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, _: Any, __: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).error


def _raised(failure: Failure) -> NoReturn:
    raise failure.error


OPERATORS = {
    "all_reduce": "allreduce_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "barrier": "barrier",
    "all_gather": "allgather_",
    "_all_gather_base": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_",
    "send": "send",
    "recv": "recv_",
}
"""Torch's own operators by the names of backends' operations. Torch calls them only for backends in
C++."""


def profiled(name: str, tensors: Sequence[Any], begin: Callable[[], BackendWork]) -> BackendWork:
    """Begin an operation under two ranges of the running profiler.

    They are like Gloo's: ``c10d::allreduce_`` is the call, with the sizes of its tensors, and
    ``syncline:all_reduce`` lasts until the results are in place.
    """
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    with RecordFunction(f"c10d::{OPERATORS[name]}", given):
        until_done = record_function(f"syncline:{name}")
        until_done.__enter__()
        work = begin()
        ended: torch.futures.Future[None] = torch.futures.Future()
        end_range(until_done, ended)
        work.profiled = ended
        work.get_future()  # waits for it where the program does not, or does so later
    return work
