"""``syncline plan``: files in, a plan out, exit codes and what goes to which stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from syncline.cli import main
from syncline.cli.networks import network_argument
from syncline.errors import UserError
from syncline.plan.network import PRESETS, Link, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.merge import Merge
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from tests import strategies as some


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def call(*arguments: object) -> Result:
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


PROFILE = some.profile_of([1_000_000] * 6, [200_000, 10, 0, 300_000, 5, 60_000])


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


LINKED = msgspec.structs.replace(
    PRESETS["10gbe-v100"],
    name="lan",
    link=Link(alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=0),
)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "network.json"
    LINKED.save(path)
    return path


def test_a_plan_is_shown(run: Run, profile: Path) -> None:
    result = run("plan", profile, "10gbe-k80", "--planner", "merge")
    assert result.code == 0
    assert "merge" in result.out
    ddp_s, merge_s = (
        predict_iteration_s(PROFILE, PRESETS["10gbe-k80"], plan.plan(PROFILE, PRESETS["10gbe-k80"]))
        for plan in (Ddp(), Merge())
    )
    assert result.out.splitlines()[-1].endswith(f": {ddp_s / merge_s:.2f} times as fast")
    assert result.err == ""


def test_sparse_exchange_is_not_compared_with_ddp(run: Run, profile: Path) -> None:
    sparse = "bandwidth=10gbit,workers=4,algorithm=top-k,density=0.001"
    result = run("plan", profile, sparse)
    assert result.code == 0
    assert "times as fast" not in result.out


@pytest.mark.parametrize("planner", PLANNERS)
def test_json_is_all_that_is_printed(run: Run, profile: Path, planner: str) -> None:
    result = run("plan", profile, "10gbe-k80", "--planner", planner, "--json")
    assert result.code == 0
    assert json.loads(result.out)["format"] == "syncline/plan"
    assert Plan.from_json(result.out) == PLANNERS[planner].plan(PROFILE, PRESETS["10gbe-k80"])


def test_the_plan_is_written(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", profile, "10gbe-k80", "-o", path)
    assert result.code == 0
    assert f"plan written to {path}" in result.out
    assert Plan.load(path) == PLANNERS["auto"].plan(PROFILE, PRESETS["10gbe-k80"])


def test_written_and_printed_are_the_same(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", profile, "10gbe-k80", "-o", path, "--json")
    assert result.out == path.read_text()


def test_auto_considers_overlap_as_training_does(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    some.profile_of([10_000_000] * 8, [250_000] * 8, forward_ns=50_000_000).save(path)
    line = "a=1e-5,b=1e-8,workers=4"
    assert Plan.from_json(run("plan", path, line, "--json").out).planner == "overlap"
    held = Plan.from_json(run("plan", path, line, "--no-overlap", "--json").out)
    assert held.planner != "overlap"
    assert held.wait == "update"
    p3 = run("plan", path, line, "--planner", "p3", "--no-overlap", "--json")
    assert Plan.from_json(p3.out).wait == "update"


# Networks


def test_a_network_file(run: Run, profile: Path, network: Path) -> None:
    result = run("plan", profile, network, "--json")
    assert Plan.from_json(result.out).workers == 16


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset(run: Run, profile: Path, name: str) -> None:
    assert run("plan", profile, name, "--json").code == 0


def test_a_line(run: Run, profile: Path) -> None:
    result = run("plan", profile, "a=9.08e-4, b=7.4e-10, workers=8", "--json")
    assert Plan.from_json(result.out).workers == 8


def test_lines_mean_what_they_say() -> None:
    line = network_argument("b=7.4e-10,a=9.08e-4")
    assert line.all_reduce == PRESETS["10gbe-v100"].all_reduce
    assert line.workers == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10gbe-v10", "no network file or preset '10gbe-v10'; did you mean '10gbe-v100'?"),
        ("a=1e-3", "both a= and b= are needed"),
        ("a=1e-3,b=x", "cannot read 'b=x'"),
        ("a=1e-3,b=nan", "cannot read 'b=nan'"),
        ("a=1e-3,b=1e", "cannot read 'b=1e'"),
        ("a=1e-3,c=1", "cannot read 'c=1'"),
        ("a=1e-3,a=1e-4,b=1", "cannot read 'a=1e-4'"),
        ("a=1e-3,b=1e-9,workers=2.5", "cannot read 'workers=2.5'"),
        ("a=1e-3,b=1e-9,workers=1e999", "cannot read 'workers=1e999'"),
        ("a=1e-3,b=1e-9,workers=0", "workers must be at least 1"),
        ("a=1e999,b=1e-9", "cost_s must be finite"),
        ("a=-1,b=1e-9", "cost_s must be finite and at least 0"),
        ("absent.json", "absent.json: no such file"),
        ("deep/absent", "deep/absent: no such file"),
    ],
)
def test_what_is_no_network(run: Run, profile: Path, text: str, message: str) -> None:
    result = run("plan", profile, text)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err


def test_a_file_whose_name_looks_like_a_line(run: Run, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "a=1.json"
    LINKED.save(path)
    assert run("plan", profile, path, "--json").code == 0


# Extrapolation


def test_more_workers_from_the_link(run: Run, profile: Path, network: Path) -> None:
    result = run("plan", profile, network, "--workers", 64, "--algorithm", "halving-doubling")
    assert result.code == 0
    made = run("plan", profile, network, "--workers", 64, "--json")
    assert Plan.from_json(made.out).workers == 64


def test_the_same_workers_need_no_link(run: Run, profile: Path) -> None:
    assert run("plan", profile, "10gbe-k80", "--workers", 16).code == 0


def test_algorithms_have_the_short_names_of_simulate(run: Run, profile: Path) -> None:
    made = [
        run("plan", profile, "10gbit", "--algorithm", name, "--json").out
        for name in ("double-tree", "double-binary-trees")
    ]
    assert made[0] == made[1] != ""


@pytest.mark.parametrize("text", ["10gbe-k80", "a=1e-3,b=1e-9"])
def test_more_workers_from_a_line(run: Run, profile: Path, text: str) -> None:
    made = run("plan", profile, text, "--workers", 64, "--json")
    assert Plan.from_json(made.out).workers == 64


def test_one_worker_has_no_link_to_extrapolate_from(run: Run, profile: Path) -> None:
    result = run("plan", profile, "a=1e-3,b=1e-9,workers=1", "--workers", 64)
    assert (result.code, result.out) == (2, "")
    assert "has no point-to-point measurement to extrapolate from" in result.err
    assert "syncline.probe()" in result.err


def test_an_unknown_algorithm(run: Run, profile: Path, network: Path) -> None:
    result = run("plan", profile, network, "--workers", 64, "--algorithm", "rong")
    assert result.code == 2
    assert "did you mean 'ring'?" in result.err


@pytest.mark.parametrize("workers", ["0", "-1", "1" + "0" * 400])
def test_an_impossible_number_of_workers(
    run: Run, profile: Path, network: Path, workers: str
) -> None:
    result = run("plan", profile, network, "--workers", workers)
    assert result.code == 2
    assert "at least 1" in result.err


# Mistakes


def test_an_unknown_planner(run: Run, profile: Path) -> None:
    result = run("plan", profile, "10gbe-k80", "--planner", "mergee")
    assert (result.code, result.out) == (2, "")
    assert "unknown planner 'mergee'; did you mean 'merge'?" in result.err


def test_an_unknown_command(run: Run) -> None:
    result = run("plann")
    assert result.code == 2
    assert "no such command 'plann'; did you mean 'plan'?" in result.err


@pytest.mark.parametrize("arguments", [(), ("--planner",), ("--colour", "red")])
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("plan", *arguments)
    assert (result.code, result.out) == (2, "")
    assert "Error: " in result.err


def test_a_profile_that_is_absent(run: Run, tmp_path: Path) -> None:
    result = run("plan", tmp_path / "absent.json", "10gbe-k80")
    assert (result.code, result.out) == (2, "")
    assert "absent.json: no such file" in result.err


def test_a_broken_profile(run: Run, profile: Path) -> None:
    profile.write_text(profile.read_text()[:100])
    result = run("plan", profile, "10gbe-k80", "--json")
    assert (result.code, result.out) == (2, "")
    assert "not valid JSON" in result.err
    assert "Traceback" not in result.err


def test_a_network_for_a_profile(run: Run, network: Path) -> None:
    result = run("plan", network, "10gbe-k80")
    assert result.code == 2
    assert "expected a profile file, this is a network file" in result.err


def test_a_folder_that_cannot_be_written_to(run: Run, profile: Path, tmp_path: Path) -> None:
    result = run("plan", profile, "10gbe-k80", "-o", tmp_path / "absent" / "plan.json")
    assert result.code == 2
    assert "cannot be written" in result.err


def test_network_argument_reads_files(network: Path) -> None:
    assert network_argument(str(network)) == LINKED
    assert isinstance(network_argument(str(network), workers=4), Network)
    with pytest.raises(UserError, match=r"'10gbe' is no file, preset \(10gbe-k80, .* or rate: "):
        network_argument("10gbe")


def test_a_profile_and_a_network_are_left_as_they_were(
    run: Run, profile: Path, network: Path
) -> None:
    run("plan", profile, network)
    assert Profile.load(profile) == PROFILE
    assert Network.load(network) == LINKED
