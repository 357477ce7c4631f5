"""Formats are told by content, and what cannot be done is refused with a reason."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.inputs import TABLE_VI

from syncline.errors import FileError, UserError
from syncline.files.traces import trace as trace_module
from syncline.files.traces.formats import (
    FORMATS,
    Format,
    TraceOptions,
    detect,
    format_named,
    read_trace,
    write_trace,
)
from syncline.files.traces.trace import Trace, measured_points, sized_gradient, unique_names
from syncline.plan.network import PRESETS, Network
from syncline.plan.planners.wfbp import Wfbp
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict
from tests import strategies as some
from tests.files.traces.kineto_files import Job, gloo_job
from tests.files.traces.kineto_seeds import execution_trace, kineto
from tests.files.traces.seeds import ASTRASIM, PIPEDREAM, layered_profile, seeds, written
from tests.fuzzing.mutations import mutated

OWN = Path(__file__).resolve().parents[3] / "reproduce" / "traces"
SEEDS = seeds()
CASES = [(name, index) for name, files in SEEDS.items() for index in range(len(files))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "index"), CASES)
def test_files_are_known_by_content(name: str, index: int, packed: bool, tmp_path: Path) -> None:
    content = SEEDS[name][index]
    path = written(tmp_path, gzip.compress(content) if packed and name != "json" else content)
    form, trace = read_trace([path])
    assert form.name == name
    assert trace.profile is not None or trace.plan is not None


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        ("\n" + TABLE_VI.partition("\n")[2], "layer-table"),
        ("id name forward backward comm size", "layer-table"),
        ("HYBRID_TRANSFORMER model_parallel_NPU_group: 4\n5\n", "astrasim"),
    ],
    ids=["without header", "header alone", "parallelism of another kind"],
)
def test_a_beginning_tells_the_format(beginning: str, name: str, tmp_path: Path) -> None:
    assert detect(written(tmp_path, beginning)).name == name


@pytest.mark.parametrize(
    "content",
    [
        *(b"hello", b"{}", b"[1, 2]", b"\0" * 600, b"\xff" * 99, b"1 2 3\n", b'{"nodes": []}'),
        *(b"1 conv 1 2 3", b"x conv 1 2 3 4", b"1 conv 1 2 x 4"),
        *(b"DATA\n", b"DATA\nx\n", b"data\n5\n", b"node1 -- node2\n"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a trace of a known format") as caught:
        detect(written(tmp_path, content))
    assert all(name in str(caught.value) for name in SEEDS)


@some.many
@pytest.mark.parametrize("name", SEEDS)
@given(seed=st.integers(0, 1 << 32))
def test_mutated_files_are_read_or_refused(
    name: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Anything but an error of ours is a bug of the reader."""
    files = SEEDS[name]
    if name == "kineto":  # the events more often than what is around them
        events = (trace["traceEvents"] for trace in (Job(steps=2).trace(), gloo_job()[0]))
        files = [*files, *(json.dumps(each).encode() for each in events)]
    path = written(tmp_path_factory.getbasetemp(), mutated(files, str(seed)), "mutated")
    with contextlib.suppress(UserError):
        _, trace = read_trace([path], format_named(name))
        profile = trace.known_profile()
        assert profile.computation_s >= 0
        if trace.plan is not None:
            assert trace.plan.elements == sum(g.elements for g in profile.gradients)
        trace.network()


def test_archives_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("trace.et"), io.BytesIO())
    with pytest.raises(FileError, match="this is a tar archive; unpack it"):
        detect(path)


def test_a_format_can_be_said_instead(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE_VI)
    with pytest.raises(FileError, match="expected the parallelism"):
        read_trace([path], format_named("astrasim"))
    assert read_trace([path], format_named("layer-table"))[1].profile is not None
    with pytest.raises(UserError, match="unknown trace format 'chakr'; did you mean 'chakra'"):
        format_named("chakr")


def test_files_must_belong_together(tmp_path: Path) -> None:
    table, other = written(tmp_path, TABLE_VI, "a"), written(tmp_path, TABLE_VI, "c")
    graph = written(tmp_path, PIPEDREAM, "b")
    with pytest.raises(UserError, match=r"a is of format layer-table, .*b of format pipedream"):
        read_trace([table, graph])
    with pytest.raises(UserError, match="a trace of format layer-table is one file, found 2"):
        read_trace([table, other])
    with pytest.raises(UserError, match="no trace file was named"):
        read_trace([])


def test_a_profiler_trace_is_joined_with_an_execution_trace(tmp_path: Path) -> None:
    timed = written(tmp_path, kineto(steps=1), "a")
    sized, again = (written(tmp_path, execution_trace(), name) for name in "bc")
    for paths in ([timed, sized], [sized, timed]):
        form, trace = read_trace(paths)
        assert form.name == "kineto"
        assert len(trace.known_profile().gradients) == 4
    with pytest.raises(UserError, match="1 profiler traces and 2 execution traces"):
        read_trace([timed, sized, again])


def test_a_step_is_for_traces_with_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no steps to choose from"):
        read_trace([written(tmp_path, ASTRASIM)], options=TraceOptions(step=3))
    path = written(tmp_path, kineto(steps=2))
    assert read_trace([path], options=TraceOptions(step=4))[1].steps == 1


def test_formats_that_are_only_read_or_only_written() -> None:
    trace = Trace(model="m", profile=layered_profile())
    with pytest.raises(UserError, match="pipedream traces are read only"):
        write_trace(trace, format_named("pipedream"))
    with pytest.raises(UserError, match="chrome traces are written only"):
        read_trace(["x"], format_named("chrome"))


def test_a_timeline_goes_to_perfetto_and_nowhere_else(tmp_path: Path) -> None:
    profile, network = layered_profile(), PRESETS["10gbe-k80"]
    path = tmp_path / "timeline.json"
    predict(profile, network, Wfbp().plan(profile, network)).timeline.save(path)
    _, trace = read_trace([path])
    assert b"traceEvents" in write_trace(trace, FORMATS["chrome"]).content
    with pytest.raises(UserError, match="no profile can be made of this trace: it holds"):
        write_trace(trace, FORMATS["json"])
    with pytest.raises(UserError, match="not when they ran; predict a timeline"):
        write_trace(Trace(model="m", profile=profile), FORMATS["chrome"])


READ_AND_WRITTEN = [form for form in FORMATS.values() if form.read and form.write]


@pytest.mark.parametrize("form", READ_AND_WRITTEN, ids=lambda form: form.name)
def test_every_writer_writes_what_its_reader_reads(form: Format, tmp_path: Path) -> None:
    profile = layered_profile()
    content = write_trace(Trace(model="m", profile=profile), form).content
    found, trace = read_trace([written(tmp_path, content)])
    assert found is form
    again = trace.known_profile()
    assert again.gradient_bytes == profile.gradient_bytes
    both = ("forward", "backward")
    assert again.phase_s(*both) == pytest.approx(profile.phase_s(*both), rel=1e-6)


def test_points_are_means_and_not_too_many() -> None:
    points = measured_points([(100, 1.0), (100, 3.0), (50, 1.0), (0, 9.0), (70, 0.0)])
    assert [(p.size_bytes, p.time_s, p.repetitions) for p in points] == [(50, 1, 1), (100, 2, 2)]
    many = measured_points((4 * i, 1e-3 * i) for i in range(1, 5000))
    assert len(many) <= trace_module.MOST_POINTS
    assert sum(p.repetitions for p in many) == 4999
    assert [p.size_bytes for p in many] == sorted(p.size_bytes for p in many)
    for point in many:
        assert point.time_s == pytest.approx(1e-3 * point.size_bytes / 4, rel=1e-3)
    assert measured_points([]) == ()


@pytest.mark.parametrize(
    ("size_bytes", "expected"), [(0, (0, "float32")), (8, (2, "float32")), (6, (3, "float16"))]
)
def test_element_types(size_bytes: int, expected: tuple[int, str]) -> None:
    gradient = sized_gradient("a", size_bytes, ready_after=0)
    assert (gradient.elements, gradient.dtype) == expected


@pytest.mark.parametrize("size_bytes", [-4, 7, 1 << 63])
def test_impossible_gradients(size_bytes: int) -> None:
    with pytest.raises(UserError, match=f"a gradient of {size_bytes} bytes"):
        sized_gradient("a", size_bytes, ready_after=0)


def test_names_are_numbered() -> None:
    found = list(unique_names(("a", "a", "a #2", "b", "a", "a #2")))
    assert found[:2] == ["a", "a #2"]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("path", sorted(OWN.glob("*.txt")), ids=lambda path: path.stem)
def test_our_own_tables_say_what_their_profiles_say(path: Path) -> None:
    _, trace = read_trace([path])
    profile = Profile.load(path.with_suffix(".profile.json"))
    network = Network.load(path.with_suffix(".network.json"))
    own = trace.known_profile()
    assert own.gradient_bytes == profile.gradient_bytes
    for phase in ("data", "forward", "backward"):
        assert own.phase_s(phase) == pytest.approx(profile.phase_s(phase), rel=1e-6)
    measured = {point.size_bytes: point.time_s for point in network.points}
    for point in trace.points:
        assert point.time_s == pytest.approx(measured[point.size_bytes], rel=1e-6)


GRADIENT_BYTES = {"alexnet": 93_089_064, "googlenet": 23_935_208, "resnet50": 94_114_088}
"""At 10 classes."""


@pytest.mark.parametrize("workers", ["1worker", "2workers"])
@pytest.mark.parametrize("network", GRADIENT_BYTES)
def test_a_file_holds_100_iterations_of_its_network(network: str, workers: str) -> None:
    _, trace = read_trace([OWN / "dag" / f"{network}-{workers}.txt.gz"])
    profile = trace.known_profile()
    assert trace.steps == 100
    assert profile.gradient_bytes == GRADIENT_BYTES[network]
    assert min(profile.phase_s("forward"), profile.phase_s("backward")) > 0
    # One worker sends nothing.
    assert bool(trace.points) == (workers == "2workers")


def test_the_data_set_is_small_and_described() -> None:
    for folder, most_bytes in ((OWN, 100_000), (OWN / "dag", 1 << 20)):
        assert sum(file.stat().st_size for file in folder.glob("*.*")) < most_bytes
    described = (OWN / "README.md").read_text()
    assert all(file.name in described for file in OWN.glob("*.txt"))
