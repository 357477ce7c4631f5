"""What a hang leaves behind, and what torch's own analyser makes of it."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.comm.backend import flight_recorder
from syncline.comm.backend.flight_analysis import analyse, load, main, unfinished
from syncline.comm.backend.flight_recorder import Dumper, FlightRecorder, from_torch
from syncline.comm.backend.process_group import Options
from syncline.errors import MismatchError, PeerError, UserError
from tests.comm.backend.backend_jobs import group_of
from tests.timeouts import give_up
from tests.workers import WorkerPool

KNOWS_BARRIERS = torch.__version__ >= (2, 12)  # torch's analyser


def recorded(prefix: str, entries: int | None = None) -> AbstractContextManager[Any]:
    """Let there be a group with a flight recorder."""
    options = Options(flight_recorder_prefix=prefix, flight_recorder_entries=entries)
    return group_of(options=options)


def absent(prefix: str, words: str) -> None:
    """Let rank 1 call nothing while rank 0 waits, which ends by an error with these words."""
    with recorded(prefix) as group:
        dist.all_reduce(torch.zeros(5), group=group)
        give_up(group, 0.5)
        if dist.get_rank() == 0:
            vain = "rank 0 waited in vain in all-reduce number 2 of 6 elements of float64"
            said = f"{vain}.*; the last operations of this rank {words}"
            with pytest.raises(PeerError, match=said):
                dist.all_reduce(torch.zeros(2, 3, dtype=torch.float64), group=group)
        dist.barrier()  # over Gloo


def every_form(prefix: str) -> None:
    """Call every kind of collective, then different ones."""
    with recorded(prefix) as group:
        rank, x, parts = dist.get_rank(), torch.zeros(4), [torch.zeros(4), torch.zeros(4)]
        own = parts if rank == 0 else None
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.broadcast(x, 0, group=group)
        dist.reduce(x, 0, group=group)
        if KNOWS_BARRIERS:
            dist.barrier(group)
        dist.all_gather(parts, x, group=group)
        group.all_gather_single(torch.zeros(8), x).wait()
        dist.reduce_scatter(x, parts, group=group)
        group.reduce_scatter_single(x, torch.zeros(8)).wait()
        dist.gather(x, own, 0, group=group)
        dist.scatter(x, own, 0, group=group)
        dist.all_to_all([torch.zeros(4), torch.zeros(4)], parts, group=group)
        dist.all_to_all_single(torch.zeros(4), x, group=group)
        if rank == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x, group=group)
        other = partial(dist.broadcast, torch.zeros(9), 0) if rank else partial(dist.all_reduce, x)
        with pytest.raises(
            (MismatchError, PeerError), match="the last operations of this rank are in"
        ):
            other(group=group)
        dist.barrier()


def last_of_many(prefix: str) -> None:
    """Keep 3 of 12 operations."""
    with recorded(prefix, entries=3) as group:
        for _ in range(9):
            dist.all_reduce(torch.zeros(1), group=group)
        work = dist.irecv(torch.zeros(1), 1 - dist.get_rank(), group=group)
        assert work is not None
        with pytest.raises(UserError):
            dist.all_reduce(torch.zeros(1, dtype=torch.int16), group=group)
        states = [record.state for record in group.flight_recorder.records]
        assert states == ["completed", "started", "scheduled"]
        dist.barrier()  # only now may the message come
        dist.send(torch.zeros(1), 1 - dist.get_rank(), group=group)
        work.wait()
        assert not list(Path(prefix).parent.iterdir())
        assert group.flight_recorder.begun == 12


def test_a_hang_leaves_behind_which_rank_did_not_come(
    workers: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "trace_")
    workers.run(absent, 2, prefix, f"are in {re.escape(prefix)}0.json$")
    waiting, idle = (json.loads((tmp_path / f"trace_{rank}.json").read_text()) for rank in (0, 1))
    assert [entry["state"] for entry in idle["entries"]] == ["completed"]
    first, second = waiting["entries"]
    assert first["time_created_ns"] <= first["time_discovered_completed_ns"]
    assert second["profiling_name"] == "nccl:all_reduce"
    assert second["state"] == "started"
    assert second["collective_seq_id"] == 2
    assert second["input_sizes"] == second["output_sizes"] == [[2, 3]]
    assert second["input_dtypes"] == ["float64"]
    assert second["timeout_ms"] == 500
    assert waiting["pg_config"][second["process_group"][0]]["ranks"] == "[0, 1]"
    found = analyse(load(prefix)).collectives
    assert [(c.collective_seq_id, c.missing_ranks) for c in found] == [(1, None), (2, {1})]
    assert main([prefix]) == 0
    assert "rank 0: all_reduce of sizes [[2, 3]] in group" in capsys.readouterr().out


def test_the_analyser_matches_all_but_different_ones(workers: WorkerPool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "trace_")
    workers.run(every_form, 2, prefix)
    dumps = load(prefix)
    *same, different = analyse(dumps).collectives
    assert [each.collective_name for each in same if not each.pass_check] == []
    assert len(same) == 12 + KNOWS_BARRIERS
    assert not different.pass_check
    assert "COLLECTIVE_TYPE_MISMATCH" in str(different.mismatch_collectives[1].type_of_mismatch)
    assert [line.partition(" in group")[0] for line in unfinished(dumps)] == [
        "rank 0: all_reduce of sizes [[4]]",
        "rank 1: broadcast of sizes [[9]]",
    ]
    names = [entry["profiling_name"] for dump in dumps.values() for entry in dump["entries"]]
    assert {"nccl:send 0->1", "nccl:recv 1<-0"} <= set(names)


def test_a_dump_that_fails_hides_and_holds_up_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace_0.json")  # whoever opens it waits for a reader
    words = "could not be dumped: .*trace_0.json: expected a regular file, found a pipe or a device"
    workers.run(absent, 2, str(tmp_path / "trace_"), words)


def test_a_silent_disk_holds_no_error_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(flight_recorder, "write_atomically", lambda *_, **__: answered.wait())
    monkeypatch.setattr(flight_recorder, "LONGEST_WAIT_S", 0.1)
    dumper = Dumper(str(tmp_path / "trace_"), dist.HashStore(), "here", 0, 2, lambda: (0, []))
    assert dumper.failed() == "; the last operations of this rank were not written in 0.1 s"
    answered.set()
    dumper.close()


def test_missing_folders_of_dumps_are_made(tmp_path: Path) -> None:
    prefix = str(tmp_path / "missing" / "torch" / "trace_")
    dumper = Dumper(prefix, dist.HashStore(), "here", 0, 1, lambda: (0, []))
    assert dumper.failed() == f"; the last operations of this rank are in {prefix}0.json"
    assert list(load(prefix)) == [f"{prefix}0.json"]
    dumper.close()


def test_only_the_last_are_kept_and_nothing_is_written(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(last_of_many, 2, str(tmp_path / "trace_"))


def test_without_dumps_operations_are_only_counted() -> None:
    recorder = FlightRecorder(0)
    assert recorder.begin("all_reduce", [torch.zeros(1)]) is None
    assert recorder.begin("send", peer=1) is None
    assert recorder.begun == 2


def test_torchs_variables_say_what_the_options_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    size = {"TORCH_FR_BUFFER_SIZE": "7"}
    both = size | {"TORCH_FR_DUMP_TEMP_FILE": "/a/b"}
    cached = "/a/cache/torch/comm_lib_trace_rank_"  # as torch has it
    assert from_torch(None, None, {}) == (None, flight_recorder.DEFAULT_ENTRIES)
    assert from_torch(None, None, both) == ("/a/b", 7)
    assert from_torch("c", 5, both) == ("c", 5)
    assert from_torch(None, 5, {}) == (cached, 5)
    assert from_torch(None, None, size) == (cached, 7)
    with pytest.raises(UserError, match="expected a number in TORCH_FR_BUFFER_SIZE, found 'many'"):
        from_torch(None, None, {"TORCH_FR_BUFFER_SIZE": "many"})
    with pytest.raises(UserError, match="expected 0 or more entries"):
        from_torch(None, -1, {})


def holds(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (str, "no file "),
        (holds("["), "Expecting value"),
        (holds('{"rank": 0, "rank": 1}'), "'rank' occurs twice in one object"),
        (holds("[]"), "expected a dump of the flight recorder of version"),
        (holds('{"version": "2.10", "rank": 0}'), "these are not the dumps of one job"),
        (os.mkfifo, "trace_0.json: expected a regular file"),  # nobody waits for it
    ],
    ids=["none", "no JSON", "twice", "another version", "another job", "pipe"],
)
def test_files_that_are_no_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "trace_0.json")
    assert main([str(tmp_path / "trace_")]) == 2
    assert said in capsys.readouterr().err


def test_a_dump_cannot_steer_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    entry = {
        "state": "scheduled\x1b]0;title\x07",
        "input_sizes": "\x1b[31m",
        "is_p2p": False,
        "profiling_name": "nccl:\x1b[2Jall_reduce",
        "process_group": ["0\x1b[1m", ""],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "record_id": 0,
        "time_created_ns": 1,
    }
    groups = {"0\x1b[1m": {"name": "0\x1b[1m", "desc": "", "ranks": "[0, 1]"}}
    for rank in (0, 1):
        dump = {"version": "2.10", "rank": f"{rank}\x1b[5m", "pg_config": groups, "pg_status": {}}
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps({**dump, "entries": [entry]}))
    main([str(tmp_path / "trace_")])
    said = capfd.readouterr()
    assert "rank 0\\x1b[5m: \\x1b[2Jall_reduce of sizes \\x1b[31m in group " in said.out
    assert not {"\x1b", "\x07"} & set(said.out + said.err)
