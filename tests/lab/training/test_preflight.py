"""What can be found out before training is found out before a worker is started."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from syncline.errors import FileError, MismatchError, UserError
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.launch import preflight
from syncline.lab.training.models.vision import ResNet20
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan, Tensor, Wait
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Gradient, Operation, Profile


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    return TrainingConfig.of("resnet20", "digits", report=str(tmp_path / "deep" / "report"))


def check(config: TrainingConfig, **change: object) -> None:
    preflight(msgspec.structs.replace(config, **change), workers_here=2)


def parameters() -> list[tuple[str, int]]:
    return [(name, p.numel()) for name, p in reversed(list(ResNet20(10).named_parameters()))]


def test_folders_are_made(config: TrainingConfig, tmp_path: Path) -> None:
    check(config, checkpoint=str(tmp_path / "ck"))
    assert (tmp_path / "deep" / "report").is_dir()
    assert (tmp_path / "ck").is_dir()


def test_a_folder_that_cannot_be_made_is_named(config: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"file/ck: --checkpoint needs a folder"):
        check(config, checkpoint=str(tmp_path / "file" / "ck"))


def test_planner_data_and_batch_are_checked(config: TrainingConfig) -> None:
    with pytest.raises(UserError, match="unknown planner 'murge'; did you mean 'merge'"):
        check(config, planner="murge")
    with pytest.raises(UserError, match="lower --batch-size"):
        check(config, workers=2000)
    with pytest.raises(UserError, match="images: digits, cifar10, imagefolder"):
        check(config, data="text")


@pytest.mark.parametrize("planner", PLANNERS)
def test_training_takes_every_planner(config: TrainingConfig, planner: str) -> None:
    check(config, planner=planner)


def test_a_plan_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    def plan(tensors: list[tuple[str, int]], workers: int, wait: Wait = "update") -> str:
        elements = sum(count for _, count in tensors)
        Plan(
            planner="single",
            model="ResNet20",
            workers=workers,
            tensors=tuple(Tensor(name=name, elements=count) for name, count in tensors),
            messages=(Message(start=0, stop=elements),),
            wait=wait,
        ).save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    check(config, plan=plan(parameters(), 2))
    check(config, plan=plan(parameters(), 2, "need"))
    with pytest.raises(MismatchError, match=r"plan.json: the plan is for 4 workers, this job has"):
        check(config, plan=plan(parameters(), 4))
    with pytest.raises(
        MismatchError, match=r"60 gradients .* this model has 59; .* leave out --plan"
    ):
        check(config, plan=plan([*parameters(), ("more.weight", 3)], 2))
    with pytest.raises(FileError, match="no such file"):
        check(config, plan=str(tmp_path / "none.json"))


def test_a_profile_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    def profile(tensors: list[tuple[str, int]]) -> str:
        Profile(
            model="ResNet20",
            device="cpu",
            workers=2,
            iterations=1,
            operations=(Operation(name="b", phase="backward", duration_s=1.0),),
            gradients=tuple(Gradient(name=n, elements=e, ready_after=0) for n, e in tensors),
        ).save(tmp_path / "profile.json")
        return str(tmp_path / "profile.json")

    check(config, profile=profile(parameters()))
    with pytest.raises(
        MismatchError,
        match=r"the profile has 58 .* this model has 59; .* 'head.bias'; leave out --pr",
    ):
        check(config, profile=profile(parameters()[1:]))


def test_a_network_must_fit(config: TrainingConfig, tmp_path: Path) -> None:
    Network.line(workers=16, a_s=1e-3, b_s_per_byte=1e-9).save(tmp_path / "network.json")
    with pytest.raises(MismatchError, match="of 16 workers, this job has 2"):
        check(config, network=str(tmp_path / "network.json"))


def test_a_checkpoint_must_be_there(config: TrainingConfig, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected a checkpoint, found none"):
        check(config, checkpoint=str(tmp_path), resume=True)
