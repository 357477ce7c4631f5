"""``syncline train`` and ``syncline profile`` as a user meets them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli.run import run
from syncline.cli.train import train
from syncline.files.traces.layer_table import read_layer_table
from syncline.lab.training.config import COMPRESSIONS, Hyperparameters, TrainingConfig
from syncline.lab.training.data import DATA
from syncline.lab.training.models import MODELS
from syncline.plan.network import Network
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Profile
from tests.cases import first_few
from tests.cli.examples import Printed


@pytest.mark.parametrize("command", ["train", "profile"])
def test_torchrun_differs(monkeypatch: pytest.MonkeyPatch, refused: Printed, command: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = refused(command, "--workers", "2")
    assert "--workers is 2, but the launcher (torchrun) started 4" in said


def test_options_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    launched: list[TrainingConfig] = []
    monkeypatch.setattr("syncline.lab.training.launch.launch", launched.append)
    report = str(tmp_path / "report")
    arguments = (
        f"train --model lstm --report {report} --lr 0.5 --batch-size 4 --workers 3 --seed 7 "
        "--timeout 9 --steps 5 --accumulate 2 --baseline --block-steps 4 --json --clip-norm 2 "
        "--no-overlap --cache kept --schedule step"
    )
    monkeypatch.chdir(tmp_path)
    printed(*arguments.split())
    assert launched == [
        TrainingConfig.of(
            "lstm",
            "text",
            overrides={"learning_rate": 0.5, "batch_size": 4, "clip_norm": 2.0, "schedule": "step"},
            report=report,
            workers=3,
            seed=7,
            timeout_s=9.0,
            steps=5,
            accumulate=2,
            overlap=False,
            baseline=True,
            block_steps=4,
            json=True,
            cache="kept",
        )
    ]
    assert (tmp_path / "kept").is_dir()


def test_every_field_of_the_configuration_has_an_option() -> None:
    fields = {*TrainingConfig.__struct_fields__, *Hyperparameters.__struct_fields__} - {"hyper"}
    assert {parameter.name for parameter in train.params} == fields | {"help_all"}


def test_help_lists_every_model_data_set_and_planner_to_train_with() -> None:
    text = CliRunner().invoke(train, ["--help-all"]).output
    words = set(text[text.index("Models:") :].replace(",", " ").split())
    assert {*MODELS, *DATA, *PLANNERS, *COMPRESSIONS} <= words
    words = set(CliRunner().invoke(run, ["--help"]).output.replace(",", " ").split())
    assert {*PLANNERS, *COMPRESSIONS} <= words


def test_the_command_is_listed_without_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import syncline.cli.train"
    subprocess.run([sys.executable, "-c", blocked], check=True)


@pytest.mark.parametrize("model", first_few(["lstm", "resnet20"], 0))
def test_a_model_and_its_table(model: str, tmp_path: Path, printed: Printed) -> None:
    table, folder = tmp_path / "table.txt", tmp_path / "run"
    arguments = f"profile --model {model} --iterations 2 --batch-size 4 -o {folder}"
    out = printed(*arguments.split(), "--export-papers-table", table)
    assert f"written: {table}" in out
    assert "  lost: " in out
    profile = Profile.load(folder / "profile.json")
    network = Network.load(folder / "network.json")
    assert (profile.model, profile.workers, profile.iterations) == (model, 2, 2)
    assert all(gradient.needed_by is not None for gradient in profile.gradients)
    assert network.workers == 2
    trace = read_layer_table(table)
    again = trace.known_profile()
    assert again.gradient_bytes == profile.gradient_bytes
    assert again.phase_s("backward") == pytest.approx(profile.phase_s("backward"), rel=1e-6)
    # Every layer's message was timed at exactly its bytes.
    assert {p.size_bytes for p in trace.points} <= {p.size_bytes for p in network.points}
    # The single iterations, with the messages of each.
    singles = read_layer_table(folder / "layers.txt.gz")
    assert singles.steps == 2
    assert [p.size_bytes for p in singles.points] == [p.size_bytes for p in trace.points]
    assert singles.known_profile().gradient_bytes == profile.gradient_bytes


def test_a_single_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    printed(*f"profile --iterations 1 --batch-size 4 -o {tmp_path / 'run'}".split())
    trace = read_layer_table(tmp_path / "run" / "layers.txt.gz")
    assert (trace.steps, trace.points) == (1, ())
