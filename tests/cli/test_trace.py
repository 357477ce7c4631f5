"""``syncline trace`` shows what a trace holds and converts it, saying what is lost."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli import main
from syncline.cli.progress import reading_bar
from syncline.cli.trace import trace
from syncline.errors import FileError, UserError
from syncline.files.traces.chakra import read_chakra
from syncline.files.traces.formats import FORMATS
from syncline.plan.network import PRESETS, Network
from syncline.plan.plan import Plan
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests.files.traces.kineto_files import Job
from tests.files.traces.seeds import ASTRASIM, TABLE_VI, chakra_of_pytorch, layered_profile


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "alexnet.txt"
    path.write_text(TABLE_VI)
    return path


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(trace, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_info_of_a_layer_table(table: Path) -> None:
    lines = [line.rstrip() for line in _run("info", table).splitlines()]
    assert lines[0] == "Trace alexnet"
    assert "steps           1" in lines
    assert "workers         unknown" in lines
    assert "operations      43" in lines
    assert "gradients       8, 244 MB" in lines
    assert "  data          1.20 s" in lines
    assert "timed messages  8, 140 kB to 151 MB" in lines
    assert any(line.startswith("note            the table has no update") for line in lines)


def test_info_as_json(table: Path) -> None:
    found = json.loads(_run("info", table, "--json"))
    assert found["format"] == "layer-table"
    assert found["workers"] is None
    assert found["gradient_bytes"] == 243_860_896
    assert found["phases_s"]["data"] == 1.2
    assert len(found["timed_messages"]) == 8
    assert found["notes"]


def test_info_shows_names_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "[red]x\x1b.txt"
    path.write_text(TABLE_VI)
    output = _run("info", path)
    assert "[red]x" in output
    assert "\x1b" not in output


def test_a_table_becomes_a_profile_and_a_network(table: Path, tmp_path: Path) -> None:
    profile, network = tmp_path / "profile.json", tmp_path / "network.json"
    output = _run(
        *("convert", table, "--to", "json", "-o", profile),
        *("--network-out", network, "--workers", "2"),
    )
    assert output.splitlines() == [f"json written to {profile}", f"network written to {network}"]
    assert Profile.load(profile).model == "alexnet"
    assert Network.load(network).workers == 2
    assert len(Network.load(network).points) == 8


def test_the_worker_count_must_be_known(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="say it with --workers"):
        _run(
            "convert", table, "--to", "json", "-o", tmp_path / "p", "--network-out", tmp_path / "n"
        )
    assert not (tmp_path / "p").exists()


def test_a_profile_is_kept_where_too_few_messages_make_no_network(tmp_path: Path) -> None:
    trace, profile = Job(steps=1).write(tmp_path / "job.json"), tmp_path / "p.json"
    with pytest.raises(UserError, match=r"no network written: .* 1 different sizes"):
        _run("convert", trace, "--to", "json", "-o", profile, "--network-out", tmp_path / "n")
    assert Profile.load(profile).gradients


def test_no_profile_begins_with_the_reason(tmp_path: Path) -> None:
    trace = Job(steps=1, shapes=False, sizes=False, rank=None, workers=None)
    path = trace.write(tmp_path / "job.json")
    said = "no profile can be made of this trace: the sizes of the messages are not in the trace"
    with pytest.raises(UserError, match=said):
        _run("convert", path, "--to", "json", "-o", tmp_path / "p.json")


def test_what_is_lost_is_said(table: Path, tmp_path: Path) -> None:
    output = _run("convert", table, "--to", "astrasim", "-o", tmp_path / "workload.txt")
    assert "  lost: 1.2e+03 ms of reading and copying the batch" in output
    assert (tmp_path / "workload.txt").read_text().startswith("DATA\n21\n")


def test_times_of_messages_are_the_traces_or_of_a_network_that_is_named(
    table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.et"
    _run("convert", table, "--to", "chakra", "-o", out)
    own = {p.size_bytes: p.time_s for p in read_chakra(out).points}
    assert own[139_776] == pytest.approx(123e-6)
    _run("convert", table, "--to", "chakra", "-o", out, "--network", "10gbe-k80")
    named = {p.size_bytes: p.time_s for p in read_chakra(out).points}
    expected = PRESETS["10gbe-k80"].all_reduce.seconds(139_776)
    assert named[139_776] == pytest.approx(expected, abs=1e-6)


def test_the_clock_is_for_cycles_only(table: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "workload.txt", tmp_path / "out.json"
    path.write_text(ASTRASIM)
    _run("convert", path, "--to", "json", "-o", out, "--clock-hz", "5e8")
    assert Profile.load(out).operations[0].duration_s == pytest.approx(2600e-9)
    with pytest.raises(UserError, match="--clock-hz is for astrasim"):
        _run("info", table, "--clock-hz", "5e8")


def test_a_timeline_is_opened_by_perfetto(tmp_path: Path) -> None:
    profile, network = layered_profile(), PRESETS["10gbe-k80"]
    path, out = tmp_path / "timeline.json", tmp_path / "trace.json"
    predict(profile, network, Wfbp().plan(profile, network)).timeline.save(path)
    assert "spans" in _run("info", path)
    _run("convert", path, "--to", "chrome", "-o", out)
    assert json.loads(out.read_text())["traceEvents"]


def test_a_traced_plan_is_written_and_simulated(tmp_path: Path) -> None:
    path = Job(steps=1).write(tmp_path / "job.json")
    rows = ["name elements", "d 4000", "c 4000", "b 1000", "a 1000"]
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("\n".join(rows))
    unsized = Job(steps=1, shapes=False, sizes=False).write(tmp_path / "unsized.json")
    assert "sizes of the messages are not in the trace" in _run("info", unsized)
    profile, network, plan = (tmp_path / f"{kind}.json" for kind in ("p", "n", "plan"))
    output = _run(
        *("convert", unsized, "--sizes", sizes, "--to", "json", "-o", profile),
        *("--network-out", network, "--plan-out", plan),
    )
    assert f"plan written to {plan}" in output
    assert [t.name for t in Plan.load(plan).tensors] == ["d", "c", "b", "a"]
    assert Plan.load(plan).message_bytes() == (32_000, 8_000)
    found = json.loads(_run("info", unsized, "--sizes", sizes, "--json"))
    assert found["simulated_s"] == pytest.approx(found["measured_s"], rel=0.01)
    again = predict(Profile.load(profile), Network.load(network), Plan.load(plan)).prediction
    assert again.iteration_s == pytest.approx(found["simulated_s"])
    assert "simulated" in _run("info", path)
    assert "(+0.0 %)" in _run("info", path) or "(-0.0 %)" in _run("info", path)


def test_sizes_and_plans_are_of_traces_that_have_them(table: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("name elements\na 1\n")
    with pytest.raises(UserError, match="leave out the file of sizes"):
        _run("info", table, "--sizes", sizes)
    out = tmp_path / "x.json"
    with pytest.raises(UserError, match="leave out --plan-out"):
        _run("convert", table, "--to", "json", "-o", out, "--plan-out", tmp_path / "plan.json")
    assert not out.exists()


def test_the_format_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(chakra_of_pytorch())
    assert "chakra" in _run("info", "--from", "chakra", path)
    with pytest.raises(FileError, match="x: line 1"):
        _run("info", "--from", "layer-table", path)


def test_an_output_that_cannot_be_written_is_our_error(table: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        _run("convert", table, "--to", "json", "-o", tmp_path / "absent" / "x.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("info gone.txt", "gone.txt: no such file"),
        (
            "info alexnet.txt --from layer",
            "unknown trace format 'layer'; did you mean 'layer-table'",
        ),
        ("convert alexnet.txt --to pipedream -o x", "pipedream traces are read only"),
        ("convert alexnet.txt --to chrome -o x", "predict a timeline of its profile"),
        ("info alexnet.txt --step 3", "has no steps to choose from"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str,
    says: str,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(table.parent)
    with pytest.raises(SystemExit) as caught:
        main(["trace", *arguments.split()])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_help_lists_every_format() -> None:
    text = CliRunner().invoke(trace, ["--help"]).output
    assert all(f"  {name} " in text for name in FORMATS)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with reading_bar() as progress:
        now[0] += 1.9
        progress(1_000_000, 4_000_000)
        assert terminal.getvalue() == ""
        now[0] += 0.2
        progress(2_000_000, 4_000_000)
        progress(3_000_000, None)
    assert "reading" in terminal.getvalue()
    quiet = io.StringIO()
    monkeypatch.setattr("sys.stderr", quiet)
    with reading_bar() as progress:
        now[0] += 10
        progress(1, 2)
    assert quiet.getvalue() == ""
