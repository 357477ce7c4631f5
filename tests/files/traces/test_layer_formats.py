"""Formats with a line for each layer or operator: the papers' table, ASTRA-sim's, PipeDream's."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.inputs import TABLE_VI

from syncline.errors import FileError, UserError
from syncline.files.traces.astrasim import read_astrasim, write_astrasim
from syncline.files.traces.layer_table import read_layer_table, write_layer_table
from syncline.files.traces.layers import Layer, profile_of
from syncline.files.traces.pipedream import read_pipedream
from syncline.files.traces.trace import Trace
from syncline.plan.network import PRESETS, Measurement, Network
from syncline.plan.planners.merge import Merge
from syncline.plan.profile import Operation, Profile
from syncline.plan.simulator.predict import predict
from tests.files.traces.seeds import ASTRASIM, PIPEDREAM, layered_profile, written
from tests.strategies import many, profiles
from tests.trace_files import PIPEDREAM as GRAPHS
from tests.trace_files import TRACES

change = msgspec.structs.replace
WORKLOAD = TRACES / "astrasim" / "Resnet50_DataParallel.txt"
ROWS = [line.split("\t") for line in TABLE_VI.splitlines()[1:]]


def read(tmp_path: Path, text: str | bytes = TABLE_VI) -> Trace:
    return read_layer_table(written(tmp_path, text, "alexnet.txt"))


def graph(tmp_path: Path, text: str = PIPEDREAM) -> Profile:
    return read_pipedream(written(tmp_path, text, "net.graph.txt")).known_profile()


def workload(tmp_path: Path, clock_hz: float = 1e9) -> Profile:
    return read_astrasim(written(tmp_path, ASTRASIM), clock_hz=clock_hz).known_profile()


def rows_of(profile: Profile, network: Network | None = None) -> list[list[str]]:
    """Return the cells of the table that is written of a profile, without the header."""
    written = write_layer_table(profile, network).content.decode()
    return [line.split("\t") for line in written.splitlines()[1:]]


def of_layers(*sizes: int) -> Profile:
    """Return a profile of layers that take a millisecond in each direction."""
    layers = [
        Layer(name="abc"[n], forward_s=1e-3, weight_s=1e-3, gradient_bytes=size)
        for n, size in enumerate(sizes)
    ]
    return profile_of(layers, model="m")


def test_table_vi_of_the_paper(tmp_path: Path) -> None:
    profile = read(tmp_path).known_profile()
    assert profile.model == "alexnet"
    assert profile.phase_s("data") == 1.2
    forward_s, backward_s = (1e-6 * math.fsum(float(row[i]) for row in ROWS[1:]) for i in (2, 3))
    assert profile.phase_s("forward") == pytest.approx(forward_s)
    assert profile.phase_s("backward") == pytest.approx(backward_s)
    # Eight layers with parameters, the last one ready first; AlexNet has 61 million of them.
    names = ["fc8", "fc7", "fc6", "conv5", "conv4", "conv3", "conv2", "conv1"]
    assert [g.name for g in profile.gradients] == names
    assert [g.size_bytes for g in profile.gradients] == [
        int(row[5]) for row in reversed(ROWS) if row[5] != "0"
    ]
    assert profile.gradient_bytes == 243_860_896
    assert [profile.operations[g.needed_by].name for g in profile.gradients] == names


def test_its_messages_can_be_simulated(tmp_path: Path) -> None:
    trace = read(tmp_path)
    assert trace.workers is None
    with pytest.raises(UserError, match="say it with --workers"):
        trace.network()
    network = trace.network(2)
    assert {p.size_bytes: p.time_s for p in network.points} == {
        int(row[5]): pytest.approx(float(row[4]) * 1e-6) for row in ROWS if row[5] != "0"
    }
    # The column is no function of the bytes (2.7 MB took longer than 151 MB), so no curve fits it.
    assert network.fit_error > 0.2
    profile = trace.known_profile()
    forecast = predict(profile, network, Merge().plan(profile, network))
    assert forecast.prediction.iteration_s >= profile.computation_s


def test_times_are_means_over_iterations(tmp_path: Path) -> None:
    first = "0 data 10 0 0 0\n1 fc 100 200 50 400\n"
    second = "0 data 30 0 0 0\n1 fc 300 400 70 400\n"
    trace = read(tmp_path, first + "\n" + second)
    profile = trace.known_profile()
    assert (trace.steps, profile.iterations) == (2, 2)
    assert [o.duration_s for o in profile.operations] == pytest.approx([20e-6, 200e-6, 300e-6])
    assert [(p.size_bytes, p.time_s) for p in trace.points] == [(400, pytest.approx(60e-6))]


def test_header_and_separators_are_free(tmp_path: Path) -> None:
    expected = read(tmp_path).known_profile().operations
    for text in (
        TABLE_VI.partition("\n")[2],
        TABLE_VI.replace("\t", "  "),
        TABLE_VI.replace("\n", "\r\n"),
        gzip.compress(TABLE_VI.encode()),
        TABLE_VI + TABLE_VI,
    ):
        assert read(tmp_path, text).known_profile().operations == expected


def test_what_was_read_is_written_again(tmp_path: Path) -> None:
    trace = read(tmp_path)
    profile, network = trace.known_profile(), trace.network(2)
    assert write_layer_table(profile, network).lost == ()
    for own, given_row in zip(rows_of(profile, network), ROWS, strict=True):
        assert own[:2] == given_row[:2]
        assert [float(c) for c in own[2:]] == pytest.approx([float(c) for c in given_row[2:]])


def test_communication_is_measured_or_predicted_or_zero() -> None:
    profile, all_reduce = of_layers(400, 800), PRESETS["10gbe-k80"].all_reduce
    point = Measurement(size_bytes=400, time_s=0.5, repetitions=1)
    network = Network(name="n", workers=2, all_reduce=all_reduce, points=(point,))
    found = [float(row[4]) for row in rows_of(profile, network)]
    assert found == pytest.approx([5e5, 1e6 * all_reduce.seconds(800)])
    assert [float(row[4]) for row in rows_of(profile)] == [0, 0]
    assert any("no network was given" in sentence for sentence in write_layer_table(profile).lost)


def test_what_runs_beside_the_layers_is_lost() -> None:
    profile = of_layers(400)
    first, *others = profile.operations
    beside = Operation(name="all-to-all", phase="forward", duration_s=2e-3, resource="peers")
    moved = [change(o, after=tuple(a + (a > 0) for a in o.after)) for o in others]
    gradient = change(profile.gradients[0], ready_after=2)
    changed = change(profile, operations=(first, beside, *moved), gradients=(gradient,))
    assert any("2 ms on further streams" in s for s in write_layer_table(changed).lost)
    assert not any("further streams" in s for s in write_layer_table(profile).lost)


@given(profiles())
@many
def test_any_profile_is_written_or_refused_and_keeps_its_times(profile: Profile) -> None:
    try:
        rows = rows_of(profile)
    except UserError as error:
        assert "no forward or backward operation" in str(error)  # noqa: PT017
        return
    assert sum(int(row[5]) for row in rows) == profile.gradient_bytes
    backward_s = profile.phase_s("backward")
    forward_s = profile.phase_s("data", "copy", "forward")
    if any(o.phase == "forward" for o in profile.operations):
        assert sum(float(row[3]) for row in rows) * 1e-6 == pytest.approx(backward_s, abs=1e-5)
    assert sum(float(row[2]) for row in rows) * 1e-6 == pytest.approx(forward_s, abs=1e-5)


seconds = st.integers(0, 10**9).map(lambda ns: ns / 1e9)
layer_rows = st.builds(
    Layer,
    name=st.text("abc123", min_size=1, max_size=4),
    forward_s=seconds,
    weight_s=seconds,
    gradient_bytes=st.integers(0, 10**6).map(lambda n: 4 * n),
)
tables = st.lists(layer_rows, min_size=1, max_size=12)


@given(tables.filter(lambda rows: any(row.gradient_bytes for row in rows)), st.integers(0, 10**6))
@many
def test_layers_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Layer], data: int
) -> None:
    profile = profile_of(rows, model="table", data_s=data / 1e6)
    content = write_layer_table(profile).content
    again = read(tmp_path_factory.getbasetemp(), content).known_profile()
    before, after = (
        (
            [(o.phase, o.after) for o in made.operations],
            [(g.elements, g.ready_after, g.needed_by) for g in made.gradients],
        )
        for made in (profile, again)
    )
    assert before == after
    durations_s = [o.duration_s for o in profile.operations]
    found_s = [o.duration_s for o in again.operations]
    assert found_s == pytest.approx(durations_s, rel=1e-8, abs=1e-15)


def test_layers_run_forward_then_backward_with_the_weight_gradient_first(tmp_path: Path) -> None:
    profile = workload(tmp_path)
    assert [(o.name, round(o.duration_s * 1e9)) for o in profile.operations] == [
        ("conv1", 1300),
        ("conv2", 3456),
        ("relu", 345),
        ("relu backward", 0),
        ("relu backward, input", 364),
        ("conv2 backward", 7488),
        ("conv2 backward, input", 3648),
        ("conv1 backward", 3200),
        ("conv2 update", 749),
        ("conv1 update", 320),
    ]
    gradients = [(g.name, g.size_bytes, g.ready_after) for g in profile.gradients]
    assert gradients == [("conv2", 65536, 5), ("conv1", 37632, 7)]


def test_the_clock_scales_the_times(tmp_path: Path) -> None:
    usual, slow = (workload(tmp_path, hz) for hz in (1e9, 5e8))
    assert slow.computation_s == pytest.approx(2 * usual.computation_s)
    for clock_hz in (0, -1, float("nan"), 1e16):
        with pytest.raises(UserError, match="the clock must be"):
            workload(tmp_path, clock_hz)


def test_a_workload_that_was_read_is_written_again(tmp_path: Path) -> None:
    written = write_astrasim(workload(tmp_path))
    # But for the first layer's input gradient, which nobody computes.
    expected = ASTRASIM.replace("NONE\t0\t1200", "NONE\t0\t0")
    assert written.content.decode() == expected
    assert written.lost == ()
    lost = write_astrasim(layered_profile()).lost
    assert any("reading and copying" in sentence for sentence in lost)


@pytest.mark.skipif(not WORKLOAD.exists(), reason="no ../shared/data beside the project")
def test_the_real_workload_comes_back() -> None:
    profile = read_astrasim(WORKLOAD).known_profile()
    assert len(profile.gradients) == 54
    assert profile.gradient_bytes == pytest.approx(102e6, rel=0.01)  # ResNet-50 in fp32
    own = write_astrasim(profile).content.decode()
    cells = zip(WORKLOAD.read_text().split(), own.split(), strict=True)
    assert [(a, b) for a, b in cells if a != b] == [("12864", "0")]


def test_branches_are_kept_in_both_directions(tmp_path: Path) -> None:
    profile = graph(tmp_path)
    assert profile.model == "net"
    assert [o.phase for o in profile.operations[:5]] == ["data"] + ["forward"] * 4
    assert [o.after for o in profile.operations[:5]] == [(), (0,), (1,), (1,), (2, 3)]
    # Backward: node5, node4, node3, node2; each after its own forward and those that read it.
    assert [o.after for o in profile.operations[5:]] == [(4,), (3, 5), (2, 5), (1, 6, 7)]
    assert profile.phase_s("data") == pytest.approx(6.5e-3)
    assert [(g.name, g.elements, g.ready_after, g.needed_by) for g in profile.gradients] == [
        ("node4 Conv2d", 307, 6, 3),
        ("node2 Conv2d", 23296, 8, 1),
    ]


def test_operations_run_in_the_order_in_which_they_were_traced(tmp_path: Path) -> None:
    lines = PIPEDREAM.splitlines()
    shuffled = "\n".join([lines[3], lines[0], lines[4], lines[2], lines[1], *reversed(lines[5:])])
    assert graph(tmp_path, shuffled) == graph(tmp_path)


def test_a_second_root_is_no_data_loading(tmp_path: Path) -> None:
    text = PIPEDREAM.replace("\tnode1 -- node2\n", "")
    phases = [o.phase for o in graph(tmp_path, text).operations[:3]]
    assert phases == ["data", "forward", "forward"]


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/data beside the project")
@pytest.mark.parametrize("name", GRAPHS)
def test_real_graphs(name: str) -> None:
    profile = read_pipedream(TRACES / "pipedream" / f"{name}.graph.txt").known_profile()
    megabytes = {"alexnet": 244.4, "densenet121": 31.9}[name]
    assert profile.gradient_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert profile.phase_s("data") > 0.005
    assert len({g.needed_by for g in profile.gradients}) == len(profile.gradients)


def test_a_long_chain_is_no_recursion(tmp_path: Path) -> None:
    nodes = "".join(NODE.replace("nodeX", f"node{i}") for i in range(3000))
    edges = "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(2999))
    assert len(graph(tmp_path, nodes + edges).operations) == 6000


NODE = "nodeX -- ReLU -- forward_compute_time=1, backward_compute_time=1, parameter_size=4\n"

BROKEN = {
    read_layer_table: [
        ("", "the file is empty"),
        ("Id Name Forward Backward Comm. Size\n", "no row of a layer table"),
        ("0 data 1 0 0 0\n", "no gradient tensors"),
        ("0 fc 1 1 1\n", "line 1: expected 6 columns .* found 5"),
        ("0 fc 1 1 1 x\n", "line 1: expected a number as the size of the gradient, found 'x'"),
        ("0 fc 1 -1 1 4\n", "line 1: the backward time must be finite and at least 0"),
        ("0 fc nan 1 1 4\n", "line 1: the forward time must be finite"),
        ("0 fc 1 1 1e30 4\n", "line 1: the communication time is 1e.24 s, longer than"),
        ("0 fc 1 1 1 1e30\n", "line 1: the size of the gradient is 1e30, which is not possible"),
        ("0 fc 1 1 1 4.5\n", "line 1: expected whole bytes"),
        ("0 fc 1 1 1 5\n", "a gradient of 5 bytes is not a whole number of elements"),
        ("zero fc 1 1 1 4\n", "line 1: expected a layer id, found 'zero'"),
        ("0 a 1 1 1 4\n1 b 1 1 1 4\n1 c 1 1 1 4\n", "line 3: layer 1 comes twice"),
        ("0 a 1 1 1 4\n1 b 1 1 1 4\n0 a 1 1 1 4\n", "iteration 2 ends before layer 1"),
        ("0 a 1 1 1 4\n1 b 1 1 1 4\n0 a 1 1 1 4\n2 b 1 1 1 4\n", "line 4: expected layer 1"),
        ("0 a 1 1 1 4\n0 b 1 1 1 4\n", "line 2: layer 0 is 'b' of 4 bytes, but was 'a'"),
        ("0 a 1 1 1 4\n0 a 1 1 1 8\n", "line 2: layer 0 is 'a' of 8 bytes, but was"),
        (b"0 \xff 1 1 1 4\n", "line 1 is not text"),
        (gzip.compress(TABLE_VI.encode())[:-40], "truncated"),
        ("0 " + "a" * (1 << 20) + " 1 1 1 4", "line 1 is longer than"),
    ],
    read_astrasim: [
        ("DAT\n1\n", "expected the parallelism"),
        ("MODEL\n1\n", "a workload of MODEL parallelism; only DATA"),
        ("DATA\n", "expected the number of layers in the second line"),
        ("DATA\n-1\n", "expected the number of layers"),
        ("DATA\n0\n", "expected the number of layers"),
        ("DATA\n99999999999999\n", "expected the number of layers"),
        (ASTRASIM.replace("DATA\n3", "DATA\n4"), "promises 4 layers, the file holds 3"),
        (ASTRASIM.replace("DATA\n3", "DATA\n2"), "line 5: the second line promises 2 layers"),
        (ASTRASIM.replace("\t320\n", "\n"), "line 3: expected 12 columns, found 11"),
        (ASTRASIM.replace("1300", "-1300"), "line 3: the forward time must be finite"),
        (ASTRASIM.replace("1300", "x"), "line 3: expected a number as the forward time"),
        (ASTRASIM.replace("1300", "1e30"), "line 3: the forward time is 1e.21 s, longer"),
        (ASTRASIM.replace("NONE\t0\t1200", "ALLGATHER\t8\t1200"), "line 3: 'conv1' exchanges 8"),
        (ASTRASIM.replace("ALLREDUCE\t37632", "ALLTOALL\t37632"), "by ALLTOALL; expected"),
        (ASTRASIM.replace("37632", "37631"), "a gradient of 37631 bytes"),
        (ASTRASIM.replace("ALLREDUCE", "NONE"), "no gradient tensors"),
    ],
    read_pipedream: [
        (PIPEDREAM + "\tnode4 -- node2\n", "the edges have a cycle, through node2, node"),
        (PIPEDREAM + "\tnode4 -- node4\n", "the edges have a cycle, through node4"),
        (PIPEDREAM + "\tnode4 -- node9\n", "line 11: an edge of 'node9', which is not a node"),
        (PIPEDREAM + "\tnode4 node5\n", "line 11: expected an edge"),
        (PIPEDREAM + NODE.replace("nodeX", "node3"), "line 11: 'node3' comes twice"),
        (PIPEDREAM.replace("forward_compute_time=22.3, ", ""), "line 2: expected 'node"),
        (PIPEDREAM.replace("backward_compute_time=6.4, ", ""), "line 2: backward_compute_time is"),
        (PIPEDREAM.replace("93184.000", "-4"), "line 2: parameter_size must be finite"),
        (PIPEDREAM.replace("22.3", "abc"), "line 2: expected a number as forward_compute_time"),
        (PIPEDREAM.replace("22.3", "1e99"), "line 2: forward_compute_time is 1e.96 s, longer"),
        (PIPEDREAM.replace("93184.000", "1e99"), "parameter_size is 1e99, which is not possible"),
        ("\tnode1 -- node2\n", "no node; expected lines such as"),
        (PIPEDREAM.split("\n")[0], "no gradient tensors"),
        ("hello\n", "line 1: expected 'node -- operation"),
    ],
}


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [(read, text, says) for read, rows in BROKEN.items() for text, says in rows],
)
def test_errors_name_their_file_and_line(
    read: Callable[[Path], Trace], text: str | bytes, says: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(FileError, match=says) as caught:
        read(path).known_profile()
    assert str(path) in str(caught.value)
