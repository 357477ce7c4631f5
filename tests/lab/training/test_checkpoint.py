"""Checkpoints come back as they were written, and nothing else is taken for one."""

from __future__ import annotations

import errno
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from syncline.errors import FileError, MismatchError, UserError
from syncline.lab.training.archive import save_archive
from syncline.lab.training.checkpoint import FILE_NAME, Checkpoint, load_checkpoint, settings_of
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.replica import sgd
from tests.comm.groups.jobs import limited
from tests.words import assert_tells

CONFIG = TrainingConfig.of("resnet20", "digits", overrides={"epochs": 5})


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def checkpoint(config: TrainingConfig = CONFIG, *, epoch: int = 2) -> Checkpoint:
    built = module()
    optimizer = sgd(built, config)
    built(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return Checkpoint(
        settings=settings_of(config, 10),
        epoch=epoch,
        step=epoch * 7,
        weights=module().state_dict(),
        optimizer=optimizer.state_dict(),
        random_states=[[torch.get_rng_state()] for _ in range(config.workers)],
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint()
    saved.save(tmp_path)
    path, loaded = load_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    for name in ("settings", "epoch", "step"):
        assert getattr(loaded, name) == getattr(saved, name)
    parts = [(c.weights, c.optimizer["state"], c.random_states) for c in (loaded, saved)]
    torch.testing.assert_close(*parts, rtol=0, atol=0)
    loaded.check(path, CONFIG, 10, module())


def test_settings_that_do_not_change_are_the_optimizer_s_own() -> None:
    saved = checkpoint()
    (group,) = saved.optimizer["param_groups"]
    group.update({"lr": 0.25, "momentum": 7.0, "params": [9]})  # type: ignore[typeddict-item]
    loaded = msgspec.convert(msgspec.structs.asdict(saved), Checkpoint)
    optimizer = sgd(module(), CONFIG)
    before = optimizer.state_dict()["param_groups"]
    loaded.load_optimizer(optimizer)
    assert optimizer.state_dict()["param_groups"] == [{**before[0], "lr": 0.25}]


def test_a_checkpoint_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says "unexpected pos 768 vs 662" of a disk that fills up while it writes."""
    path, content = tmp_path / "checkpoint.pt", {"weights": torch.ones(100_000)}
    save_archive(path, "form", content)
    written = path.read_bytes()
    with limited(resource.RLIMIT_FSIZE, 10_000):  # acts as a full disk does
        with pytest.raises(FileError, match=r"checkpoint.pt: cannot be written: File too large"):
            save_archive(path, "form", content)
        monkeypatch.setattr(errno, "EDQUOT", errno.EFBIG)
        needed = f": {len(written)} bytes are needed in the folder {tmp_path}; make"
        with pytest.raises(FileError, match=needed):
            save_archive(path, "form", content)
    assert path.read_bytes() == written
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 1, 100, 0.3, 0.9, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    checkpoint().save(tmp_path)
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(FileError, match=r"checkpoint.pt: not a checkpoint, or a truncated one"):
        load_checkpoint(tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    saved = checkpoint()
    saved.weights["0.weight"].fill_(1.25)
    saved.save(tmp_path)
    path = tmp_path / FILE_NAME
    content = bytearray(path.read_bytes())
    place = content.index(saved.weights["0.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="damaged: the checksum of"):
        load_checkpoint(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.txt", "hello")


CODE = {"format": "syncline/checkpoint", "version": 1, "epoch": Evil()}


@pytest.mark.parametrize(
    "write",
    [
        zipped,
        lambda path: path.write_bytes(pickle.dumps({"weights": 1})),
        lambda path: torch.save(CODE, path),
        lambda path: torch.save(module().state_dict(), path),
        lambda path: torch.save([1, 2], path),
    ],
    ids=["zip", "pickle", "code", "weights", "list"],
)
def test_a_foreign_file_is_refused_and_never_run(
    tmp_path: Path, write: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / FILE_NAME)
    with pytest.raises(FileError, match=r"checkpoint.pt: (not a checkpoint|expected a file of)"):
        load_checkpoint(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_what_is_packed_is_not_unpacked(tmp_path: Path) -> None:
    checkpoint().save(tmp_path)
    path = tmp_path / FILE_NAME
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr("bomb", b"\0" * (50 << 20))
    with pytest.raises(FileError, match="its members are compressed"):
        load_checkpoint(tmp_path)


def test_a_damaged_part_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint()
    optimizer, state = dict(saved.optimizer), saved.optimizer["state"]

    def with_groups(*groups: object) -> dict[str, Any]:
        return {"optimizer": {**optimizer, "param_groups": list(groups)}}

    def with_state(index: object, value: object) -> dict[str, Any]:
        return {"optimizer": {**optimizer, "state": {**state, index: value}}}

    huge = torch.zeros(1).expand(1 << 40)
    damages: list[tuple[dict[str, Any], str]] = [
        ({"epoch": "two"}, r"Expected `int`, got `str` - at `\$.epoch`"),
        ({"epoch": -1}, r"`int` >= 0 - at `\$.epoch`"),
        ({"step": True}, r"got `bool` - at `\$.step`"),
        ({"step": 1 << 70}, r"at `\$.step`"),
        ({"settings": torch.zeros(3)}, "[`']Tensor[`']"),
        ({"weights": torch.zeros(3)}, "[`']Tensor[`']"),
        ({"weights": {"0.bias": None}}, r"Expected `Tensor`, got `NoneType` - at `\$.weights"),
        ({"weights": {"0.bias": torch.zeros(2).to_sparse()}}, "not all weights are dense"),
        ({"weights": {3: torch.zeros(2)}}, r"in `\$.weights`"),
        ({"random_states": "\ud83d"}, "surrogates not allowed"),
        ({"optimizer": {}}, r"at `\$.optimizer`"),
        (with_groups(), r"at `\$.optimizer.param_groups`"),
        (with_groups({"lr": 0.1}, {"lr": 0.1}), r"at `\$.optimizer.param_groups`"),
        (with_groups({"lr": float("nan")}), r"at `\$.optimizer.param_groups\[0\].lr`"),
        (with_groups({"lr": float("inf")}), r"at `\$.optimizer.param_groups\[0\].lr`"),
        (with_groups({"lr": torch.zeros(3)}), r"at `\$.optimizer.param_groups\[0\].lr`"),
        (with_state(9, {}), "the state of the optimizer is of other parameters"),
        (with_state(0, {"momentum_buffer": torch.zeros(7)}), "the state of the optimizer"),
        (with_state(0, {"momentum_buffer": "x"}), r"at `\$.optimizer.state\[...\]\[...\]`"),
        ({"random_states": []}, "the states of the random generators"),
        ({"random_states": [[], []]}, r"at `\$.random_states\[0\]`"),
        ({"random_states": [[huge], [huge]]}, "the states of the random generators"),
        ({"random_states": [[torch.zeros(5056, dtype=torch.uint8)]] * 2}, "the random generators"),
        ({"compression_files": ["../../etc/passwd"]}, "the files of compression are not those"),
    ]
    saved.save(tmp_path)
    path = tmp_path / FILE_NAME
    content = torch.load(path, weights_only=True)
    for changes, problem in damages:
        torch.save(content | changes, path)
        with pytest.raises(FileError, match=f"checkpoint.pt: damaged: .*{problem}"):
            load_checkpoint(tmp_path)[1].check(path, CONFIG, 10, module())
    integers = {**saved.weights, "0.bias": torch.zeros(2).int()}
    wrong = msgspec.structs.replace(saved, weights=integers)
    with pytest.raises(MismatchError, match=r"'0.bias' is torch.float32 .* model, torch.int"):
        wrong.check(Path("c.pt"), CONFIG, 10, module())


def test_no_checkpoint_or_another_version(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected a checkpoint, found none; start without --res"):
        load_checkpoint(tmp_path)
    checkpoint().save(tmp_path)
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    torch.save({**content, "version": 2}, tmp_path / FILE_NAME)
    with pytest.raises(FileError, match="expected version 1 of the checkpoint form, found 2"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [("model", "vgg16"), ("data", "cifar10"), ("workers", 3), ("seed", 4), ("precision", "bf16")],
)
def test_another_training_is_refused(name: str, found: object) -> None:
    other = checkpoint(msgspec.structs.replace(CONFIG, **{name: found}))
    with pytest.raises(MismatchError) as caught:
        other.check(Path("c.pt"), CONFIG, 10, module())
    expected = f"has {name} {getattr(CONFIG, name)!r}, "
    assert_tells(str(caught.value), expected, f"with {name} {found!r};")


def test_other_hyperparameters_are_refused_but_more_epochs_are_welcome() -> None:
    slower = TrainingConfig.of("resnet20", "digits", overrides={"learning_rate": 0.5})
    with pytest.raises(MismatchError, match=r"has learning_rate 0.1, .* learning_rate 0.5"):
        checkpoint(slower).check(Path("c.pt"), CONFIG, 10, module())
    longer = TrainingConfig.of("resnet20", "digits", overrides={"epochs": 50})
    checkpoint().check(Path("c.pt"), longer, 10, module())


def test_another_shape_is_refused() -> None:
    wider = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(MismatchError, match=r"'0.weight' is .* \(2, 4\) in .* \(2, 3\) in the"):
        checkpoint().check(Path("c.pt"), CONFIG, 10, wider)
    with pytest.raises(MismatchError, match=r"has classes 100, .* with classes 10"):
        checkpoint().check(Path("c.pt"), CONFIG, 100, module())


def test_a_finished_training_says_what_to_raise() -> None:
    with pytest.raises(UserError, match="5 epochs are done and --epochs is 5; raise it"):
        checkpoint(epoch=5).check(Path("c.pt"), CONFIG, 10, module())
    limited = msgspec.structs.replace(CONFIG, steps=14)
    with pytest.raises(UserError, match="14 steps are done and --steps is 14; raise it"):
        checkpoint(epoch=2).check(Path("c.pt"), limited, 10, module())
