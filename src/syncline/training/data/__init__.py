"""The data sets by name, and which of them a model can be trained on."""

from __future__ import annotations

from pathlib import Path

from syncline.errors import FileError, UserError, require_known
from syncline.training.data import imagefolder
from syncline.training.data.images import CIFAR10, DIGITS
from syncline.training.data.spec import DataSpec, ImageData, ImageDataSpec, TextData, TextDataSpec
from syncline.training.data.text import PTB, TEXT
from syncline.training.models.spec import ImageModel, ModelSpec, TextModel

__all__ = ["DATA", "data_named", "default_data", "load_images", "load_text", "require_folder"]

DATA: dict[str, DataSpec] = {
    spec.name: spec for spec in (DIGITS, CIFAR10, imagefolder.DATA, TEXT, PTB)
}


def data_named(name: str) -> DataSpec:
    """Return the data set of that name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    require_known("data set", name, DATA)
    return DATA[name]


def default_data(model: ModelSpec) -> str:
    """Return the data set that a model is trained on unless one is named: one that is at hand."""
    return DIGITS.name if isinstance(model, ImageModel) else TEXT.name


def load_images(name: str, data_dir: str | None, model: ImageModel) -> ImageData:
    """Load a data set of images for a model.

    Raises:
        UserError: the data set holds text, or its folder was not named.
        FileError: a file is missing or broken.
    """
    spec = data_named(name)
    if not isinstance(spec, ImageDataSpec):
        raise UserError(_wrong_kind(name, "text", model.name, "images", ImageDataSpec))
    return spec.load(require_folder(spec, data_dir), model)


def load_text(name: str, data_dir: str | None, model: TextModel) -> TextData:
    """Load a text for a model; raises as :func:`load_images` does."""
    spec = data_named(name)
    if not isinstance(spec, TextDataSpec):
        raise UserError(_wrong_kind(name, "images", model.name, "text", TextDataSpec))
    return spec.load(require_folder(spec, data_dir))


def _wrong_kind(name: str, kind: str, model: str, wanted: str, spec: type[object]) -> str:
    fitting = ", ".join(n for n, s in DATA.items() if isinstance(s, spec))
    return f"data set {name!r} holds {kind}, but model {model!r} is trained on {wanted}: {fitting}"


def require_folder(spec: DataSpec, data_dir: str | None) -> Path:
    """Return the folder to read the data from.

    Raises:
        UserError: the data set needs a folder and none is named, or the other way round.
        FileError: the folder does not exist.
    """
    if spec.folder is None:
        if data_dir is not None:
            raise UserError(
                f"data set {spec.name!r} is read from no folder; leave out --data-dir {data_dir}"
            )
        return Path()
    if data_dir is None:
        raise UserError(
            f"data set {spec.name!r} is read from a folder: name it with --data-dir; "
            f"it must hold {spec.folder}"
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise FileError(
            f"{folder}: expected the folder of data set {spec.name!r}, with {spec.folder}; "
            f"found {found}"
        )
    return folder
