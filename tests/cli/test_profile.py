"""``syncline profile`` measures a model and writes what the planners need."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.cli import main
from syncline.files.traces.layer_table import read_layer_table
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from tests.cases import first_few


@pytest.mark.parametrize("model", first_few(["resnet20", "lstm"]))
def test_a_model_is_measured_and_its_table_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.txt"
    arguments = f"profile --model {model} --iterations 2 --batch-size 4 -o {tmp_path / 'run'}"
    main([*arguments.split(), "--export-papers-table", str(table)])
    profile = Profile.load(tmp_path / "run" / "profile.json")
    network = Network.load(tmp_path / "run" / "network.json")
    assert (profile.model, profile.workers, profile.iterations) == (model, 2, 2)
    assert all(gradient.needed_by is not None for gradient in profile.gradients)
    assert network.workers == 2
    trace = read_layer_table(table)
    again = trace.known_profile()
    assert again.gradient_bytes == profile.gradient_bytes
    assert again.phase_s("backward") == pytest.approx(profile.phase_s("backward"), rel=1e-6)
    # Every layer's message was timed at exactly its bytes.
    measured = {p.size_bytes for p in network.points}
    assert {p.size_bytes for p in trace.points} <= measured
    # The single iterations, with the messages of each.
    singles = read_layer_table(tmp_path / "run" / "layers.txt.gz")
    assert singles.steps == 2
    assert [p.size_bytes for p in singles.points] == [p.size_bytes for p in trace.points]
    assert singles.known_profile().gradient_bytes == profile.gradient_bytes
    out = capsys.readouterr().out
    assert f"written: {table}" in out
    assert "  lost: " in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--model resnet2", "unknown model 'resnet2'; did you mean 'resnet20'"),
        ("--workers 0", "--workers must be at least 1"),
        ("--iterations 0", "--iterations must be at least 1, found 0"),
        ("--precision fp16", "unknown precision 'fp16'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, says: str, refused: Callable[..., str]
) -> None:
    assert says in refused("profile", *arguments.split())


def test_a_launcher_says_how_many_workers_there_are(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--workers is 3, but the launcher" in refused("profile", "--workers", "3")


def test_one_worker_of_a_launcher_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    main(f"profile --iterations 1 --batch-size 4 -o {folder}".split())
    trace = read_layer_table(folder / "layers.txt.gz")
    assert (trace.steps, trace.points) == (1, ())
