"""ASTRA-sim's workloads are read in cycles and written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import FileError, UserError
from syncline.files.traces.astrasim import is_astrasim, read_astrasim, write_astrasim
from syncline.files.traces.trace import Trace
from tests.files.traces.seeds import ASTRASIM, layered_profile
from tests.trace_files import TRACES

REAL = TRACES / "astrasim" / "Resnet50_DataParallel.txt"


def _read(tmp_path: Path, text: str, clock_hz: float = 1e9) -> Trace:
    path = tmp_path / "workload.txt"
    path.write_text(text)
    return read_astrasim(path, clock_hz=clock_hz)


def test_layers_run_forward_then_backward_with_the_weight_gradient_first(tmp_path: Path) -> None:
    profile = _read(tmp_path, ASTRASIM).known_profile()
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
    assert [(g.name, g.size_bytes, g.ready_after) for g in profile.gradients] == [
        ("conv2", 65536, 5),
        ("conv1", 37632, 7),
    ]


def test_the_clock_scales_the_times(tmp_path: Path) -> None:
    slow = _read(tmp_path, ASTRASIM, 5e8).known_profile()
    assert slow.computation_s == pytest.approx(
        2 * _read(tmp_path, ASTRASIM).known_profile().computation_s
    )
    for clock_hz in (0, -1, float("nan"), 1e16):
        with pytest.raises(UserError, match="the clock must be"):
            _read(tmp_path, ASTRASIM, clock_hz)


def test_what_was_read_is_written_again(tmp_path: Path) -> None:
    written = write_astrasim(_read(tmp_path, ASTRASIM).known_profile())
    # But for the first layer's input gradient, which nobody computes.
    expected = ASTRASIM.replace("NONE\t0\t1200", "NONE\t0\t0")
    assert written.content.decode() == expected
    assert written.lost == ()


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data beside the project")
def test_the_real_workload_comes_back() -> None:
    trace = read_astrasim(REAL)
    profile = trace.known_profile()
    assert len(profile.gradients) == 54
    assert profile.gradient_bytes == pytest.approx(102e6, rel=0.01)  # ResNet-50 in fp32
    own = write_astrasim(profile).content.decode().split()
    given = REAL.read_text().split()
    differing = [(a, b) for a, b in zip(given, own, strict=True) if a != b]
    assert differing == [("12864", "0")]


def test_what_it_cannot_hold_is_said() -> None:
    lost = write_astrasim(layered_profile()).lost
    assert any("reading and copying" in sentence for sentence in lost)


def test_a_workload_is_known_by_its_first_lines() -> None:
    assert is_astrasim(ASTRASIM)
    assert is_astrasim("HYBRID_TRANSFORMER model_parallel_NPU_group: 4\n5\n")
    assert not is_astrasim("DATA\n")
    assert not is_astrasim("DATA\nx\n")
    assert not is_astrasim("data\n5\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
)
def test_errors_name_their_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=says) as caught:
        _read(tmp_path, text)
    assert "workload.txt" in str(caught.value)
