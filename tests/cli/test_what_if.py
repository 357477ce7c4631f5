"""``syncline simulate`` under other circumstances: sweeps, their report, and wrong options."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from syncline.cli import progress
from syncline.cli.sweep import is_plain, points_of, tracked
from syncline.errors import UserError
from syncline.files.report.bundle import Bundle
from syncline.plan.network import PRESETS
from syncline.plan.planners import PLANNERS
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import WhatIf
from tests.cli.test_plan import PROFILE, Run, network, profile, run
from tests.files.traces.kineto_files import Job
from tests.plan.simulator.chains import chain

__all__ = ["network", "profile", "run"]  # fixtures

LINK = "bandwidth=10gbit,latency=20us,workers=16"
DDP = ("--planner", "ddp")


def swept(run: Run, *arguments: object) -> WhatIf:
    result = run("simulate", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["format"] == "syncline/what-if"
    return WhatIf.from_json(result.out)


def test_the_command_of_the_page(run: Run, profile: Path) -> None:
    made = swept(
        run,
        profile,
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


def test_points_are_what_single_simulations_say(run: Run, profile: Path, network: Path) -> None:
    made = swept(run, profile, network, "--workers", "16,64", "--planner", "merge")
    for point in made.points:
        result = run(
            "simulate",
            profile,
            network,
            "--workers",
            point.setting.workers,
            "--planner",
            "merge",
            "--json",
        )
        alone = json.loads(result.out)["predictions"][0]
        assert alone["iteration_s"] == point.best.iteration_s


def test_jobs_that_share_the_links(run: Run, profile: Path) -> None:
    slow = "bandwidth=1gbit,workers=4"
    made = swept(run, profile, slow, "--jobs", "1,2,3", "--planner", "merge")
    assert made.swept == ("jobs",)
    found = [point.best for point in made.points]
    assert [p.sharing.jobs if p.sharing else 1 for p in found] == [1, 2, 3]
    assert found[0].slowdown == 1 < found[1].slowdown < found[2].slowdown < 3
    assert found[1].sharing is not None
    assert found[1].sharing.alone_s == found[0].iteration_s
    assert "means over the offsets" in made.notes[0]
    result = run("simulate", profile, f"{slow},jobs=2", "--planner", "merge")
    assert f"{found[1].slowdown:.2f} times as long as alone" in " ".join(result.out.split())
    result = run("simulate", profile, slow, "--jobs", "1,2")
    assert (result.code, "jobs" in result.out) == (0, True)


def test_the_table(run: Run, profile: Path) -> None:
    result = run(
        "simulate", profile, LINK, "--workers", "4,8,...,32", "--bandwidth", "1gbit,10gbit"
    )
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines() if "Gbit/s  " in line]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 9)]
    assert [row[3] for row in rows] == ["4", "8", "16", "32"] * 2
    assert "-bound: " in result.out
    assert "relative to one worker of the same profile without communication" in result.out


def test_asked_planners_are_columns(run: Run, profile: Path) -> None:
    result = run("simulate", profile, LINK, "--workers", "4,8", "--planner", "ddp,merge")
    head = result.out.splitlines()[2].split()
    assert (head.index("ddp") < head.index("merge")) is True
    assert "fastest" not in result.out


def test_a_single_point_is_a_comparison_with_its_limit(run: Run, profile: Path) -> None:
    result = run("simulate", profile, LINK, "--bandwidth", "1gbit", "--wire", "bf16")
    assert result.code == 0
    for name in ("ddp", "merge", "wfbp"):
        assert name in result.out
    assert "-bound: " in result.out
    assert "speed-up" in result.out
    assert "Converting gradients" in result.out


def test_a_chosen_point(run: Run, profile: Path) -> None:
    options = (profile, LINK, "--workers", "4,8,16", "--planner", "ddp")
    assert swept(run, *options).bottleneck.point == 2
    assert swept(run, *options, "--point", "1").bottleneck.point == 0


def test_the_point_of_an_unchanged_network(run: Run, profile: Path) -> None:
    made = swept(run, profile, LINK, "--point", "1", "--planner", "ddp")
    assert len(made.points) == 1
    assert made.points[0].network == LINK


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--straggler", "none,1.2@3,1.5@0+2@1"),
        ("--spread", "0,0.1"),
        ("--jitter", "0,0.05"),
        ("--strategy", "loop,pytorch,cntk"),
        ("--compute-scale", "2,1,0.5"),
        ("--latency", "1us,20us"),
        ("--density", "none,0.01"),
    ],
)
def test_every_option_takes_a_list(run: Run, profile: Path, option: str, values: str) -> None:
    made = swept(run, profile, LINK, option, values, "--planner", "merge")
    assert len(made.points) == values.count(",") + 1
    times = [point.best.iteration_s for point in made.points]
    if option not in ("--latency", "--density", "--strategy"):
        assert len(set(times)) == len(times)


def test_seeds_draw_other_workers(run: Run, profile: Path) -> None:
    made = swept(run, profile, LINK, "--spread", "0.2", "--seed", "0,1,2", "--planner", "merge")
    assert len({point.best.iteration_s for point in made.points}) == 3


def test_all_strategies(run: Run, profile: Path) -> None:
    made = swept(run, profile, LINK, "--strategy", "all", "--planner", "wfbp")
    assert "strategy" in made.swept
    assert len(made.points) == 8


def test_a_plan_of_ones_own_on_other_links(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLANNERS["single"].plan(PROFILE, PRESETS["10gbit"]).save(path)
    made = swept(run, profile, LINK, "--plan", path, "--bandwidth", "1gbit,100gbit")
    assert made.planners == ("single",)
    result = run("simulate", profile, LINK, "--plan", path, "--workers", "16,32")
    assert (result.code, result.out) == (2, "")
    assert "the plan is for 16 workers, this job has 32" in result.err


def test_the_timeline_of_the_chosen_point(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    options = (profile, LINK, "--workers", "4,64", "--planner", "merge", "--timeline", path)
    made = swept(run, *options)
    timeline = Timeline.load(path)
    assert timeline.iteration_ns * 1e-9 == pytest.approx(made.chosen.best.iteration_s)


# --- the report ---


def test_a_report_directory(run: Run, profile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "report"
    result = run(
        "simulate", profile, LINK, "--workers", "4,8", "--planner", "ddp,merge", "--report", folder
    )
    assert (result.code, result.err) == (0, "")
    assert f"report written to {folder}" in result.out
    bundle = Bundle.load(folder)
    assert bundle.what_if is not None
    assert 'id="workers-curves"' in (folder / "report.html").read_text()
    before = (folder / "report.html").read_bytes()
    assert run("report", folder).code == 0
    assert (folder / "report.html").read_bytes() == before
    assert run("show", folder / "what-if.json").code == 0


def test_a_page(run: Run, profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("simulate", profile, LINK, "--report", page, "--planner", "merge").code == 0
    assert 'id="path"' in page.read_text()


def test_where_a_report_cannot_be_is_said_first(
    run: Run, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.cli.simulate.study", lambda *_, **__: pytest.fail("too late"))
    for target in (tmp_path / "absent" / "page.html", profile):
        result = run("simulate", profile, LINK, "--report", target)
        assert (result.code, result.out) == (2, "")
        assert "cannot be written" in result.err


# --- other tools' traces ---


def test_a_trace_is_a_profile_too(run: Run, tmp_path: Path) -> None:
    made = chain([10**6] * 2, [2 * 10**6] * 2, [100_000] * 2)
    path, table = tmp_path / "profile.json", tmp_path / "layers.txt"
    made.save(path)
    written = run("trace", "convert", path, "--to", "layer-table", "-o", table, "--network", LINK)
    assert written.code == 0
    result = run("simulate", table, LINK, "--planner", "wfbp", "--json")
    assert result.code == 0
    ours = predict_iteration_s(
        made, PRESETS["10gbit"], PLANNERS["wfbp"].plan(made, PRESETS["10gbit"])
    )
    assert json.loads(result.out)["predictions"][0]["iteration_s"] == pytest.approx(ours, rel=0.01)


def test_what_is_no_profile(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("hello\n")
    result = run("simulate", path, LINK)
    assert (result.code, result.out) == (2, "")
    assert "not a trace of a known format" in result.err


def test_a_trace_is_simulated_for_its_own_workers(run: Run, tmp_path: Path) -> None:
    path = Job(workers=8).write(tmp_path / "job.json")
    preset = ("simulate", path, "10gbit", "--planner", "merge")
    result = run(*preset)
    assert (result.code, result.err) == (0, "")
    assert "8 workers; no schedule" in result.out
    assert "note: for 8 workers, as in the trace; --workers 16 takes those of 10gbit" in result.out
    result = run(*preset, "--json")
    assert json.loads(result.out)["workers"] == 8
    assert "note: for 8 workers, as in the trace" in result.err
    made = run(*preset, "--bandwidth", "1gbit", "--json")
    (point,) = WhatIf.from_json(made.out).points
    assert point.setting.workers == 8
    told = (
        (*preset, "--workers", "16"),
        ("simulate", path, "bandwidth=10gbit,workers=16", "--planner", "merge"),
        ("simulate", path, "bandwidth=10gbit,hosts=2x8", "--planner", "merge"),
    )
    for arguments in told:
        result = run(*arguments)
        assert "16 workers; no schedule" in result.out
        assert "as in the trace" not in result.out
    alone = Job(workers=1, messages=False).write(tmp_path / "alone.json")
    result = run("simulate", alone, "10gbit", "--planner", "merge")
    assert "16 workers; no schedule" in result.out
    assert "note: one worker, as in the trace, exchanges nothing" in result.out


def test_what_a_parameter_server_does_not_count_is_said(run: Run, profile: Path) -> None:
    options = ("--strategy", "parameter-server", "--planner", "ddp")
    assert swept(run, profile, LINK, *options).notes == ()
    trees = swept(run, profile, f"{LINK},algorithm=tree", *options)
    assert "the network's binary-tree is not used" in trees.notes[0]
    clipped = swept(run, profile, LINK, *options, "--clip")
    assert "no norm of the gradients is exchanged" in clipped.notes[0]


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "x"), "write one as 16, some as 4,8,16"),
        (("--workers", "4,4"), "names a count twice"),
        (("--bandwidth", "10"), "has no unit"),
        (("--bandwidth", "1gbit,10gb"), "an example: --bandwidth 1gbit,10gbit"),
        (("--bandwidth", "1gbit,1gbit"), "'1gbit' is named twice"),
        (("--latency", "20"), "an example: --latency 5us,20us"),
        (("--algorithm", "rong"), "did you mean 'ring'?"),
        (("--algorithm", "gtop-k"), "gtop-k needs a density, such as 0.001"),
        (("--wire", "fp31"), "did you mean 'fp32'?"),
        (("--density", "2"), "a density must be above 0 and at most 1, found 2"),
        (("--density", "much"), "cannot read 'much'; an example: --density none,0.001"),
        (("--compute-scale", "0"), "a compute scale must be between 0.001 and 1000"),
        (("--compute-scale", "nan"), "cannot read 'nan'"),
        (("--straggler", "1.2"), "expected FACTOR@RANK"),
        (("--straggler", "1.2@16"), "of 16 workers the ranks are 0 to 15"),
        (("--straggler", "2@5", "--workers", "4,8"), "of 4 workers the ranks are 0 to 3"),
        (("--straggler", "1e9@0"), "--straggler"),
        (("--spread", "3"), "a deviation must be between 0 and 2, found 3"),
        (("--jitter", "-1"), "an example: --jitter 0,0.05"),
        (("--seed", "3"), "--seed has nothing to draw"),
        (("--seed", "3", "--spread", "0"), "--seed has nothing to draw"),
        (("--seed", "x", "--spread", "0.1"), "cannot read 'x'"),
        (("--jobs", "0"), "jobs must be at least 1 and at most 64, found 0"),
        (("--jobs", "1,x"), "cannot read 'x'; an example: --jobs 1,2"),
        (("--strategy", "lop"), "did you mean 'loop'?"),
        (("--strategy", "all,loop"), "--strategy all stands alone"),
        (("--strategy", "parameter-server", "--algorithm", "ring"), "would do nothing"),
        (("--workers", "2,4", "--point", "3"), "there is no point 3; the sweep has 2 points"),
        (("--workers", "1,2,...,1000", "--spread", "0,.1,.2,.3,.4,.5"), "for 6000 points"),
        (
            ("--plan", "x", "--planner", "all", "--workers", "4,8"),
            "give either --planner or --plan",
        ),
    ],
)
def test_mistakes(run: Run, profile: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", profile, LINK, *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err
    assert "Traceback" not in result.err


def test_density_and_hosts_contradict(run: Run, profile: Path) -> None:
    hosts = "bandwidth=10gbit,hosts=4x8"
    result = run("simulate", profile, hosts, "--density", "0.001")
    assert result.code == 2
    assert (
        "gtop-k-butterfly has no form for hosts of several workers; leave the hosts out"
        in result.err
    )


def test_a_server_for_every_worker(run: Run, profile: Path) -> None:
    arguments = ("--strategy", "parameter-server", "--json")
    one = run("simulate", profile, LINK, *arguments)
    many = run("simulate", profile, LINK, *arguments, "--algorithm", "sharded-parameter-server")
    assert (one.code, many.code) == (0, 0), many.err
    seconds = [
        json.loads(found.out)["points"][0]["predictions"][0]["iteration_s"] for found in (one, many)
    ]
    assert seconds[0] > 2 * seconds[1]


def test_a_larger_batch_scales_better(run: Run, profile: Path) -> None:
    made = swept(run, profile, LINK, *DDP, "--batch", "1,4", "--batch-fixed", "0,0.5")
    assert made.swept == ("batch", "batch_fixed")
    seconds = [point.predictions[0].iteration_s for point in made.points]
    assert [(p.setting.batch, p.setting.batch_fixed) for p in made.points] == [
        (1.0, 0.0),
        (4.0, 0.0),
        (1.0, 0.5),
        (4.0, 0.5),
    ]
    assert seconds[0] == seconds[2]
    assert seconds[0] < seconds[3] < seconds[1]
    result = run("simulate", profile, LINK, "--batch-fixed", "0.1")
    assert result.code == 2
    assert "give --batch too" in result.err


def test_a_link_is_calibrated_by_measured_iterations(run: Run, profile: Path) -> None:
    slow = run("simulate", profile, "bandwidth=1gbit,latency=200us,workers=16", *DDP, "--json")
    seconds = json.loads(slow.out)["predictions"][0]["iteration_s"]
    given = ("--calibrate", f"16={seconds}s")
    result = run("simulate", profile, LINK, *DDP, *given, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)["predictions"][0]["iteration_s"]
    assert found == pytest.approx(seconds, rel=1e-3)
    assert "note: the link is 10.00 times slower than given" in result.err
    made = swept(run, profile, LINK, *DDP, *given, "--workers", "16,64")
    assert any("the link is 10.00 times slower" in note for note in made.notes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("16", "--calibrate: duration '' is not a number with a unit"),
        ("16=0ms", "an iteration's time must be above 0 s, found 0ms"),
        ("16=1s,16=2s", "--calibrate names a number of workers twice"),
        ("0=1s", "at least 1"),
        ("16=100s", "no link from 16 times slower to as many times faster explains"),
    ],
)
def test_what_cannot_calibrate(run: Run, profile: Path, given: str, said: str) -> None:
    result = run("simulate", profile, LINK, "--calibrate", given)
    assert result.code == 2
    assert said in result.err


def test_workers_that_do_not_fill_hosts(run: Run, profile: Path) -> None:
    """They are spread evenly; the fullest host counts."""
    network = "bandwidth=10gbit,hosts=4x8,workers=31"
    result = run("simulate", profile, network, "--workers", "8,12,32", "--json")
    assert result.code == 0, result.err
    points = [point["setting"]["workers"] for point in json.loads(result.out)["points"]]
    assert points == [8, 12, 32]
    alone = run("simulate", profile, network, *DDP)
    assert "31 workers" in alone.out


def test_a_parameter_server_needs_a_link(run: Run, profile: Path) -> None:
    result = run("simulate", profile, "a=1e-3,b=1e-9", "--strategy", "parameter-server")
    assert result.code == 2
    assert "a parameter server needs the point-to-point costs of a link" in result.err


# --- options by themselves ---


def test_what_counts_as_plain() -> None:
    assert is_plain({"wire": None})
    assert is_plain({"workers": "64", "algorithm": "ring"})
    assert not is_plain({"workers": "4,8"})
    assert not is_plain({"algorithm": "ring,two-tree"})
    assert not is_plain({"wire": "fp32"})


def test_the_longest_lists_end_early() -> None:
    with pytest.raises(UserError, match="more than 5000 values"):
        points_of({"compute_scale": ",".join(f"{1 + i * 1e-6:.6f}" for i in range(6000))}, 4)
    many = ",".join(str(i / 1000) for i in range(100))
    with pytest.raises(UserError, match="stand for more than 5000 combinations"):
        points_of({"spread": many, "jitter": many}, 4)


def test_a_bar_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(tracked([1, 2, 3])) == [1, 2, 3]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(tracked([1, 2, 3])) == [1, 2, 3]
    assert "simulating" in capsys.readouterr().err


def test_the_output_on_the_page_is_that_of_the_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "what-if.md").read_text()
    (block,) = re.findall(r"^\$ syncline (simulate runs/.*?)^```", page, re.DOTALL | re.MULTILINE)
    command, _, output = block.partition("\n")
    example = runpy.run_path(str(root / "examples" / "plan_without_torch.py"))
    monkeypatch.chdir(tmp_path)
    example["described_profile"]().save(_folder(tmp_path / "runs" / "described") / "profile.json")
    result = run(*shlex.split(command))
    assert result.out.split() == output.split()


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
