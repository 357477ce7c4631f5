"""A flight recorder: the last operations of each rank, written to files when one fails."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from syncline import _native
from syncline.errors import UserError
from syncline.plan.files import user_cache, write_atomically

DEFAULT_ENTRIES = 2000  # as many as NCCL keeps
FORMAT_VERSION = "2.10"  # the version of NCCL's format that torch's analyser reads
PREFIX = "nccl"  # the start of operations' names; torch's analyser refuses ``syncline``
FLAT = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
"""Collectives on lists of tensors. As in NCCL's format, such a list counts as one flat tensor."""
POLL_S = 0.25  # how often a rank checks whether another has asked for dumps
LONGEST_WAIT_S = 2.0
"""How long a rank whose operation has failed waits for the other ranks' dumps. After that its
process may end, and ``torchrun`` then ends the others."""

Kind = tuple[tuple[int, ...], torch.dtype]  # size and dtype of a tensor


@dataclass(slots=True, eq=False)
class Record:
    """One operation."""

    name: str
    inputs: Sequence[Kind]
    outputs: Sequence[Kind]
    number: tuple[int, int]  # the numbers of collectives and messages so far, including this one
    peer: int | None  # the peer of a message, -1 for any rank; None for a collective
    created_ns: int
    ended_ns: int = 0
    tasks: Sequence[_native.Task | None] | None = None
    """The native tasks, once begun. They do not keep the tensors alive."""

    def end(self) -> None:
        """Note that the results are in place."""
        self.ended_ns = time.time_ns()
        if self.peer == -1:
            self.peer = self.source
        self.tasks = ()

    @property
    def source(self) -> int | None:
        """The peer of a message; if any rank may send it, -1 until one has."""
        if self.peer == -1 and self.tasks and isinstance(self.tasks[0], _native.Message):
            return self.tasks[0].peer
        return self.peer

    @property
    def state(self) -> str:
        """``scheduled``, ``started`` or ``completed``, as NCCL calls them."""
        if self.tasks is None:
            return "scheduled"
        return "completed" if all(task is None or task.done for task in self.tasks) else "started"


class FlightRecorder:
    """The last operations that a rank has begun on a group; 0 entries: they are only counted."""

    def __init__(self, entries: int) -> None:
        self.records: deque[Record] = deque(maxlen=entries)
        self.collectives = 0
        self.messages = 0

    @property
    def begun(self) -> int:
        """The number of operations so far."""
        return self.collectives + self.messages

    def begin(
        self,
        name: str,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] | None = None,
        peer: int | None = None,
    ) -> Record | None:
        """Record an operation by the name of torch's other backends, such as ``all_reduce``.

        ``outputs=None``: it is in place. ``peer`` is that of a message, -1 for any rank. Return
        None if operations are only counted.
        """
        if peer is None:
            self.collectives += 1
        else:
            self.messages += 1
        if not self.records.maxlen:
            return None
        kinds = _kinds(inputs), _kinds(inputs if outputs is None else outputs)
        number = self.collectives, self.messages
        record = Record(name, *kinds, number, peer, time.time_ns())
        self.records.append(record)
        return record

    def entries(self, group: Any, number: int) -> list[dict[str, Any]]:
        """Return the records in NCCL's format without ``record_id``; ``number`` is the group's."""
        return [
            {
                "pg_id": number,
                "process_group": [group.getGroupName(), group.getGroupDesc()],
                "collective_seq_id": record.number[0],
                "p2p_seq_id": record.number[1],
                "op_id": sum(record.number),
                "profiling_name": f"{PREFIX}:{record.name}{_ends(record, group.rank())}",
                "time_created_ns": record.created_ns,
                "time_discovered_started_ns": 0 if record.tasks is None else record.created_ns,
                "time_discovered_completed_ns": record.ended_ns,
                **_described("input", record.name, record.inputs),
                **_described("output", record.name, record.outputs),
                "state": record.state,
                "is_p2p": record.peer is not None,
                "retired": record.state == "completed",
                "timeout_ms": round(group.timeout.total_seconds() * 1e3),
                "frames": [],
            }
            for record in list(self.records)
        ]


class Dumper:
    """Writes a rank's records to a file, once, when an operation of its group fails on any rank.

    The failing rank asks the others through the store, so that ranks without an operation write a
    dump, too. ``meeting`` is a key there that no other group has. An error here never hides the
    failure itself. ``groups`` returns this process's rank and process groups.
    """

    def __init__(
        self,
        prefix: str,
        store: Any,
        meeting: str,
        rank: int,
        ranks: int,
        groups: Callable[[], tuple[int, Sequence[tuple[Any, Sequence[int]]]]],
    ) -> None:
        self._prefix = prefix
        self._store = store
        self._key = f"flight recorder/{meeting}"
        self._rank = rank
        self._ranks = ranks
        self._groups = groups
        self._lock = threading.Lock()
        self._outcome = ""  # the end of error messages, once there was a dump
        self._wake = threading.Event()
        self._closed = False
        self._dumped = threading.Event()
        self._all_dumped = threading.Event()
        threading.Thread(target=self._run, name="syncline flight recorder", daemon=True).start()

    def close(self) -> None:
        """Dump no more."""
        self._closed = True
        self._wake.set()

    def failed(self) -> str:
        """Dump, give the other ranks time to dump, and return the end of the error message."""
        until_s = time.monotonic() + LONGEST_WAIT_S
        first = not self._wake.is_set()
        self._wake.set()
        try:
            threading.Thread(target=self._dump, name="syncline dump", daemon=True).start()
        except RuntimeError:  # this process ends: no thread starts any more
            self._dump()
        if not self._dumped.wait(LONGEST_WAIT_S):
            return f"; the last operations of this rank were not written in {LONGEST_WAIT_S:g} s"
        if first:
            self._all_dumped.wait(until_s - time.monotonic())
        return self._outcome

    def _run(self) -> None:
        try:
            while not self._wake.wait(POLL_S) and not self._store.check([self._key]):
                pass
            if self._closed:
                return
            self._store.set(self._key, "dump")
            self._dump()
            self._store.set(f"{self._key}/{self._rank}", "dumped")
            others = [f"{self._key}/{rank}" for rank in range(self._ranks)]
            while not self._closed and not self._store.check(others):
                time.sleep(POLL_S)
        except RuntimeError:
            pass  # The store has ended with its host: no rank can be asked, or can ask.
        finally:
            self._all_dumped.set()

    def _dump(self) -> None:
        with self._lock:
            if not self._outcome:
                try:
                    rank, groups = self._groups()
                    path = Path(f"{self._prefix}{rank}.json").absolute()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content = json.dumps(_content(rank, groups))
                    write_atomically(path, content, regular=True)
                    self._outcome = f"; the last operations of this rank are in {path}"
                except Exception as error:
                    self._outcome = (
                        f"; the last operations of this rank could not be dumped: {error}"
                    )
                self._dumped.set()


def from_torch(
    prefix: str | None, entries: int | None, environment: Mapping[str, str]
) -> tuple[str | None, int]:
    """Return the prefix of dumps and the number of entries, by default from torch's variables.

    If neither is given, the prefix is None; if only the number is, :func:`default_prefix`. Raise
    UserError for a wrong number.
    """
    name = "TORCH_FR_BUFFER_SIZE"
    prefix = prefix or environment.get("TORCH_FR_DUMP_TEMP_FILE") or None
    if entries is None and name in environment:
        try:
            entries = int(environment[name])
        except ValueError:
            raise UserError(f"expected a number in {name}, found {environment[name]!r}") from None
    if entries is None:
        return prefix, DEFAULT_ENTRIES
    if entries < 0:
        raise UserError(f"expected 0 or more entries of the flight recorder, found {entries}")
    return prefix or default_prefix(), entries


def default_prefix() -> str | None:
    """Return torch's prefix, in the user's cache; None: this user has no home folder."""
    prefix = user_cache("torch", "comm_lib_trace_rank_")
    return None if prefix is None else str(prefix)


def _kinds(tensors: Sequence[torch.Tensor]) -> Sequence[Kind]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _ends(record: Record, rank: int) -> str:
    if record.peer is None:
        return ""
    return f" {rank}{'->' if record.name == 'send' else '<-'}{record.source}"


def _described(side: str, name: str, kinds: Sequence[Kind]) -> dict[str, Any]:
    sizes = [list(size) for size, _ in kinds]
    if name in FLAT:
        sizes = [[sum(map(math.prod, sizes))]]
    dtypes = [str(dtype).removeprefix("torch.") for _, dtype in kinds]
    return {f"{side}_sizes": sizes, f"{side}_dtypes": dtypes[: len(sizes)]}


def _content(rank: int, groups: Sequence[tuple[Any, Sequence[int]]]) -> dict[str, Any]:
    """Return the records of this process's groups, in NCCL's JSON format."""
    entries: list[dict[str, Any]] = []
    configuration, status, dropped = {}, {}, 0
    for number, (group, ranks) in enumerate(groups):
        recorder: FlightRecorder = group.flight_recorder
        found = recorder.entries(group, number)
        entries += found
        dropped += recorder.begun - len(found)
        name = group.getGroupName()
        description, members = group.getGroupDesc(), str(list(ranks))
        configuration[name] = {"name": name, "desc": description, "ranks": members}
        last = {"scheduled": 0, "started": 0, "completed": 0}
        for entry in found:
            if not entry["is_p2p"]:
                last[entry["state"]] = entry["collective_seq_id"]
        status[str(number)] = {
            "last_enqueued_collective": recorder.collectives,
            "last_started_collective": max(last["started"], last["completed"]),
            "last_completed_collective": last["completed"],
        }
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(entries, start=dropped):
        entry["record_id"] = number
    return {
        "version": FORMAT_VERSION,
        "comm_lib_version": "syncline",
        "rank": rank,
        "pg_config": configuration,
        "pg_status": status,
        "entries": entries,
    }
