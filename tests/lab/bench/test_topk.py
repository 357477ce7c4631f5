"""The benchmark of selection, on small vectors."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from syncline.cli.commands import cli
from syncline.errors import UserError
from syncline.lab.bench import topk
from syncline.lab.bench.topk import contestants, measure_selection
from syncline.lab.bench.topk_report import (
    FUSED,
    READ,
    SELECT,
    TORCH,
    TORCH_FUSED,
    Selections,
    Timed,
    render,
)


def test_everybody_has_a_turn_in_every_round() -> None:
    told = []
    found = measure_selection(
        [100, 2000], [0.1, 0.01], rounds=2, progress=lambda *what: told.append(what[1:])
    )
    assert found.cases == ((100, 0.1), (100, 0.01), (2000, 0.1), (2000, 0.01))
    for elements, density in found.cases:
        for name in (SELECT, FUSED, TORCH, TORCH_FUSED, READ):
            entry = found.of(name, elements, density)
            assert entry is not None
            assert len(entry.rounds_s) == 2
    assert told == [(n, 8) for n in range(8)]
    assert Selections.from_json(found.to_json()) == found


def test_what_a_gpu_does_selects_the_same_on_the_cpu() -> None:
    """Its contestants, which check what they select; all of them leave zeros where they took."""
    calls = contestants(70_000, 70, torch.device("cpu"))
    with mock.patch.object(topk, "_on_the_host", topk._on_a_device):
        theirs = contestants(70_000, 70, torch.device("cpu"))
    assert calls.keys() == theirs.keys()
    assert theirs[SELECT]().tolist() == calls[SELECT]().tolist()
    theirs[FUSED]()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured() -> None:
    found = measure_selection([100_000], [0.01], rounds=1, device="cuda")
    assert found.device == torch.cuda.get_device_name()
    assert len(found.entries) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_a_gpu_that_is_not_there_is_the_user_s_error() -> None:
    with pytest.raises(UserError, match=r"--device cuda: torch .* finds no GPU here; check"):
        CliRunner().invoke(cli, ["bench", "topk", "--device", "cuda"], catch_exceptions=False)
    with pytest.raises(UserError, match="measured on 'cpu' or 'cuda', found 'tpu'"):
        measure_selection([10], [0.1], device="tpu")


def test_the_report_and_show(tmp_path: Path) -> None:
    arguments = ["bench", "topk", "--sizes", "1e3,2e3", "--densities", "0.01,0.1", "--rounds", "1"]
    folder = tmp_path / "measured"
    written = CliRunner().invoke(cli, [*arguments, "--report", str(folder)], catch_exceptions=False)
    assert f"report written to {folder}" in written.output
    measured = Selections.load(folder / "selections.json")
    page = (folder / "selections.html").read_text()
    for text in ("Density 0.1", "Of 2,000 elements at density 0.1", "one core", "<svg"):
        assert text in page
    assert render(measured) == page
    show = ["show", str(folder / "selections.json")]
    shown = CliRunner().invoke(cli, show, catch_exceptions=False)
    assert shown.output == written.output.replace(f"report written to {folder}\n", "")
    as_json = CliRunner().invoke(cli, [*show, "--json"], catch_exceptions=False)
    assert Selections.from_json(as_json.stdout) == measured
    alone = tmp_path / "alone.html"
    CliRunner().invoke(cli, [*arguments, "--report", str(alone)], catch_exceptions=False)
    assert "Density 0.01" in alone.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["alone.html"]


def test_ratios_are_medians_over_rounds() -> None:
    def timed(name: str, *rounds_s: float) -> Timed:
        return Timed(contestant=name, elements=10, density=0.1, rounds_s=rounds_s)

    measured = Selections(
        machine="one",
        versions={},
        instructions="avx2",
        entries=(timed(SELECT, 1.0, 2.0, 1.0), timed(TORCH, 10.0, 60.0, 20.0)),
    )
    assert measured.times_faster(SELECT, TORCH, 10, 0.1) == 20.0
    with pytest.raises(UserError, match="'select' and 'read' were not both measured at 10"):
        measured.times_faster(SELECT, READ, 10, 0.1)
    with pytest.raises(UserError, match="no entries"):
        Selections(machine="one", versions={}, instructions="avx2", entries=())
    with pytest.raises(UserError, match="expected times above 0 s"):
        timed(SELECT)


def test_the_command() -> None:
    arguments = ["bench", "topk", "--sizes", "1e3", "--densities", "0.01", "--rounds", "1"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert "torch with residual" in result.output
    assert "1,000" in result.output
    as_json = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert len(Selections.from_json(as_json.stdout).entries) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "many"], "--sizes 'many': expected numbers with commas"),
        (["--sizes", "0"], "sizes, densities and rounds of at least 1"),
        (["--densities", "2"], "densities are above 0 and at most 1"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(cli, ["bench", "topk", *arguments], catch_exceptions=False)
