"""ImageNet-style folders, ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``, decoded lazily."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.errors import FileError, UserError
from syncline.lab.training.data.images import ImageData
from syncline.lab.training.data.sampling import Batch, seed_from
from syncline.lab.training.models import ImageModel

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png")

MEAN = (0.485, 0.456, 0.406)  # of ImageNet's training images by channel; 1 is full brightness
DEVIATION = (0.229, 0.224, 0.225)

TEST_MARGIN = 256 / 224  # size of a scaled test image, relative to its central window

DECODING_THREADS = 4  # Pillow decodes outside the interpreter lock, so that threads help


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImages:
    """A split whose images are files."""

    files: tuple[Path, ...]
    labels: Tensor  # (N,), int64
    image_size: int

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor, *, augment_seed: int | None) -> Batch:
        """Return the images of ``indices``; see ``ImageSplit.batch``."""

        def image(place: int, index: int) -> Tensor:
            seed = None if augment_seed is None else seed_from(augment_seed, place)
            return _read_image(self.files[index], self.image_size, seed)

        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            images = list(pool.map(image, range(len(indices)), indices.tolist()))
        return Batch(torch.stack(images), self.labels[indices])


def load(folder: Path, model: ImageModel) -> ImageData:
    """List the images of a folder; the classes are the folders of ``train/``, sorted."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError(
            "data set 'imagefolder' needs Pillow to decode images; "
            "install it with 'pip install pillow'"
        ) from None
    classes = _classes(folder / "train")
    unknown = sorted(set(_classes(folder / "val")) - set(classes))
    if unknown:
        raise FileError(
            f"{folder / 'val' / unknown[0]}: expected a class of {folder / 'train'}, which has "
            "no folder of this name"
        )
    train, test = (
        _list_images(folder / split, classes, model.folder_image) for split in ("train", "val")
    )
    return ImageData(
        image_size=model.folder_image, classes=len(classes), train=train, test=test, decodes=True
    )


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileError(f"{folder}: expected a folder with one folder of images a class")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise FileError(f"{folder}: expected one folder of images a class, found no folder")
    return names


def _list_images(folder: Path, classes: list[str], image_size: int) -> FolderImages:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            entries = sorted((folder / name).iterdir())
            found = [entry for entry in entries if entry.name.lower().endswith(SUFFIXES)]
            files += found
            labels += [label] * len(found)
    if not files:
        raise FileError(f"{folder}: expected images ({', '.join(SUFFIXES)}), found none")
    return FolderImages(files=tuple(files), labels=torch.tensor(labels), image_size=image_size)


def _read_image(path: Path, size: int, seed: int | None) -> Tensor:
    """Return a normalised (3, size, size) window of the image: random with a seed, else central."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    # For a broken file Pillow raises any error of its decoder, even SyntaxError.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise FileError(f"{path}: expected an image that Pillow can decode: {error}") from None
    image = _central(image, size) if seed is None else _random(image, size, random.Random(seed))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    scaled = pixels.view(size, size, 3).permute(2, 0, 1).float() / 255
    return (scaled - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)


def _central(image: Image, size: int) -> Image:
    from PIL.Image import Resampling

    scale = size * TEST_MARGIN / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _random(image: Image, size: int, draw: random.Random) -> Image:
    """Cut out 8 to 100 % of the area at an aspect of 3/4 to 4/3, scale it, and maybe mirror it.

    Source: Szegedy et al., Going deeper with convolutions, section 6.
    """
    from PIL.Image import Resampling, Transpose

    width, height = image.size
    area = width * height * draw.uniform(0.08, 1.0)
    aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
    # A window that does not fit is clipped rather than drawn again: one draw, one result.
    window_width = min(width, max(1, round(math.sqrt(area * aspect))))
    window_height = min(height, max(1, round(math.sqrt(area / aspect))))
    left = draw.randint(0, width - window_width)
    top = draw.randint(0, height - window_height)
    box = (left, top, left + window_width, top + window_height)
    image = image.resize((size, size), Resampling.BILINEAR, box=box)
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else image
