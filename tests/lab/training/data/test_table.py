"""Data sets are found by name, fitted to the kind of model, and read from the folder named."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import FileError, UserError
from syncline.lab.training.data import FOLDERS, default_data, load_images, load_text
from syncline.lab.training.models import MODELS, ImageModel, TextModel

RESNET20, LSTM = MODELS["resnet20"], MODELS["lstm"]
assert isinstance(RESNET20, ImageModel)
assert isinstance(LSTM, TextModel)


def test_unknown_data_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        load_images("cifar", None, RESNET20)


def test_every_model_has_data_at_hand() -> None:
    assert not FOLDERS.keys() & {default_data(model) for model in MODELS.values()}


def test_the_wrong_kind_of_data_names_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"'text' holds text, .* images: digits, cifar10, imagef"):
        load_images("text", None, RESNET20)
    with pytest.raises(UserError, match=r"'digits' holds images, .* text: text, ptb"):
        load_text("digits", None, LSTM)


def test_the_folder_must_be_named_exist_and_be_wanted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name it with --data-dir; it must hold data_batch_1.bin"):
        load_images("cifar10", None, RESNET20)
    with pytest.raises(FileError, match=r"gone: expected the folder .* found nothing"):
        load_images("cifar10", str(tmp_path / "gone"), RESNET20)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="found a file"):
        load_text("ptb", str(tmp_path / "file"), LSTM)
    with pytest.raises(UserError, match="is read from no folder"):
        load_images("digits", str(tmp_path), RESNET20)
