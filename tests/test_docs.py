"""The documentation says what the code does, and every public name is on a page of it."""

from __future__ import annotations

import ast
import doctest
import itertools
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import click
import pytest
import yaml
from click.testing import CliRunner

import syncline
from syncline import errors
from syncline.cli.commands import COMMANDS, cli
from syncline.cli.show import PRINTERS
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS
from syncline.plan.network import Network
from syncline.plan.planners import PLANNERS, planner_named
from syncline.plan.simulator.predict import predict
from syncline.train import experiments, policy, trials
from syncline.train.memory import MOST_KEPT
from syncline.train.rank_measurements import LEAST_PROBE_S, PROBED_SHARE
from tests import strategies as some
from tests.pages import DOCS, code_blocks, evaluate, table_rows, text_of
from tests.programs import output_of

ROOT = Path(__file__).parents[1]
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [*sorted(ROOT.glob("*.md")), ROOT / "tests" / "README.md"]

pages = pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)


@cache
def tool(path: str) -> dict[str, Any]:
    """Return the names of a script."""
    return runpy.run_path(str(ROOT / path))


@pages
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def command_lines(page: Path) -> list[list[str]]:
    found = []
    for block in code_blocks(page.read_text(), r"(?:console|sh|bash|shell)"):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?syncline(?: |$)(.*)", line)
            if match and not (line.startswith(" ") or "│" in line):
                found.append(shlex.split(match[1], comments=True))
    return found


@pages
def test_commands_parse(page: Path) -> None:
    for arguments in command_lines(page):
        with cli.make_context("syncline", arguments[:1] or ["--help"], resilient_parsing=True):
            pass
        if not arguments or arguments[0].startswith("-"):
            continue
        command = cli.get_command(click.Context(cli), arguments[0])
        assert command is not None
        if "--help" not in arguments:
            command.make_context(arguments[0], list(arguments[1:]))


@pages
def test_options_in_running_text_exist(page: Path) -> None:
    for code in re.findall(r"`syncline ([a-z][^`]*)`", page.read_text()):
        name, *rest = shlex.split(code)
        assert name in COMMANDS, f"{page.name}: syncline {code}"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        rest = list(itertools.takewhile(lambda word: word != "--", rest))  # what it starts
        assert {word for word in rest if word.startswith("-")} <= known, f"syncline {code}"


PICTURES = {"overlap": "overlap", "step": "step-time", "gain": "gain", "phases": "phases"}


@pytest.mark.parametrize(("name", "picture"), PICTURES.items())
def test_pictures_show_what_is_predicted_or_was_measured(name: str, picture: str) -> None:
    drawn = tool(f"tools/{name}-picture")["svg"]()
    assert (DOCS / "images" / f"{picture}.svg").read_text() == drawn, f"run tools/{name}-picture"


def test_the_picture_of_overlap_shows_a_gain() -> None:
    ddp, overlap = (t.iteration_ns for t in tool("tools/overlap-picture")["timelines"]())
    assert overlap < 0.7 * ddp


def test_the_picture_of_gains_shows_what_the_page_says() -> None:
    points = tool("tools/gain-picture")["points"]()
    text = " ".join(text_of("advise.md").split())
    rates = {"500mbit": "500 Mbit", "1gbit": "1 Gbit", "2500mbit": "2.5 Gbit", "10gbit": "10 Gbit"}
    for rate, named in rates.items():
        gains = [point.gain for point in points if point.rate == rate]
        least_and_most = dict.fromkeys((f"{min(gains):.2f}", f"{max(gains):.2f}"))
        assert f"{' to '.join(least_and_most)} times as fast at {named}/s" in text
    assert len(points) == 24


def test_the_recipes_for_clusters_can_be_read() -> None:
    text = text_of("clusters.md")
    scripts = code_blocks(text, "sh")
    for block in code_blocks(text, "yaml"):
        read = yaml.safe_load(block)
        assert "syncline.run" in json.dumps(read)
        scripts += [read["run"]] if "run" in read else []
    assert len(scripts) == 3
    for script in scripts:
        assert "-m syncline.run train.py" in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_command_is_shown() -> None:
    shown = {arguments[0] for arguments in command_lines(DOCS / "index.md")}
    assert shown == set(COMMANDS)


def test_outputs_are_those_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    tool("examples/plan_without_torch.py")["main"](Path("runs/described"))
    capsys.readouterr()
    compared = 0
    for block in code_blocks(text_of("choosing-a-planner.md"), "console"):
        command, _, output = block.rpartition("$ syncline ")[2].partition("\n")
        if not output.strip():
            continue
        result = CliRunner().invoke(cli, shlex.split(command), catch_exceptions=False)
        assert result.output.split() == output.split(), command
        compared += 1
    assert compared == 4


def test_the_cost_table_is_that_of_the_code() -> None:
    compared = set()
    for cell, *formulas in table_rows(text_of("algorithms.md"), 3):
        if (name := cell.strip("`")) not in ALL_REDUCE_ALGORITHMS:
            continue
        compared.add(name)
        for workers in (2, 3, 4, 16, 64, 1000):
            values = {"N": float(workers), "alpha": 2.0, "beta": 3.0, "gamma": 5.0}
            found = [evaluate(formula.strip("`"), **values) for formula in formulas]
            expected = ALL_REDUCE_ALGORITHMS[name](workers, 2.0, 3.0, 5.0)
            assert found == pytest.approx(list(expected), rel=1e-12), name
    assert compared == ALL_REDUCE_ALGORITHMS.keys()


def test_the_counter_example_is_what_the_planners_do() -> None:
    text = text_of("algorithms.md")
    tensors = [
        (float(ready), int(size))
        for name, ready, size in table_rows(text, 3)
        if re.fullmatch(r"t\d", name)
    ]
    ready_ms = [0.0, *(ready for ready, _ in tensors)]
    gaps_ns = [round(1e6 * (after - before)) for before, after in itertools.pairwise(ready_ms)]
    profile = some.profile_of(gaps_ns, [size // 4 for _, size in tensors])
    network = Network.line(workers=16, a_s=1e-3, b_s_per_byte=2e-9)
    compared = set()
    for planner, messages, finish_ms in table_rows(text, 3):
        name = planner.strip("`")
        if name not in PLANNERS or "to" not in messages:
            continue
        forecast = predict(profile, network, planner_named(name).plan(profile, network))
        spans = [span for span in forecast.timeline.spans if span.kind == "message"]
        times = re.findall(r": ([\d.]+) to ([\d.]+)", messages)
        assert [(f"{s.start_ns / 1e6:.1f}", f"{s.stop_ns / 1e6:.1f}") for s in spans] == times
        assert f"{forecast.prediction.iteration_s * 1e3:.1f}" == finish_ms
        compared.add(name)
    assert compared == {"wfbp", "mgwfbp", "merge"}


def test_the_phases_are_those_of_the_policy() -> None:
    picture = tool("tools/phases-picture")
    rows = {cells[0].strip("`"): cells[2:4] for cells in table_rows(text_of("training.md"), 5)}
    for column, iteration_s in enumerate(picture["STEPS_S"].values()):
        least = max(experiments.LEAST_COMPARED, math.ceil(experiments.COMPARED_S / iteration_s))
        fewest, most = experiments.MOST_COMPARED
        longest = round(experiments.LONGEST_COMPARED_S / iteration_s)
        span = f"{least} to {min(max(longest, fewest), most)}"
        starting = 2 + max(math.ceil(experiments.STARTING_S / iteration_s) - 2, 0)
        is_short = iteration_s < experiments.DETAILED_FROM_S
        calibrated = max(math.ceil(trials.CALIBRATED_S / iteration_s), trials.LEAST_CALIBRATED)
        deferred = f"{experiments.DEFERRED} + {span}"
        for name, expected in {
            "measuring DDP": f"{starting} + {span}",
            "profiling": f"{1 + is_short} + {experiments.PROFILED[is_short]} to "
            f"{experiments.MOST_PROFILED[is_short]}",
            "calibrating with ...": f"{experiments.DEFERRED} + {calibrated} to "
            f"{trials.MOST_CALIBRATED} each",
            "trying ...": deferred,
            "comparing with DDP": f"{experiments.REBUILT} + {span}",
            "comparing ...": deferred,
            "running the saved plan": deferred,
            "recording": f"{experiments.DEFERRED} + {policy.RECORDED_ITERATIONS}",
        }.items():
            assert rows[name][column] == expected, name
        # What the policy does: as many as the table says, and one more where that is said.
        played = {
            phase.name.partition(" with ")[0].partition(" overlap")[0]: phase.iterations
            for case in ({"shares": True}, {"remembers": True})
            for phase in picture["phases"](iteration_s, **case)
        }
        for name in ("measuring DDP", "profiling", "calibrating with ...", "trying ..."):
            shown = sum(map(int, re.findall(r"\d+", rows[name][column].partition(" to ")[0])))
            later = name == "profiling" and is_short
            assert played[name.removesuffix(" ...").removesuffix(" with")] == shown + later, name
        assert played.keys() <= {name.removesuffix(" ...").removesuffix(" with") for name in rows}
    text = " ".join(text_of("training.md").split())
    assert f"{experiments.LONGEST_COMPARED_S:g} s, but within {fewest} to {most} iterations" in text
    assert f"standard error is at most {experiments.COMPARED_NOISE:.0%}".replace("%", " %") in text
    assert f"for {PROBED_SHARE:g} of the time that one takes, or {LEAST_PROBE_S:g} s" in text
    for limit in (policy.AS_REMEMBERED, policy.CHANGED):
        assert f"| at most {100 * limit:g} %" in text
    parts = trials.CALIBRATION_PARTS
    assert f"{parts[0]}, then {parts[1]} of equal size" in text
    assert f"the newest {MOST_KEPT} are" in text


@pytest.mark.parametrize("page", ["choosing-a-planner.md", "algorithms.md"])
def test_every_planner_is_described(page: str) -> None:
    described = {line.split("`")[1] for line in text_of(page).splitlines() if line[:3] == "| `"}
    assert PLANNERS.keys() <= described


def test_every_error_is_described_with_its_exit_code() -> None:
    rows = {cells[0].strip("`"): cells for cells in table_rows(text_of("errors.md"), 4)}
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.SynclineError):
            assert rows[name][3] == str(error.exit_code), name
            assert rows[name][1].strip("`") in {base.__name__ for base in error.__mro__[1:]}, name


def test_every_kind_of_file_is_described_with_its_version() -> None:
    rows = {cells[0].strip("`"): cells[1] for cells in table_rows(text_of("architecture.md"), 3)}
    for kind in PRINTERS:
        assert rows[kind.KIND] == str(kind.VERSION)


def test_the_table_of_folders_names_every_import() -> None:
    rows = {
        name: set(re.findall(r"`(\w+)`", cells[2]))
        for cells in table_rows(text_of("architecture.md"), 4)
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    source = ROOT / "src" / "syncline"
    for path in source.rglob("*.py"):
        folder = path.relative_to(source).parts[0].removesuffix(".py")
        if folder == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("syncline."):
                assert str(node.module).split(".")[1] in rows[folder] | {folder}, path
        assert folder in rows


def test_the_files_to_read_first_and_the_helpers_of_the_tests_exist() -> None:
    section = text_of("architecture.md").partition("## Eight files to read first\n")[2]
    first = re.findall(r"^\| `(\S+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert len(first) == 8
    helpers = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "tests" / "README.md").read_text())
    assert len(helpers) > 20
    assert not [file for file in first + helpers if not (ROOT / file).is_file()]


def test_the_planner_of_the_contributing_page_plans() -> None:
    (code,) = code_blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")
    module = ModuleType("contributing")
    with patch.dict(sys.modules, contributing=module):  # msgspec resolves annotations there
        exec(compile(code, "CONTRIBUTING.md", "exec"), vars(module))  # our own page
    described = tool("examples/plan_without_torch.py")["described_profile"]()
    plan = module.Pairs().plan(described, Network.line(workers=2, a_s=1e-3, b_s_per_byte=1e-9))
    assert len(plan.messages) == math.ceil(len(described.gradients) / 2)


@pages
def test_python_in_the_pages_parses(page: Path) -> None:
    for block in code_blocks(page.read_text(), "python"):
        ast.parse(block)


API = DOCS / "api"
TEXTS = {path.stem: path.read_text() for path in API.glob("*.md")}
NEEDS = {"planning": ["data"]}  # pages whose examples go on from those of another page


def blocks(page: str, language: str) -> str:
    return "\n".join(code_blocks(TEXTS[page], language))


def test_every_public_name_is_described_and_used() -> None:
    text = "\n".join(TEXTS.values())
    described = set(re.findall(r"^::: syncline\.(\w+)$", text, re.MULTILINE))
    assert described == set(syncline.__all__)
    code = "\n".join(blocks(page, "(?:pycon|python)") for page in TEXTS)
    assert not [name for name in described if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize("page", sorted(page for page in TEXTS if blocks(page, "pycon")))
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for each in [*NEEDS.get(page, []), page]:
        example = doctest.DocTestParser().get_doctest(blocks(each, "pycon"), names, each, None, 0)
        outcome = doctest.DocTestRunner().run(example, clear_globs=False)
        assert outcome.attempted
        assert not outcome.failed
        names = example.globs


@pytest.mark.slow
def test_the_training_script_runs_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("training", "python"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed = output_of(*torchrun, "--standalone", "train.py", cwd=tmp_path)
    assert "exposed_communication_s" in printed or "iteration" in printed
