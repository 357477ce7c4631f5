"""``syncline simulate`` under other circumstances: sweeps, their report, and wrong options."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.cli.sweep import points_of
from syncline.errors import UserError
from syncline.files.report.bundle import Bundle
from syncline.plan.network import PRESETS
from syncline.plan.planners import PLANNERS
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import WhatIf
from tests.cli.examples import PROFILE, Printed, Run
from tests.files.traces.kineto_files import Job
from tests.plan.simulator.chains import chain

LINK = "bandwidth=10gbit,latency=20us,workers=16"
DDP = ("--planner", "ddp")
MERGE = ("--planner", "merge")
Swept = Callable[..., WhatIf]


@pytest.fixture
def swept(printed: Printed, profile: Path) -> Swept:
    """Return a call that simulates the profile under some options, and returns what it finds."""
    return lambda network, *options: WhatIf.from_json(
        printed("simulate", profile, network, *options, "--json")
    )


def test_the_command_of_the_page(swept: Swept) -> None:
    made = swept(
        LINK,
        *("--workers", "4,8,...,64", "--bandwidth", "1gbit,25gbit", "--latency", "20us"),
        *("--algorithm", "ring,double-tree", "--wire", "fp32,bf16", "--density", "0.001"),
        *("--straggler", "1.2@3", "--compute-scale", "0.5", "--strategy", "caffe-mpi"),
        *("--planner", "all"),
    )
    assert len(made.points) == 5 * 2 * 3 * 2
    assert made.planners == tuple(name for name in PLANNERS if name != "auto")
    assert {(p.setting.algorithm, p.setting.density) for p in made.points} == {
        ("ring", None),
        ("double-binary-trees", None),
        ("gtop-k-butterfly", 0.001),
    }
    assert made.swept == ("workers", "algorithm", "bandwidth_bytes_per_s", "density", "wire")
    setting = made.points[0].setting
    assert (setting.strategy, setting.compute_scale) == ("caffe-mpi", 0.5)
    assert setting.stragglers == ((3, 1.2),)
    assert len(made.notes) == 3


def test_points_one_by_one(swept: Swept, printed: Printed, profile: Path, network: Path) -> None:
    asked = ("simulate", profile, network, *MERGE, "--json", "--workers")
    for point in swept(network, "--workers", "16,64", *MERGE).points:
        (alone,) = json.loads(printed(*asked, point.setting.workers))["predictions"]
        assert alone["iteration_s"] == point.best.iteration_s


def test_jobs_that_share_the_links(swept: Swept, printed: Printed, profile: Path) -> None:
    slow = "bandwidth=1gbit,workers=4"
    made = swept(slow, "--jobs", "1,2,3", *MERGE)
    assert made.swept == ("jobs",)
    found = [point.best for point in made.points]
    assert [p.sharing.jobs if p.sharing else 1 for p in found] == [1, 2, 3]
    assert found[0].slowdown == 1 < found[1].slowdown < found[2].slowdown < 3
    assert found[1].sharing is not None
    assert found[1].sharing.alone_s == found[0].iteration_s
    assert "means over the offsets" in made.notes[0]
    out = printed("simulate", profile, f"{slow},jobs=2", *MERGE)
    assert f"{found[1].slowdown:.2f} times as long as alone" in " ".join(out.split())
    assert "jobs" in printed("simulate", profile, slow, "--jobs", "1,2")


def test_a_single_point_is_a_comparison_with_its_limit(printed: Printed, profile: Path) -> None:
    out = printed("simulate", profile, LINK, "--bandwidth", "1gbit", "--wire", "bf16")
    for said in ("ddp", "merge", "wfbp", "-bound: ", "speed-up", "Converting gradients"):
        assert said in out


def test_a_chosen_point(swept: Swept) -> None:
    workers = ("--workers", "4,8,16", *DDP)
    assert swept(LINK, *workers).bottleneck.point == 2
    assert swept(LINK, *workers, "--point", "1").bottleneck.point == 0
    (unchanged,) = swept(LINK, "--point", "1", *DDP).points
    assert unchanged.network == LINK


@pytest.mark.parametrize(
    ("options", "points", "times"),
    [
        ("--straggler none,1.2@3,1.5@0+2@1", 3, 3),
        ("--spread 0,0.1", 2, 2),
        ("--jitter 0,0.05", 2, 2),
        ("--spread 0.2 --seed 0,1,2", 3, 3),
        ("--compute-scale 2,1,0.5", 3, 3),
        ("--batch 1,4 --batch-fixed 0,0.5", 4, 3),
        ("--strategy parameter-server --algorithm ps,sharded-parameter-server", 2, 2),
        ("--strategy loop,pytorch,cntk", 3, 1),
        ("--strategy all", 8, 1),
        ("--latency 1us,20us", 2, 1),
        ("--density none,0.01", 2, 1),
    ],
)
def test_every_option_takes_a_list(swept: Swept, options: str, points: int, times: int) -> None:
    made = swept(LINK, *options.split(), *MERGE)
    assert len(made.points) == points
    assert len({point.best.iteration_s for point in made.points}) >= times


def test_a_plan_of_ones_own(swept: Swept, refused: Printed, profile: Path, tmp_path: Path) -> None:
    PLANNERS["single"].plan(PROFILE, PRESETS["10gbit"]).save(path := tmp_path / "plan.json")
    assert swept(LINK, "--plan", path, "--bandwidth", "1gbit,100gbit").planners == ("single",)
    said = refused("simulate", profile, LINK, "--plan", path, "--workers", "16,32")
    assert "the plan is for 16 workers, this job has 32" in said


def test_the_timeline_of_the_chosen_point(swept: Swept, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    made = swept(LINK, "--workers", "4,64", *MERGE, "--timeline", path)
    iteration_s = Timeline.load(path).iteration_ns * 1e-9
    assert iteration_s == pytest.approx(made.chosen.best.iteration_s)


def test_a_report_directory_or_a_page(printed: Printed, profile: Path, tmp_path: Path) -> None:
    folder, page = tmp_path / "out" / "report", tmp_path / "page.html"
    asked = ("simulate", profile, LINK, "--report")
    out = printed(*asked, folder, "--workers", "4,8", "--planner", "ddp,merge")
    assert f"report written to {folder}" in out
    assert Bundle.load(folder).what_if is not None
    before = (folder / "report.html").read_text()
    assert 'id="workers-curves"' in before
    printed("report", folder)
    assert (folder / "report.html").read_text() == before
    assert printed("show", folder / "what-if.json")
    printed(*asked, page, *MERGE)
    assert 'id="path"' in page.read_text()


def test_where_a_report_cannot_be_is_said_first(
    refused: Printed, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.cli.simulate.study", lambda *_, **__: pytest.fail("too late"))
    for target in ("absent/page.html", profile):
        assert "cannot be written" in refused("simulate", profile, LINK, "--report", target)


def test_a_trace_is_a_profile_too(run: Run, tmp_path: Path) -> None:
    made = chain([10**6] * 2, [2 * 10**6] * 2, [100_000] * 2)
    path, table = tmp_path / "profile.json", tmp_path / "layers.txt"
    made.save(path)
    run("trace", "convert", path, "--to", "layer-table", "-o", table, "--network", LINK)
    found = json.loads(run("simulate", table, LINK, "--planner", "wfbp", "--json").out)
    plan = PLANNERS["wfbp"].plan(made, PRESETS["10gbit"])
    ours_s = predict_iteration_s(made, PRESETS["10gbit"], plan)
    assert found["predictions"][0]["iteration_s"] == pytest.approx(ours_s, rel=0.01)


def test_a_trace_has_its_own_workers(run: Run, printed: Printed, tmp_path: Path) -> None:
    path = Job(workers=8).write(tmp_path / "job.json")
    preset = ("simulate", path, "10gbit", *MERGE)
    out = printed(*preset)
    assert "8 workers; no schedule" in out
    assert "note: for 8 workers, as in the trace; --workers 16 takes those of 10gbit" in out
    result = run(*preset, "--json")
    assert json.loads(result.out)["workers"] == 8
    assert "note: for 8 workers, as in the trace" in result.err
    (point,) = WhatIf.from_json(run(*preset, "--bandwidth", "1gbit", "--json").out).points
    assert point.setting.workers == 8
    for arguments in (
        (*preset, "--workers", "16"),
        ("simulate", path, "bandwidth=10gbit,workers=16", *MERGE),
        ("simulate", path, "bandwidth=10gbit,hosts=2x8", *MERGE),
    ):
        out = printed(*arguments)
        assert "16 workers; no schedule" in out
        assert "as in the trace" not in out
    alone = Job(workers=1, messages=False).write(tmp_path / "alone.json")
    out = printed("simulate", alone, "10gbit", *MERGE)
    assert "16 workers; no schedule" in out
    assert "note: one worker, as in the trace, exchanges nothing" in out


def test_what_a_parameter_server_does_not_count_is_said(swept: Swept) -> None:
    options = ("--strategy", "parameter-server", *DDP)
    assert swept(LINK, *options).notes == ()
    trees = swept(f"{LINK},algorithm=tree", *options)
    assert "the network's binary-tree is not used" in trees.notes[0]
    clipped = swept(LINK, *options, "--clip")
    assert "no norm of the gradients is exchanged" in clipped.notes[0]


def test_a_link_is_calibrated(swept: Swept, run: Run, printed: Printed, profile: Path) -> None:
    slow = printed("simulate", profile, "bandwidth=1gbit,latency=200us,workers=16", *DDP, "--json")
    seconds = json.loads(slow)["predictions"][0]["iteration_s"]
    given = (*DDP, "--calibrate", f"16={seconds}s")
    result = run("simulate", profile, LINK, *given, "--json")
    found = json.loads(result.out)["predictions"][0]["iteration_s"]
    assert found == pytest.approx(seconds, rel=1e-3)
    assert "note: the link is 10.00 times slower than given" in result.err
    made = swept(LINK, *given, "--workers", "16,64")
    assert any("the link is 10.00 times slower" in note for note in made.notes)


def test_the_longest_lists_end_early() -> None:
    with pytest.raises(UserError, match="more than 5000 values"):
        points_of({"compute_scale": ",".join(f"{1 + i * 1e-6:.6f}" for i in range(6000))}, 4)
    many = ",".join(str(i / 1000) for i in range(100))
    with pytest.raises(UserError, match="stand for more than 5000 combinations"):
        points_of({"spread": many, "jitter": many}, 4)


def test_the_output_on_the_page(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "what-if.md").read_text()
    (block,) = re.findall(r"^\$ syncline (simulate runs/.*?)^```", page, re.DOTALL | re.MULTILINE)
    command, _, output = block.partition("\n")
    example = runpy.run_path(str(root / "examples" / "plan_without_torch.py"))
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "runs" / "described").mkdir(parents=True)
    example["described_profile"]().save(folder / "profile.json")
    assert run(*shlex.split(command)).out.split() == output.split()
