"""The figures and claims of ``reproduce``: in step with each other and with the code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import matplotlib as mpl
import pytest
from PIL import Image
from reproduce import (
    claims,
    claims_dag,
    claims_gtopk,
    claims_mgwfbp,
    claims_pace,
    claims_pipeline,
    common,
    inputs,
)
from reproduce.__main__ import SCRIPTS, main
from reproduce.claim import Verdict

from tests.cases import first_few
from tests.trace_files import TRACES

CLAIMS = [
    *claims_dag.CLAIMS,
    *claims_mgwfbp.CLAIMS,
    *claims_pace.CLAIMS,
    *claims_pipeline.CLAIMS,
    *claims_gtopk.CLAIMS,
]
SELF_CONTAINED = (
    "dag_fig1",
    "dag_table6",
    "mgwfbp_fig1",
    "mgwfbp_fig2",
    "mgwfbp_table2",
    "pipeline_table1",
    "pipeline_fig4",
    "gtopk_fig5",
    "gtopk_fig9",
    "gtopk_table7",
)
"""Quick, and without any trace of others."""
WITH_FALLBACK = ("dag_eq6", "dag_resnet", "dag_fig4", "mgwfbp_fig4", "mgwfbp_fig9")
WITH_FALLBACK_LATE = ("mgwfbp_fig10", "mgwfbp_fig11", "pace_fig8", "pace_fig10")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"reproduce.{name}")


def test_there_is_a_script_for_every_result_and_picture() -> None:
    def stems(folder: Path, suffix: str) -> set[str]:
        return {path.stem for path in folder.glob(f"*.{suffix}")}

    assert stems(common.RESULTS, "json") == set(SCRIPTS)
    assert stems(common.PICTURES, "png") == set(SCRIPTS)
    named = {
        p.stem
        for p in common.FOLDER.glob("*.py")
        if re.match(r"(dag|mgwfbp|pace|pipeline|gtopk)_", p.stem)
    }
    assert named - {"pace_speed"} == set(SCRIPTS)
    assert all(name == module(name).NAME for name in SCRIPTS)


def test_the_page_of_claims_is_that_of_the_results() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run make reproduce"


def test_the_page_names_every_script_and_gives_every_claim_a_verdict() -> None:
    text = claims.PAGE.read_text()
    used = {claim.script for claim in CLAIMS} - {None}
    assert used == set(SCRIPTS)
    assert all(f"[{name}]({name}.py)" in text for name in SCRIPTS)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    verdicts = [
        re.search(r"\| \*\*([a-z ]+)\*\* \|", row) for row in rows if "| verdict |" not in row
    ]
    assert len(verdicts) == len(CLAIMS)
    assert all(found and found[1] in get_args(Verdict) for found in verdicts)


def test_the_readme_lists_every_script_with_its_picture() -> None:
    text = (common.FOLDER / "README.md").read_text()
    for name in SCRIPTS:
        assert f"| [{name}]({name}.py) |" in text
        assert f"(pictures/{name}.png)" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_pictures_are_small(name: str) -> None:
    picture = common.PICTURES / f"{name}.png"
    assert picture.stat().st_size < 100_000
    with Image.open(picture) as image:
        assert 500 <= image.width <= 1400


@pytest.mark.parametrize("name", first_few(SELF_CONTAINED, 2))
def test_results_are_those_of_the_code(name: str) -> None:
    found = common.tidy(module(name).compute())
    assert found == common.load(name), f"run python -m reproduce {name}"


def test_the_counterexample_to_theorem_1() -> None:
    found = common.tidy(module("mgwfbp_theorem1").counterexample())
    assert found == common.load("mgwfbp_theorem1")["counterexample"]
    assert found["merge"]["end_ms"] < found["mgwfbp"]["end_ms"] < found["wfbp"]["end_ms"]


def test_the_example_of_pace_saves_a_quarter() -> None:
    orders = module("pace_fig2").compute()["orders"]
    assert orders["pace"]["dag_ms"] == pytest.approx(0.75 * orders["fifo"]["dag_ms"])
    for found in orders.values():
        assert found["dag_ms"] == pytest.approx(found["by_hand_ms"])


def test_architectures_have_the_tensors_of_the_table() -> None:
    fig5 = module("mgwfbp_fig5")
    for name, (tensors, parameters) in fig5.TABLE_4.items():
        built = fig5.resnet if name in fig5.RESNETS else fig5.densenet
        shape = (fig5.RESNETS[name],) if name in fig5.RESNETS else fig5.DENSENETS[name]
        sizes = built(*shape)
        assert len(sizes) == tensors
        assert sum(sizes) == pytest.approx(parameters, rel=0.01)
    assert (len(fig5.vgg16()), sum(fig5.vgg16())) == (32, 138_357_544)
    assert (len(fig5.gpt2()), sum(fig5.gpt2())) == (148, 124_439_808)


@pytest.fixture
def no_shared_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(inputs, "TRACES", tmp_path / "absent")
    monkeypatch.setattr(inputs, "ALL_REDUCES", tmp_path / "absent")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(common, "FOLDER", tmp_path)
    inputs.shared.cache_clear()
    yield
    inputs.shared.cache_clear()


@pytest.mark.parametrize("name", first_few([*WITH_FALLBACK, *WITH_FALLBACK_LATE], 2))
@pytest.mark.usefixtures("no_shared_data")
def test_scripts_go_on_without_the_traces_of_others(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inputs, "OWN", common.RESULTS)  # and without our own
    module(name).main()
    assert (common.PICTURES / f"{name}.png").stat().st_size > 5000
    assert "absent here; " in capsys.readouterr().out
    monkeypatch.setattr("reproduce.claim.RESULTS", common.RESULTS)
    for claim in CLAIMS:
        if claim.script == name:
            assert claim.finding().verdict in get_args(Verdict)


def test_a_claim_whose_script_has_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("reproduce.claim.RESULTS", tmp_path)
    found = CLAIMS[0].finding()
    assert found.verdict == "not reproducible here"
    assert found.text == "its script has not been run"


def test_an_unknown_script_is_refused() -> None:
    with pytest.raises(SystemExit, match="no script 'mgwfbp_fig3'; there are: dag_fig1"):
        main(["mgwfbp_fig3"])


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}")
def test_resnet50_on_a_k80_computes_as_long_as_printed() -> None:
    profile = inputs.resnet50_k80()
    assert profile is not None
    assert profile.phase_s("backward") == pytest.approx(inputs.K80_BACKWARD_S)
    assert len(profile.gradients) == 161


def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    before = dict(mpl.rcParams)
    result = common.load("mgwfbp_fig1")
    module("mgwfbp_fig1").draw(result)
    assert dict(mpl.rcParams) == before
