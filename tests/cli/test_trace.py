"""``syncline trace`` shows what a trace holds and converts it, saying what is lost."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest

from syncline.cli.progress import reading_bar
from syncline.files.traces.chakra import read_chakra
from syncline.files.traces.formats import FORMATS
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests.cli.examples import K80, Printed, Run
from tests.files.traces.kineto_files import Job
from tests.files.traces.seeds import ASTRASIM, TABLE_VI, chakra_of_pytorch, layered_profile, written


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return written(tmp_path, TABLE_VI, "alexnet.txt")


def test_info_of_a_layer_table(printed: Printed, table: Path) -> None:
    lines = [line.rstrip() for line in printed("trace", "info", table).splitlines()]
    assert lines[0] == "Trace alexnet"
    assert {
        "steps           1",
        "workers         unknown",
        "operations      43",
        "gradients       8, 244 MB",
        "  data          1.20 s",
        "timed messages  8, 140 kB to 151 MB",
    } <= set(lines)
    assert any(line.startswith("note            the table has no update") for line in lines)
    found = json.loads(printed("trace", "info", table, "--json"))
    assert found["format"] == "layer-table"
    assert found["workers"] is None
    assert found["gradient_bytes"] == 243_860_896
    assert found["phases_s"]["data"] == 1.2
    assert len(found["timed_messages"]) == 8
    assert found["notes"]


def test_info_shows_names_as_they_are(printed: Printed, tmp_path: Path) -> None:
    output = printed("trace", "info", written(tmp_path, TABLE_VI, "[red]x\x1b.txt"))
    assert "[red]x" in output
    assert "\x1b" not in output


def test_a_table_is_a_profile_and_a_network(printed: Printed, table: Path, tmp_path: Path) -> None:
    profile, network = tmp_path / "profile.json", tmp_path / "network.json"
    output = printed(
        *("trace", "convert", table, "--to", "json", "-o", profile),
        *("--network-out", network, "--workers", "2"),
    )
    assert output.splitlines() == [f"json written to {profile}", f"network written to {network}"]
    assert Profile.load(profile).model == "alexnet"
    assert Network.load(network).workers == 2
    assert len(Network.load(network).points) == 8


def test_a_profile_is_kept_where_too_few_messages_make_no_network(run: Run, tmp_path: Path) -> None:
    trace, profile = Job(steps=1).write(tmp_path / "job.json"), tmp_path / "p.json"
    asked = ("trace", "convert", trace, "--to", "json", "-o", profile)
    result = run(*asked, "--network-out", tmp_path / "n")
    assert result.code == 2
    assert "no network written: " in result.err
    assert "1 different sizes" in result.err
    assert Profile.load(profile).gradients


def test_no_profile_begins_with_the_reason(refused: Printed, tmp_path: Path) -> None:
    trace = Job(steps=1, shapes=False, sizes=False, rank=None, workers=None)
    path = trace.write(tmp_path / "job.json")
    said = "no profile can be made of this trace: the sizes of the messages are not in the trace"
    assert said in refused("trace", "convert", path, "--to", "json", "-o", "p.json")


def test_what_is_lost_is_said(printed: Printed, table: Path, tmp_path: Path) -> None:
    output = printed("trace", "convert", table, "--to", "astrasim", "-o", tmp_path / "workload")
    assert "  lost: 1.2e+03 ms of reading and copying the batch" in output
    assert (tmp_path / "workload").read_text().startswith("DATA\n21\n")


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [((), 123e-6), (("--network", "10gbe-k80"), K80.all_reduce.seconds(139_776))],
)
def test_times_of_messages_are_the_traces_or_of_a_network_that_is_named(
    printed: Printed, table: Path, tmp_path: Path, options: tuple[str, ...], expected_s: float
) -> None:
    out = tmp_path / "x.et"
    printed("trace", "convert", table, "--to", "chakra", "-o", out, *options)
    found = {p.size_bytes: p.time_s for p in read_chakra(out).points}
    assert found[139_776] == pytest.approx(expected_s, abs=1e-6)


def test_a_clock_for_cycles(printed: Printed, tmp_path: Path) -> None:
    path, out = written(tmp_path, ASTRASIM), tmp_path / "out.json"
    printed("trace", "convert", path, "--to", "json", "-o", out, "--clock-hz", "5e8")
    assert Profile.load(out).operations[0].duration_s == pytest.approx(2600e-9)


def test_info_of_a_timeline(printed: Printed, tmp_path: Path) -> None:
    profile = layered_profile()
    timeline = predict(profile, K80, Wfbp().plan(profile, K80)).timeline
    timeline.save(path := tmp_path / "timeline.json")
    assert "spans" in printed("trace", "info", path)


def test_a_traced_plan_is_written_and_simulated(printed: Printed, tmp_path: Path) -> None:
    path = Job(steps=1).write(tmp_path / "job.json")
    sizes = written(tmp_path, "name elements\nd 4000\nc 4000\nb 1000\na 1000", "sizes.txt")
    unsized = Job(steps=1, shapes=False, sizes=False).write(tmp_path / "unsized.json")
    assert "sizes of the messages are not in the trace" in printed("trace", "info", unsized)
    profile, network, plan = (tmp_path / f"{kind}.json" for kind in ("p", "n", "plan"))
    output = printed(
        *("trace", "convert", unsized, "--sizes", sizes, "--to", "json", "-o", profile),
        *("--network-out", network, "--plan-out", plan),
    )
    assert f"plan written to {plan}" in output
    assert [t.name for t in Plan.load(plan).tensors] == ["d", "c", "b", "a"]
    assert Plan.load(plan).message_bytes() == (32_000, 8_000)
    found = json.loads(printed("trace", "info", unsized, "--sizes", sizes, "--json"))
    assert found["simulated_s"] == pytest.approx(found["measured_s"], rel=0.01)
    again = predict(Profile.load(profile), Network.load(network), Plan.load(plan)).prediction
    assert again.iteration_s == pytest.approx(found["simulated_s"])
    assert re.search(r"simulated .*\([+-]0\.0 %\)", printed("trace", "info", path))


def test_the_format_can_be_said(printed: Printed, tmp_path: Path) -> None:
    path = written(tmp_path, chakra_of_pytorch())
    assert "chakra" in printed("trace", "info", "--from", "chakra", path)


def test_help_lists_every_format(printed: Printed) -> None:
    text = printed("trace", "--help")
    assert all(f"  {name} " in text for name in FORMATS)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [_Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", stream)
    with reading_bar() as progress:
        now[0] += 1.9
        progress(1_000_000, 4_000_000)
        assert stream.getvalue() == ""
        now[0] += 0.2
        progress(2_000_000, 4_000_000)
        progress(3_000_000, None)
    assert ("reading" in stream.getvalue()) is stream.isatty()
    assert bool(stream.getvalue()) is stream.isatty()
