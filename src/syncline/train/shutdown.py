"""Shutdown: finish messages and updates when a process ends or its model is dropped.

The other ranks wait for this one's messages, so these are still sent. A deferred update is applied,
or its loss is reported on standard error and by the exit code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import sys
import time
import weakref
from multiprocessing.util import Finalize
from threading import Thread
from typing import TYPE_CHECKING

from syncline.errors import PeerError, SynclineError
from syncline.train.measure.keepalive import BEFORE_RELEASED

if TYPE_CHECKING:
    from syncline.train.engine.engine import Engine
    from syncline.train.overlap.deferral import Deferral

SILENCE_S = 10.0
"""After this long, an exiting process reports that it still waits for the others, or that a thread
of its own has not ended: on a busy machine it may take a second until it runs."""
PATIENCE_AFTER_ERROR_S = 5.0
"""A process that exits by an exception waits at most this long for the next message: the others
will notice its exit."""
THREADS_S = 1.0  # how long threads that may wait for a lost peer are given to end
RELEASE_S = 0.05  # how long an exiting process gives Gloo's threads to release what they hold
FINISHING = BEFORE_RELEASED + 1  # priority of a finalizer: before all others
AWAITING = BEFORE_RELEASED  # right after that
LAST = -1000  # after all others


def finish_on_shutdown(deferral: Deferral, engine: Engine) -> Finalize[None]:
    """Finish what is pending when the process ends; the result's ``cancel`` revokes that.

    ``multiprocessing`` runs its finalizers at the end of every Python process, even in its own
    children, where ``atexit`` does not run. A fork never runs those of its parent.
    """
    for thread in engine.threads:
        Finalize(thread, _await, (weakref.ref(thread),), exitpriority=AWAITING)
    references = weakref.ref(deferral), weakref.ref(engine)
    return Finalize(engine, _shut_down, references, exitpriority=FINISHING)


@functools.cache
def let_gloo_finish() -> None:
    """Let Gloo's threads release the last all-reduce before the interpreter exits.

    From torch 2.13 on, its work refers to a Python object. If Gloo's thread is the last to release
    it and the interpreter is exiting, Python stops the thread in C++ code, which aborts the
    process. Torch's own wrapper has this problem, too.
    """
    Finalize(None, time.sleep, (RELEASE_S,), exitpriority=LAST + 1)


def _shut_down(deferral_of: weakref.ref[Deferral], engine_of: weakref.ref[Engine]) -> None:
    deferral, engine = deferral_of(), engine_of()
    if engine is None:
        return
    abandons = False  # messages, which the threads may wait for
    if deferral is not None:
        abandons = _finish(deferral, engine)
    else:
        # The model was dropped, but other ranks may still use theirs.
        try:
            _send_the_rest(engine)
        except SynclineError:  # nothing is lost here
            abandons = True
    engine.close(0 if abandons else SILENCE_S)
    if not abandons and any(thread.is_alive() for thread in engine.threads):
        _say(f"rank {engine.rank}: a thread that exchanges gradients still runs after the last one")


def _await(thread_of: weakref.ref[Thread]) -> None:
    """Wait until a thread of an engine has ended.

    Otherwise the exiting interpreter stops it inside C++ code, which aborts the process: in the
    backend's wait for a peer, or in the destructor of the process group.
    """
    thread = thread_of()
    if thread is None:
        return
    thread.join(THREADS_S)
    if thread.is_alive() and multiprocessing.parent_process() is None:
        _end_early()


def _finish(deferral: Deferral, engine: Engine) -> bool:
    """Finish messages and updates; return whether messages had to be abandoned."""
    lost: BaseException | None = None
    try:
        _send_the_rest(engine)
        deferral.synchronize()
    except BaseException as error:  # Ctrl-C too: the process ends anyway, and this must be reported
        lost = error
        if not isinstance(error, SynclineError):
            error = SynclineError(
                f"rank {engine.rank}: the end of the process was interrupted by {error!r}"
            )
        engine.fail(error)
    shown = _exception()
    if lost is not None and deferral.anything_deferred and shown is not lost:
        text = str(lost) if isinstance(lost, SynclineError) else repr(lost)
        if shown is None:
            _say(f"rank {engine.rank} ended before its last update, which is lost: {text}")
            _end_early()
        else:
            _say(f"rank {engine.rank}: the last update is lost: {text}")
    return lost is not None


def _send_the_rest(engine: Engine) -> None:
    patience_s = engine.timeout_s
    if _exception() is not None:
        patience_s = min(PATIENCE_AFTER_ERROR_S, patience_s)
    elif engine.finishes(min(SILENCE_S, patience_s)):
        return
    else:
        _say(f"rank {engine.rank} waits for the other ranks, to make the last update with them")
    if not engine.finishes(patience_s):
        raise PeerError(
            f"no gradient has arrived for {patience_s:g} s; see the other ranks' output, and "
            "resume all ranks from the last checkpoint"
        )


def _exception() -> BaseException | None:
    """Return the exception that ends the process, if Python shows it."""
    handled = sys.exception()  # a child of multiprocessing runs finalizers before it shows it
    if handled is not None:
        return None if isinstance(handled, SystemExit) else handled
    shown: BaseException | None = getattr(sys, "last_value", None)
    return shown


def _say(text: str) -> None:
    print(f"syncline: {text}", file=sys.stderr, flush=True)


def _end_early() -> None:
    """End with exit code 1, which exit handlers cannot set, once other finalizers have run."""
    Finalize(None, _end, exitpriority=LAST)


def _end() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there
            stream.flush()
    os._exit(1)
