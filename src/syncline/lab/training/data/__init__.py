"""The data sets by name, and which of them a model can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from syncline.errors import FileError, UserError, require_known
from syncline.lab.training.data import imagefolder
from syncline.lab.training.data.images import CIFAR10_FILES, ImageData, load_cifar10, load_digits
from syncline.lab.training.data.text import PTB_FILES, TextData, load_help_text, load_ptb
from syncline.lab.training.models import ImageModel, ModelSpec, TextModel

__all__ = ["DATA", "FOLDERS", "default_data", "load_images", "load_text"]

IMAGES: dict[str, Callable[[Path, ImageModel], ImageData]] = {
    "digits": load_digits,
    "cifar10": load_cifar10,
    "imagefolder": imagefolder.load,
}
TEXTS: dict[str, Callable[[Path], TextData]] = {"text": load_help_text, "ptb": load_ptb}
DATA = (*IMAGES, *TEXTS)
FOLDERS = {
    "cifar10": f"{CIFAR10_FILES} (the binary version)",
    "imagefolder": "train/<class>/ and val/<class>/ with .jpg or .png images",
    "ptb": ", ".join(PTB_FILES),
}
"""What ``--data-dir`` must hold, for messages; the other data sets need no folder."""


def default_data(model: ModelSpec) -> str:
    """Return the default data set of a model: one that needs no folder."""
    return "digits" if isinstance(model, ImageModel) else "text"


def load_images(name: str, data_dir: str | None, model: ImageModel) -> ImageData:
    """Load a data set of images for a model.

    Raises:
        UserError: the data set is unknown, holds text, needs a folder and none is named, or needs
            none and one is named.
        FileError: the folder or a file is missing, or a file is broken.
    """
    require_known("data set", name, DATA)
    if name not in IMAGES:
        raise UserError(
            f"data set {name!r} holds text, but model {model.name!r} is trained on images: "
            f"{', '.join(IMAGES)}"
        )
    return IMAGES[name](_folder(name, data_dir), model)


def load_text(name: str, data_dir: str | None, model: TextModel) -> TextData:
    """Load a text for a model; raises as :func:`load_images` does."""
    require_known("data set", name, DATA)
    if name not in TEXTS:
        raise UserError(
            f"data set {name!r} holds images, but model {model.name!r} is trained on text: "
            f"{', '.join(TEXTS)}"
        )
    return TEXTS[name](_folder(name, data_dir))


def _folder(name: str, data_dir: str | None) -> Path:
    """Return the folder to read a data set from."""
    if name not in FOLDERS:
        if data_dir is not None:
            raise UserError(
                f"data set {name!r} is read from no folder; leave out --data-dir {data_dir}"
            )
        return Path()
    if data_dir is None:
        raise UserError(
            f"data set {name!r} is read from a folder: name it with --data-dir; "
            f"it must hold {FOLDERS[name]}"
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise FileError(
            f"{folder}: expected the folder of data set {name!r}, with {FOLDERS[name]}; found "
            f"{what}"
        )
    return folder
