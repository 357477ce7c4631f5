"""The data sets by name, and which of them a model can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from syncline.errors import FileError, UserError, require_known
from syncline.lab.training.data import imagefolder
from syncline.lab.training.data.images import CIFAR10_FILES, ImageData, load_cifar10, load_digits
from syncline.lab.training.data.text import PTB_FILES, TextData, load_help_text, load_ptb
from syncline.lab.training.models import ImageModel, ModelSpec, TextModel

__all__ = ["DATA", "DataSet", "data_named", "default_data", "load_images", "load_text"]

Loader = TypeVar("Loader")


class DataSet(NamedTuple, Generic[Loader]):
    """How to load a data set."""

    load: Loader
    """(folder) -> data; of images, (folder, model) -> data in a shape that the model takes."""
    folder: str | None = None
    """What ``--data-dir`` must hold, for messages; None where the data need no folder."""


IMAGES: dict[str, DataSet[Callable[[Path, ImageModel], ImageData]]] = {
    "digits": DataSet(load_digits),
    "cifar10": DataSet(load_cifar10, f"{CIFAR10_FILES} (the binary version)"),
    "imagefolder": DataSet(
        imagefolder.load, "train/<class>/ and val/<class>/ with .jpg or .png images"
    ),
}
TEXTS: dict[str, DataSet[Callable[[Path], TextData]]] = {
    "text": DataSet(load_help_text),
    "ptb": DataSet(load_ptb, ", ".join(PTB_FILES)),
}
DATA: dict[str, DataSet[Any]] = {**IMAGES, **TEXTS}


def data_named(name: str) -> DataSet[Any]:
    """Return the data set of that name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    require_known("data set", name, DATA)
    return DATA[name]


def default_data(model: ModelSpec) -> str:
    """Return the default data set of a model: one that needs no folder."""
    return "digits" if isinstance(model, ImageModel) else "text"


def load_images(name: str, data_dir: str | None, model: ImageModel) -> ImageData:
    """Load a data set of images for a model.

    Raises:
        UserError: the data set holds text, needs a folder and none is named, or needs none and one
            is named.
        FileError: the folder or a file is missing, or a file is broken.
    """
    found, folder = _located(
        name, data_dir, IMAGES, f"text, but model {model.name!r} is trained on images"
    )
    return found.load(folder, model)


def load_text(name: str, data_dir: str | None, model: TextModel) -> TextData:
    """Load a text for a model; raises as :func:`load_images` does."""
    found, folder = _located(
        name, data_dir, TEXTS, f"images, but model {model.name!r} is trained on text"
    )
    return found.load(folder)


def _located(
    name: str, data_dir: str | None, fitting: Mapping[str, DataSet[Loader]], otherwise: str
) -> tuple[DataSet[Loader], Path]:
    """Return a data set and the folder to read it from."""
    data_named(name)
    if name not in fitting:
        raise UserError(f"data set {name!r} holds {otherwise}: {', '.join(fitting)}")
    found = fitting[name]
    if found.folder is None:
        if data_dir is not None:
            raise UserError(
                f"data set {name!r} is read from no folder; leave out --data-dir {data_dir}"
            )
        return found, Path()
    if data_dir is None:
        raise UserError(
            f"data set {name!r} is read from a folder: name it with --data-dir; "
            f"it must hold {found.folder}"
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise FileError(
            f"{folder}: expected the folder of data set {name!r}, with {found.folder}; found {what}"
        )
    return found, folder
