"""Real workers in turns, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.comm.collectives import PROGRAMS, Collective
from syncline.errors import UserError
from syncline.lab.bench.collectives import measure_collectives
from syncline.lab.bench.request import BenchmarkRequest
from syncline.lab.bench.result import COPY, GLOO, OURS, TORCH, ZERO_COPY
from syncline.lab.testbed import Cluster
from tests.cases import first_few
from tests.lab.testbed.machine import require_namespaces

SHORT_S = 1e-3


@pytest.mark.parametrize("collective", first_few(PROGRAMS))
def test_every_contestant_has_a_turn_in_every_round(collective: Collective) -> None:
    told: list[tuple[int, int]] = []
    names = (OURS, ZERO_COPY, TORCH, GLOO, f"{OURS}:direct", COPY, "mpich")
    benchmark = measure_collectives(
        BenchmarkRequest(
            collective=collective,
            sizes_bytes=(40, 40_000),
            workers=(2,),
            place="shared",
            contestants=names,
            lap_s=SHORT_S,
            pythons={"mpich": Path("nowhere") / "python"},
        ),
        progress=lambda _, done, total: told.append((done, total)),
    )
    assert [entry.contestant for entry in benchmark.entries] == [*names[:-1]] * 2
    assert all(len(entry.rounds_s) == 5 for entry in benchmark.entries)
    assert [(a.contestant, a.workers) for a in benchmark.absent] == [("mpich", 2)]
    assert "tools/bench-mpi" in benchmark.absent[0].reason
    assert told[-1] == (13, 14)


def test_over_tcp_those_that_share_memory_are_absent() -> None:
    benchmark = measure_collectives(
        BenchmarkRequest(
            collective="all-reduce",
            sizes_bytes=(4,),
            workers=(2,),
            place="tcp",
            contestants=(OURS, ZERO_COPY, TORCH, f"{OURS}:linear-pipeline"),
            lap_s=SHORT_S,
        )
    )
    expected = [OURS, TORCH, f"{OURS}:linear-pipeline"]
    assert [entry.contestant for entry in benchmark.entries] == expected
    assert [absent.contestant for absent in benchmark.absent] == [ZERO_COPY]


def test_on_emulated_hosts() -> None:
    require_namespaces()
    benchmark = measure_collectives(
        BenchmarkRequest(
            collective="all-reduce",
            sizes_bytes=(4096,),
            workers=(2,),
            place=Cluster.of(hosts=2, rate="1gbit"),
            contestants=(OURS, GLOO),
            lap_s=SHORT_S,
        )
    )
    assert benchmark.rate_bytes_per_s == 1e9 / 8
    assert benchmark.place == "2 hosts, 1 worker each, links 1 Gbit/s"
    assert [entry.contestant for entry in benchmark.entries] == [OURS, GLOO]


def test_when_nobody_can_take_part_the_reasons_are_said() -> None:
    with pytest.raises(UserError, match=r"could be measured: open-mpi: no nowhere/python"):
        measure_collectives(
            BenchmarkRequest(
                collective="all-reduce",
                sizes_bytes=(4,),
                workers=(2,),
                place="shared",
                contestants=("open-mpi",),
                pythons={"open-mpi": Path("nowhere") / "python"},
            )
        )
