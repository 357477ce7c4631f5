"""Penn-Treebank-style text: words in three files, a sentence a line. Source: Mikolov's version."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import FileError, quoted
from syncline.training.data.spec import TextData, TextDataSpec

__all__ = ["DATA", "load"]

FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")

END_OF_SENTENCE = "<eos>"
UNKNOWN = "<unk>"


def load(folder: Path) -> TextData:
    """Load the three files; the vocabulary is that of the training file.

    Words that the training file lacks count as ``<unk>``.

    Raises:
        FileError: a file is missing, empty or not UTF-8, or a word is unknown where the training
            file has no ``<unk>`` to stand for it.
    """
    train, validation, test = (_words(folder / name) for name in FILES)
    number = {word: index for index, word in enumerate(sorted(set(train)))}

    def stream(words: list[str], name: str) -> Tensor:
        unknown = number.get(UNKNOWN)
        numbers = [number.get(word, unknown) for word in words]
        known = [n for n in numbers if n is not None]
        if len(known) < len(numbers):
            word = words[numbers.index(None)]
            raise FileError(
                f"{folder / name}: the word {quoted(word)} is not in {FILES[0]}, and that file "
                f"has no {UNKNOWN} to stand for it"
            )
        return torch.tensor(known)

    return TextData(
        vocabulary=len(number),
        train=stream(train, FILES[0]),
        validation=stream(validation, FILES[1]),
        test=stream(test, FILES[2]),
    )


def _words(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; expected {', '.join(FILES)}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: expected UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    words = [word for line in lines for word in (*line.split(), END_OF_SENTENCE)]
    if len(words) == len(lines):
        raise FileError(f"{path}: expected words separated by blanks, found none")
    return words


DATA = TextDataSpec(
    name="ptb",
    summary="Penn Treebank by word: ptb.train.txt, ptb.valid.txt and ptb.test.txt",
    folder=", ".join(FILES),
    load=load,
)
