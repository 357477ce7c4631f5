"""``syncline train`` finds mistakes before a worker starts, and says each in a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli import main
from syncline.cli.train import train
from syncline.lab.training.config import COMPRESSIONS, Hyperparameters, TrainingConfig
from syncline.lab.training.data import DATA
from syncline.lab.training.models import MODELS
from syncline.plan.planners import PLANNERS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--model resnet2", "unknown model 'resnet2'; did you mean 'resnet20'"),
        ("--data digit", "unknown data set 'digit'; did you mean 'digits'"),
        ("--model lstm --data digits", "holds images, but model 'lstm' is trained on text"),
        ("--data cifar10", "name it with --data-dir; it must hold data_batch_1.bin"),
        ("--data cifar10 --data-dir gone", "gone: expected the folder of data set 'cifar10'"),
        ("--planner mgwfb", "unknown planner 'mgwfb'; did you mean 'mgwfbp'"),
        ("--epochs 0", "--epochs must be at least 1, found 0"),
        ("--batch-size 5000", "10000 samples (2 workers x 5000 a batch x 1 accumulated)"),
        ("--resume", "--resume continues a checkpoint; name its folder"),
        ("--resume --checkpoint gone", "gone/checkpoint.pt: expected a checkpoint, found none"),
        ("--plan gone.json", "gone.json: no such file"),
        ("--precision fp16", "unknown precision 'fp16'"),
        ("--schedule cosin", "did you mean 'cosine'"),
        ("--lr nan", "--lr must be finite and above 0"),
        ("--workers 0", "--workers must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, says: str, refused: Callable[..., str]
) -> None:
    assert says in refused("train", *arguments.split())


def test_workers_must_agree_with_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as caught:
        main(["train", "--workers", "2"])
    assert caught.value.code == 2
    assert "--workers is 2, but the launcher (torchrun) started 4" in capsys.readouterr().err


def test_options_reach_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[TrainingConfig] = []
    monkeypatch.setattr("syncline.lab.training.launch.launch", launched.append)
    report = str(tmp_path / "report")
    arguments = (
        f"train --model lstm --report {report} --lr 0.5 --batch-size 4 --workers 3 --seed 7 "
        "--timeout 9 --steps 5 --accumulate 2 --baseline --block-steps 4 --json --clip-norm 2 "
        "--no-overlap --cache kept"
    )
    monkeypatch.chdir(tmp_path)
    main([*arguments.split(), "--schedule", "step"])
    (config,) = launched
    expected = TrainingConfig.of(
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
    assert config == expected
    assert (tmp_path / "kept").is_dir()


def test_every_field_of_the_configuration_has_an_option() -> None:
    fields = {*TrainingConfig.__struct_fields__, *Hyperparameters.__struct_fields__} - {"hyper"}
    assert {parameter.name for parameter in train.params} == fields | {"help_all"}


def test_help_lists_every_model_data_set_and_planner_to_train_with() -> None:
    text = CliRunner().invoke(train, ["--help-all"]).output
    words = set(text[text.index("Models:") :].replace(",", " ").split())
    assert {*MODELS, *DATA, *PLANNERS, *COMPRESSIONS} <= words


def test_the_command_is_listed_without_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import syncline.cli.train"
    subprocess.run([sys.executable, "-c", blocked], check=True)
