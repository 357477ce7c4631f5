"""``syncline run``: scripts that know nothing of Syncline train with it, to the last bit."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from torch import nn

from syncline.cli.commands import cli
from syncline.errors import UserError
from syncline.files.report.bundle import Bundle
from syncline.plan.advice import Advice
from syncline.plan.recipe import Recipe
from syncline.plan.run import Run
from syncline.torch_entry import LAUNCHED
from syncline.train.compilation import repeated_blocks
from syncline.train.launched.request import Request
from tests.adoption.outcome import TORCHRUN, alone, ended, outcomes
from tests.adoption.unmodified import Subclass
from tests.mortal import Mortals

SCRIPT = Path(__file__).with_name("unmodified.py")
OPTIONS = ["--cache", "none", "--no-check", "--planner", "tictac"]
RUN = [*TORCHRUN, "-m", "syncline.run", *OPTIONS]
KINDS = ("plain", "hook", "subclass", "gan", "compiled")
Ranks = list[dict[str, Any]]
Stock = Callable[[str], Ranks]


def start(folder: Path, command: list[str], *kinds: str) -> tuple[dict[str, Ranks], str]:
    """Train kinds; return what each rank came to, by kind, and what was printed."""
    folder.mkdir()
    said = ended([*command, SCRIPT, folder, *kinds]).stderr
    return {kind: outcomes(folder, f"{kind}-") for kind in kinds}, said


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


@pytest.fixture(scope="module")
def stock(mortals: Mortals, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Return what a kind comes to without Syncline."""

    @functools.cache
    def of(kind: str) -> Ranks:
        folder = tmp_path_factory.mktemp("alone")
        ranks = mortals.run(alone, 2, kind, folder=folder)
        assert [rank.code for rank in ranks] == [0, 0], ranks
        return outcomes(folder, f"{kind}-")

    return of


def test_bits_are_those_of_the_script_alone(stock: Stock, tmp_path: Path) -> None:
    report = tmp_path / "report"
    ours, said = start(tmp_path / "run", [*RUN, "--report", str(report)], "plain")
    assert {rank["class"] for rank in stock("plain")} == {"torch.nn.parallel.distributed"}
    assert {rank["class"] for rank in ours["plain"]} == {"syncline.train.ddp"}
    assert {rank["digest"] for rank in stock("plain")} == {r["digest"] for r in ours["plain"]}
    assert all(all(rank["same"]) for rank in ours["plain"])
    assert "was not converted" not in said
    assert Run.load(report / "run.json").deferred


@pytest.mark.slow
def test_models_that_cannot_be_converted_and_several_train_as_alone(
    stock: Stock, tmp_path: Path
) -> None:
    """Here the launcher is started by it."""
    report = tmp_path / "report"
    run = [sys.executable, "-m", "syncline.run", *OPTIONS, "--report", str(report)]
    ours, said = start(tmp_path / "run", [*run, "-m", *TORCHRUN[2:]], *KINDS)
    known = {"torch.nn.parallel.distributed", Subclass.__module__}
    for kind in KINDS:
        assert {rank["class"] for rank in stock(kind)} <= known
        assert {rank["digest"] for rank in stock(kind)} == {r["digest"] for r in ours[kind]}, kind
        assert all(all(rank["same"]) for rank in ours[kind]), kind
    converted = ours["plain"] + ours["gan"] + ours["compiled"]
    assert {rank["class"] for rank in converted} == {"syncline.train.ddp"}
    assert {rank["class"] for rank in ours["hook"]} == {"torch.nn.parallel.distributed"}
    assert {rank["class"] for rank in ours["subclass"]} == {"__main__"}
    lines = [line for line in said.splitlines() if "was not converted" in line]
    assert len(lines) == 2
    assert "the wrapped model has a communication hook" in lines[0]
    assert "found a Subclass" in lines[1]
    assert "updates are synchronous: the whole model is compiled" in said
    # One report a model: the plain one, and the two of the GAN.
    runs = [Run.load(Path(f"{report}{n}") / "run.json") for n in ("", "-2", "-3")]
    assert runs[0].deferred
    assert {run.decision for run in runs} <= {"planned", "ddp"}


@pytest.mark.slow
def test_blocks_are_compiled_instead_of_the_whole(stock: Stock, tmp_path: Path) -> None:
    """With a backend that changes no number, bits stay; updates overlap, and names are short."""
    report = ["--compile-blocks", "--report", str(tmp_path / "report")]
    blocks, said = start(tmp_path / "blocks", [*RUN, *report], "compiled")
    assert "synchronous" not in said
    assert Run.load(tmp_path / "report" / "run.json").deferred
    whole = stock("compiled")
    assert len({rank["digest"] for rank in whole + blocks["compiled"]}) == 1
    assert whole[0]["names"][0] == "_orig_mod.0.weight"
    assert blocks["compiled"][0]["names"][0] == "0.weight"


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))), 2),
        (nn.Sequential(nn.TransformerEncoder(layer(), 2), nn.TransformerEncoder(layer(), 2)), 2),
        (nn.Sequential(nn.Linear(99, 99), nn.TransformerEncoder(layer(), 2)), 0),
    ],
)
def test_repeated_blocks(model: nn.Module, count: int) -> None:
    blocks = repeated_blocks(model)
    assert len(blocks) == count
    assert len({type(block) for block in blocks}) <= 2


@pytest.mark.slow
def test_advice_is_given_and_training_goes_on(stock: Stock, tmp_path: Path) -> None:
    folder = tmp_path / "advice"
    command = [*TORCHRUN, "-m", "syncline.advise", "--continue", "-o", str(folder)]
    observed, said = start(tmp_path / "observed", command, "plain")
    assert observed["plain"][0]["digest"] == stock("plain")[0]["digest"]
    assert "trying" not in said
    found = Advice.load(folder / "advice.json")
    assert (found.workers, found.is_measured) == (2, True)
    assert {rank.rank for rank in found.ranks} == {0, 1}
    assert all(rank.computing_s and rank.link_s for rank in found.ranks)
    assert found.exchanges[-1].bus_bytes_per_s > 0
    assert {"overlap", "16-bit gradients", "bucket size"} <= {r.name for r in found.remedies}
    bundle = Bundle.load(folder)  # what plan, simulate and replay read
    assert bundle.profile is not None
    assert bundle.network is not None
    assert bundle.timeline_measured is not None
    assert bundle.profile.baseline is not None
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_the_script_ends_once_advice_was_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = [*TORCHRUN, "-m", "syncline.advise", "--json", "-o", tmp_path / "advice"]
    said = ended([*command, SCRIPT, out, "plain"]).stdout
    assert Advice.from_json(said).model == "Sequential"
    assert not list(out.iterdir())


def test_the_request_reaches_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.delenv(LAUNCHED, raising=False)
    monkeypatch.setattr(os, "execvpe", lambda *args: started.append(args))
    options = ["--planner", "mgwfbp", "--compression", "gtopk", "--density", "0.01"]
    command = ["srun", "python", "train.py", "--lr", "0.1"]
    result = CliRunner().invoke(cli, ["run", *options, "--", *command], catch_exceptions=False)
    assert result.exit_code == 0
    ((program, words, environment),) = started
    assert (program, words) == ("srun", command)
    recipe = Recipe(density=0.01, algorithm="gtop-k-butterfly", dense_below_elements=1024)
    expected = Request(planner="mgwfbp", compression=recipe)
    assert environment[LAUNCHED] == expected.to_variable()[LAUNCHED]
    CliRunner().invoke(cli, ["run", "train.py", "-m", "x"], catch_exceptions=False)
    assert started[1][1][0] == sys.executable
    assert started[1][1][-3:] == ["train.py", "-m", "x"]
    for name in ("bf16", "bfloat16"):
        CliRunner().invoke(cli, ["run", "--compression", name, "x.py"], catch_exceptions=False)
        expected = Request(compression="bfloat16")
        assert started[-1][2][LAUNCHED] == expected.to_variable()[LAUNCHED]


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--compression", "gtopk", "x.py"], {}, "go together"),
        (["--density", "0.1", "x.py"], {}, "go together"),
        (["--compression", "zip", "x.py"], {}, "unknown compression"),
        (["no-such-program"], {}, "no-such-program cannot be started: No such file"),
        (["x.py"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "unset it"),
    ],
)
def test_what_cannot_be_started(
    arguments: list[str], environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(cli, ["run", *arguments], catch_exceptions=False)


def test_a_folder_of_path_may_be_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # the kernel's, of the folder
    monkeypatch.setattr(os, "execvpe", Mock(side_effect=denied))
    with pytest.raises(UserError, match="no-such-program cannot be started: No such file"):
        CliRunner().invoke(cli, ["run", "no-such-program"], catch_exceptions=False)
