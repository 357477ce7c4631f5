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
from reproduce.__main__ import SCRIPTS, main
from reproduce.claim import Verdict

from reproduce import architectures, claims, common, inputs, pace_speed
from tests.cases import first_few
from tests.trace_files import TRACES


def module(name: str) -> ModuleType:
    return importlib.import_module(f"reproduce.{name}")


PAPERS = ("dag", "mgwfbp", "pace", "pipeline", "gtopk")
CLAIMS = [claim for paper in PAPERS for claim in module(f"claims_{paper}").CLAIMS]
SELF_CONTAINED = (
    *("dag_fig1", "dag_table6", "dag_traces", "mgwfbp_fig1", "mgwfbp_fig2", "mgwfbp_table2"),
    *("pipeline_table1", "pipeline_fig4", "gtopk_fig5", "gtopk_fig9", "gtopk_table7"),
    *("pace_measured", "pace_use", "pipeline_measured", "pipeline_overlap"),
)  # quick, and without any trace of others
WITH_FALLBACK = ("dag_eq6", "dag_resnet", "dag_fig4", "mgwfbp_fig4", "pace_fig10")
WITH_FALLBACK_LATE = ("mgwfbp_fig9", "mgwfbp_fig10", "mgwfbp_fig11", "pace_fig8")


def test_there_is_a_script_for_every_result_and_picture() -> None:
    def names(folder: Path, kind: str) -> list[str]:
        return sorted(path.name.partition(".")[0] for path in folder.glob(f"*.{kind}*"))

    assert names(common.RESULTS, "json") == sorted(SCRIPTS)
    assert names(common.PICTURES, "png") == sorted(SCRIPTS)
    named = {path.stem for paper in PAPERS for path in common.FOLDER.glob(f"{paper}_*.py")}
    assert named - {"pace_speed"} == set(SCRIPTS)
    assert all(name == module(name).NAME for name in SCRIPTS)


def test_the_page_of_claims_is_that_of_the_results() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run make reproduce"


def test_the_page_names_every_script_and_gives_every_claim_a_verdict() -> None:
    text = claims.PAGE.read_text()
    assert {claim.script for claim in CLAIMS} - {None} == set(SCRIPTS)
    assert all(f"[{name}]({name}.py)" in text for name in SCRIPTS)
    verdicts = re.findall(r"^\| .*\| \*\*([a-z ]+)\*\* \|", text, re.MULTILINE)
    assert len(verdicts) == len(CLAIMS)
    assert set(verdicts) <= set(get_args(Verdict))


def test_the_readme_lists_every_script_with_its_picture() -> None:
    text = (common.FOLDER / "README.md").read_text()
    for name in SCRIPTS:
        assert f"| [{name}]({name}.py) |" in text
        assert f"(pictures/{name}.png)" in text


def test_pictures_are_small() -> None:
    for picture in (common.PICTURES / f"{name}.png" for name in SCRIPTS):
        assert picture.stat().st_size < 100_000, picture
        with Image.open(picture) as image:
            assert 500 <= image.width <= 1400, picture


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


def test_architectures_have_the_tensors_of_the_tables() -> None:
    fig5 = module("mgwfbp_fig5")
    built = {name: architectures.elements(n) for name, n in architectures.NETWORKS.items()}
    for name, (tensors, parameters, macs) in fig5.TABLE_4.items():
        assert sum(built[name]) == pytest.approx(parameters, rel=0.03)
        if name != "GoogleNet":  # its 59 are no count of tensors; CLAIMS says of what
            assert len(built[name]) == tensors
            found = architectures.millions_of_macs(architectures.NETWORKS[name])
            assert 1e6 * found == pytest.approx(macs, rel=0.03)
    for name, (tensors, parameters) in fig5.TABLE_II.items():
        assert sum(built[name]) == pytest.approx(parameters, rel=0.003)
        assert len(built[name]) == (161 if name == "ResNet-50" else tensors)
    assert (len(built["VGG16"]), sum(built["VGG16"])) == (32, 138_357_544)
    assert (len(built["GPT-2"]), sum(built["GPT-2"])) == (148, 124_439_808)
    assert sum(built["GoogleNet"]) == 13_378_280


def test_a_network_is_divided_by_its_multiplications() -> None:
    small, large = architectures.Layer((6, 2), 10), architectures.Layer((8,), 30)
    norm = architectures.Layer((3, 3))
    profile = architectures.trained("three layers", [small, norm, large], 4.0)
    assert profile.phase_s("backward") == pytest.approx(4.0)
    assert profile.phase_s("forward") == pytest.approx(2.0)
    assert [g.elements for g in profile.gradients] == [8, 3, 3, 2, 6]
    assert profile.ready_s() == pytest.approx([5.0, 5.0, 5.0, 6.0, 6.0])
    assert [g.needed_by for g in profile.gradients] == [2, 1, 1, 0, 0]


def test_by_layer_joins_a_weight_and_its_bias_alone() -> None:
    profile = architectures.trained("ResNet-50", architectures.NETWORKS["ResNet-50"], 1.0)
    joined = architectures.by_layer(profile)
    assert (len(profile.gradients), len(joined.gradients)) == (161, 107)
    assert joined.gradient_bytes == profile.gradient_bytes
    assert joined.operations == profile.operations
    assert joined.gradients[0].elements == 2048 * 1000 + 1000
    assert set(joined.ready_s()) <= set(profile.ready_s())
    assert architectures.by_layer(joined).gradients == joined.gradients


def test_a_described_network_takes_longer_by_the_multiplications_of_its_batch() -> None:
    resnet = inputs.described("ResNet-50", 0.1)
    assert resnet.phase_s("backward") == pytest.approx(0.1)
    deep = inputs.described("ResNet-152", 0.1)
    assert deep.phase_s("backward") == pytest.approx(0.1 * 4 * 11_282.4 / 3_858.0, rel=1e-4)


def test_messages_of_horovod_wait_for_their_negotiation() -> None:
    profile = architectures.trained("VGG16", architectures.NETWORKS["VGG16"], 0.5)
    on = pace_speed.network(10, 12, 30e-6)
    planned = pace_speed.plan("horovod", profile, on)
    free = pace_speed.HOROVOD.plan(profile, on)
    # 4 rounds for a gather and for each of two broadcasts, and 11 workers one after another.
    assert pace_speed.negotiation_s(on) == pytest.approx((3 * 4 + 11) * 30e-6)
    later_s = [m.delay_s - f.delay_s for m, f in zip(planned.messages, free.messages, strict=True)]
    assert later_s == pytest.approx([23 * 30e-6] * len(free.messages))


@pytest.fixture
def no_shared_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("TRACES", "ALL_REDUCES"):
        monkeypatch.setattr(inputs, name, tmp_path / "absent")
    for name, folder in (("RESULTS", "results"), ("PICTURES", "pictures"), ("FOLDER", "")):
        monkeypatch.setattr(common, name, tmp_path / folder)
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
    assert (found.verdict, found.text) == ("not reproducible here", "its script has not been run")


def test_an_unknown_script_is_refused() -> None:
    with pytest.raises(SystemExit, match="no script 'mgwfbp_fig3'; there are: dag_fig1"):
        main(["mgwfbp_fig3"])


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}")
def test_resnet50_on_a_k80_computes_as_long_as_printed() -> None:
    profile = inputs.resnet50_k80()
    assert profile.phase_s("backward") == pytest.approx(inputs.K80_BACKWARD_S)
    assert len(profile.gradients) == 161


def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    before = dict(mpl.rcParams)
    module("mgwfbp_fig1").draw(common.load("mgwfbp_fig1"))
    assert dict(mpl.rcParams) == before
