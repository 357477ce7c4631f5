"""A mistake is one line and exit code 2, and nothing is started or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.examples import Printed
from tests.files.traces.seeds import TABLE_VI


@pytest.mark.usefixtures("profile", "network")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("show absent.json", "absent.json: no such file"),
        ("report absent", "is no directory"),
        ("plan absent.json 10gbit", "absent.json: no such file"),
        ("plan profile.json 10gbit --planner mergee", "did you mean 'merge'?"),
        ("plan profile.json 10gbit --workers 0", "at least 1"),
        ("plan profile.json network.json --algorithm rong", "did you mean 'ring'?"),
        ("plan profile.json 10gbit -o absent/plan.json", "cannot be written"),
        ("plan profile.json 10gbit -o ./profile.json", "this file is read"),
        ("simulate profile.json 10gbit --timeline profile.json", "this file is read"),
        ("advise --profile profile.json 10gbit --json", "after all options"),
        ("advise --seconds 3 --profile profile.json 10gbit", "so --seconds does nothing"),
        ("simulate profile.json 10gbit --planner mgwfb", "did you mean 'mgwfbp'?"),
        ("simulate profile.json 10gbit --planner ddp,all", "--planner all stands alone"),
        ("simulate profile.json 10gbit --planner ddp,ddp", "--planner names 'ddp' twice"),
        ("simulate profile.json 10gbit --plan x --planner auto", "either --planner or --plan"),
        ("simulate profile.json 10gbit --timeline absent/x.json", "cannot be written"),
        ("simulate profile.json 10gbit --shard --density 0.001", "--shard"),
        ("simulate profile.json 10gbit --workers x", "write one as 16, some as 4,8,16"),
        ("simulate profile.json 10gbit --workers 4,4", "names a count twice"),
        ("simulate profile.json 10gbit --bandwidth 1gbit,10gb", "example: --bandwidth 1gbit,10gb"),
        ("simulate profile.json 10gbit --bandwidth 1gbit,1gbit", "'1gbit' is named twice"),
        ("simulate profile.json 10gbit --algorithm rong", "did you mean 'ring'?"),
        ("simulate profile.json 10gbit --wire fp31", "did you mean 'fp32'?"),
        ("simulate profile.json 10gbit --wire x", "fp16, bf16, int8"),
        ("simulate profile.json 10gbit --density 2", "above 0 and at most 1, found 2"),
        ("simulate profile.json 10gbit --compute-scale nan", "cannot read 'nan'"),
        ("simulate profile.json 10gbit --straggler 1.2", "expected FACTOR@RANK"),
        ("simulate profile.json 10gbit --straggler 1.2@16", "of 16 workers the ranks are 0 to 15"),
        ("simulate profile.json 10gbit --straggler 2@5 --workers 4,8", "of 4 workers the ranks"),
        ("simulate profile.json 10gbit --spread 3", "must be between 0 and 2, found 3"),
        ("simulate profile.json 10gbit --seed 3 --spread 0", "--seed has nothing to draw"),
        ("simulate profile.json 10gbit --jobs 1,x", "cannot read 'x'; an example: --jobs 1,2"),
        ("simulate profile.json 10gbit --strategy lop", "did you mean 'loop'?"),
        ("simulate profile.json 10gbit --strategy all,loop", "--strategy all stands alone"),
        (
            "simulate profile.json 10gbit --strategy parameter-server --algorithm ring",
            "would do nothing",
        ),
        (
            "simulate profile.json a=1e-3,b=1e-9 --strategy parameter-server",
            "a parameter server needs the point-to-point costs of a link",
        ),
        ("simulate profile.json 10gbit --workers 2,4 --point 3", "there is no point 3; the sweep"),
        (
            "simulate profile.json 10gbit --workers 1,2,...,1000 --spread 0,.1,.2,.3,.4,.5",
            "for 6000 points",
        ),
        ("simulate profile.json 10gbit --batch-fixed 0.1", "give --batch too"),
        ("simulate profile.json 10gbit --calibrate 16=0ms", "must be above 0 s, found 0ms"),
        ("simulate profile.json 10gbit --calibrate 16=1s,16=2s", "number of workers twice"),
        ("train --model resnet2", "unknown model 'resnet2'; did you mean 'resnet20'"),
        ("train --data digit", "unknown data set 'digit'; did you mean 'digits'"),
        ("train --density-warmup much", "--density-warmup takes densities with commas"),
        ("train --epochs 0", "--epochs must be at least 1, found 0"),
        ("train --plan absent.json", "absent.json: no such file"),
        ("profile --iterations 0", "--iterations must be at least 1, found 0"),
        ("emulate --hosts 0 true", "hosts must be from 1 to 100, found 0"),
        ("emulate --timeout 0 true", "the seconds of --timeout must be finite and above 0"),
        ("emulate --grace -1 true", "the seconds of --grace must be finite and at least 0"),
        ("replay absent.json", "absent.json: no such file"),
        ("replay profile.json --scale-compute 0", "compute scale"),
        ("replay profile.json --network 1gbit,workers=9", "is of 9 workers, the emulated cluster"),
        ("replay profile.json --report no/where.html", "there is no folder no"),
        ("bench collectives --collective all-reduse", "did you mean 'all-reduce'?"),
        ("bench collectives --contestants glo", "did you mean 'gloo'?"),
        ("bench collectives --contestants gloo,gloo", "name each contestant once"),
        ("bench collectives --lap 0", "lap_s must be finite and above 0"),
        ("bench collectives --sizes 2GiB", "sizes must be from 1 to"),
        ("bench collectives --mpi mpich", "expected NAME=PYTHON"),
        ("bench collectives --mpi mpih=python", "did you mean 'mpich'?"),
        ("tune --show", "nothing was measured yet in "),
        ("tune --show --workers 2", "--show measures nothing, so --workers has no meaning"),
        ("tune --show --output x", "--show measures nothing, so --output has no meaning"),
        ("tune --workers 2,4 -o x.json", "found 2, 4; name one with --workers"),
        ("tune --rate 1gbit", "--rate needs emulated hosts; say how many with --hosts"),
        ("tune --workers-per-host 2", "--workers-per-host needs emulated hosts"),
        ("tune --hosts 2 --place tcp", "leave one out"),
        ("tune --page folder", "expected the name of a page, such as choices.html"),
        ("tune --page missing/page.html", "there is no folder missing"),
        ("trace info absent.txt", "absent.txt: no such file"),
        ("trace info table.txt --from chakra", "table.txt"),
        ("trace info table.txt --clock-hz 5e8", "--clock-hz is for astrasim"),
        ("trace info table.txt --sizes sizes.txt", "leave out the file of sizes"),
        ("trace convert table.txt --to json -o x --plan-out y", "leave out --plan-out"),
        ("trace convert table.txt --to json -o x --network-out y", "say it with --workers"),
        ("trace convert table.txt --to json -o absent/x", "cannot be written"),
    ],
)
def test_a_mistake(command: str, said: str, refused: Printed, tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(TABLE_VI)
    (tmp_path / "sizes.txt").write_text("name elements\na 1\n")
    assert said in refused(*command.split())
