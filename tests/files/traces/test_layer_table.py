"""The papers' table is read, averaged, simulated and written."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.inputs import TABLE_VI

from syncline.errors import FileError, UserError
from syncline.files.traces.layer_table import is_layer_table, read_layer_table, write_layer_table
from syncline.files.traces.layers import Layer, profile_of
from syncline.plan.network import PRESETS, Measurement, Network
from syncline.plan.planners.merge import Merge
from syncline.plan.profile import Operation, Profile
from syncline.plan.simulator.predict import predict
from tests.strategies import many, profiles

ROWS = [line.split("\t") for line in TABLE_VI.splitlines()[1:]]


def _read(tmp_path: Path, text: str | bytes) -> Profile:
    path = tmp_path / "alexnet.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_layer_table(path).known_profile()


def test_table_vi_of_the_paper(tmp_path: Path) -> None:
    profile = _read(tmp_path, TABLE_VI)
    assert profile.model == "alexnet"
    assert profile.phase_s("data") == 1.2
    assert profile.phase_s("forward") == pytest.approx(
        1e-6 * math.fsum(float(row[2]) for row in ROWS[1:])
    )
    assert profile.phase_s("backward") == pytest.approx(
        1e-6 * math.fsum(float(row[3]) for row in ROWS)
    )
    # Eight layers with parameters, the last one ready first; AlexNet has 61 million of them.
    names = ["fc8", "fc7", "fc6", "conv5", "conv4", "conv3", "conv2", "conv1"]
    assert [g.name for g in profile.gradients] == names
    assert [g.size_bytes for g in profile.gradients] == [
        int(row[5]) for row in reversed(ROWS) if row[5] != "0"
    ]
    assert profile.gradient_bytes == 243_860_896
    for gradient in profile.gradients:
        assert gradient.needed_by is not None
        assert profile.operations[gradient.needed_by].name == gradient.name


def test_its_messages_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "alexnet.txt"
    path.write_text(TABLE_VI)
    trace = read_layer_table(path)
    assert trace.workers is None
    with pytest.raises(UserError, match="say it with --workers"):
        trace.network()
    network = trace.network(2)
    assert {p.size_bytes: p.time_s for p in network.points} == {
        int(row[5]): pytest.approx(float(row[4]) * 1e-6) for row in ROWS if row[5] != "0"
    }
    # The column is no function of the bytes (2.7 MB took longer than 151 MB), so no curve fits it.
    assert network.fit_error is not None
    assert network.fit_error > 0.2
    profile = trace.known_profile()
    forecast = predict(profile, network, Merge().plan(profile, network))
    assert forecast.prediction.iteration_s >= profile.computation_s


def test_times_are_means_over_iterations(tmp_path: Path) -> None:
    first = "0 data 10 0 0 0\n1 fc 100 200 50 400\n"
    second = "0 data 30 0 0 0\n1 fc 300 400 70 400\n"
    path = tmp_path / "two.txt"
    path.write_text(first + "\n" + second)
    trace = read_layer_table(path)
    profile = trace.known_profile()
    assert (trace.steps, profile.iterations) == (2, 2)
    assert [o.duration_s for o in profile.operations] == pytest.approx([20e-6, 200e-6, 300e-6])
    assert [(p.size_bytes, p.time_s) for p in trace.points] == [(400, pytest.approx(60e-6))]


def test_header_and_separators_are_free(tmp_path: Path) -> None:
    expected = _read(tmp_path, TABLE_VI).operations
    lines = TABLE_VI.splitlines()
    assert _read(tmp_path, "\n".join(lines[1:])).operations == expected
    assert _read(tmp_path, TABLE_VI.replace("\t", "  ")).operations == expected
    assert _read(tmp_path, TABLE_VI.replace("\n", "\r\n")).operations == expected
    assert _read(tmp_path, gzip.compress(TABLE_VI.encode())).operations == expected
    assert _read(tmp_path, TABLE_VI + TABLE_VI).operations == expected


def test_a_table_is_known_by_its_beginning() -> None:
    assert is_layer_table(TABLE_VI)
    assert is_layer_table("\n" + TABLE_VI.partition("\n")[2])
    assert is_layer_table("id name forward backward comm size")
    assert not is_layer_table("1 conv 1 2 3")
    assert not is_layer_table("x conv 1 2 3 4")
    assert not is_layer_table("1 conv 1 2 x 4")
    assert not is_layer_table("")


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
)
def test_errors_name_their_line(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=says) as caught:
        _read(tmp_path, text)
    assert "alexnet.txt" in str(caught.value)


def test_a_missing_file_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_layer_table(tmp_path / "absent")


def test_what_was_read_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "alexnet.txt"
    path.write_text(TABLE_VI)
    trace = read_layer_table(path)
    written = write_layer_table(trace.known_profile(), trace.network(2))
    cells = [line.split("\t") for line in written.content.decode().splitlines()[1:]]
    assert written.lost == ()
    for own, given_row in zip(cells, ROWS, strict=True):
        assert own[:2] == given_row[:2]
        assert [float(c) for c in own[2:]] == pytest.approx([float(c) for c in given_row[2:]])


def test_communication_is_measured_or_predicted_or_zero() -> None:
    layers = [
        Layer(name="a", forward_s=1e-3, weight_s=1e-3, gradient_bytes=400),
        Layer(name="b", forward_s=1e-3, weight_s=1e-3, gradient_bytes=800),
    ]
    profile = profile_of(layers, model="m")
    line = PRESETS["10gbe-k80"]
    point = Measurement(size_bytes=400, time_s=0.5, repetitions=1)
    network = Network(name="n", workers=2, all_reduce=line.all_reduce, points=(point,))

    def column(network: Network | None) -> list[float]:
        lines = write_layer_table(profile, network).content.decode().splitlines()[1:]
        return [float(line.split("\t")[4]) for line in lines]

    assert column(network) == pytest.approx([5e5, 1e6 * line.all_reduce.seconds(800)])
    assert column(None) == [0, 0]
    assert any("no network was given" in sentence for sentence in write_layer_table(profile).lost)


def test_what_runs_beside_the_layers_is_lost() -> None:
    layers = [Layer(name="a", forward_s=1e-3, weight_s=1e-3, gradient_bytes=400)]
    profile = profile_of(layers, model="m")
    first, *others = profile.operations
    beside = Operation(name="all-to-all", phase="forward", duration_s=2e-3, resource="peers")
    moved = [msgspec.structs.replace(o, after=tuple(a + (a > 0) for a in o.after)) for o in others]
    gradient = msgspec.structs.replace(profile.gradients[0], ready_after=2)
    changed = msgspec.structs.replace(
        profile, operations=(first, beside, *moved), gradients=(gradient,)
    )
    assert any("2 ms on further streams" in s for s in write_layer_table(changed).lost)
    assert not any("further streams" in s for s in write_layer_table(profile).lost)


@given(profiles())
@many
def test_any_profile_is_written_or_refused_and_keeps_its_times(profile: Profile) -> None:
    try:
        written = write_layer_table(profile)
    except UserError as error:
        assert "no forward or backward operation" in str(error)  # noqa: PT017
        return
    rows = [line.split("\t") for line in written.content.decode().splitlines()[1:]]
    assert sum(int(row[5]) for row in rows) == profile.gradient_bytes
    backward_s = profile.phase_s("backward")
    forward_s = profile.phase_s("data", "copy", "forward")
    if any(o.phase == "forward" for o in profile.operations):
        assert sum(float(row[3]) for row in rows) * 1e-6 == pytest.approx(backward_s, abs=1e-5)
    assert sum(float(row[2]) for row in rows) * 1e-6 == pytest.approx(forward_s, abs=1e-5)


layer_rows = st.builds(
    Layer,
    name=st.text("abc123", min_size=1, max_size=4),
    forward_s=st.integers(0, 10**9).map(lambda ns: ns / 1e9),
    weight_s=st.integers(0, 10**9).map(lambda ns: ns / 1e9),
    gradient_bytes=st.integers(0, 10**6).map(lambda n: 4 * n),
)


@given(
    st.lists(layer_rows, min_size=1, max_size=12).filter(
        lambda rows: any(row.gradient_bytes for row in rows)
    ),
    st.integers(0, 10**6),
)
@many
def test_layers_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Layer], data: int
) -> None:
    profile = profile_of(rows, model="table", data_s=data / 1e6)
    path = tmp_path_factory.mktemp("layers") / "table.txt"
    path.write_bytes(write_layer_table(profile).content)
    again = read_layer_table(path).known_profile()
    assert [o.phase for o in again.operations] == [o.phase for o in profile.operations]
    assert [o.after for o in again.operations] == [o.after for o in profile.operations]
    for own, given_one in zip(again.operations, profile.operations, strict=True):
        assert own.duration_s == pytest.approx(given_one.duration_s, rel=1e-8, abs=1e-15)
    own_gradients = [(g.elements, g.ready_after, g.needed_by) for g in again.gradients]
    assert own_gradients == [(g.elements, g.ready_after, g.needed_by) for g in profile.gradients]
