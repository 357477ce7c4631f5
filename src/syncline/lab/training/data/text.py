"""Data sets of text: the Penn Treebank by word, and the text of CPython's help by character."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import FileError, UserError, quoted

VALIDATION_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """A text as one stream of tokens a split; each is (length,), int64."""

    vocabulary: int
    train: Tensor
    validation: Tensor
    test: Tensor | None  # read once, after training; None where the data set has no such split


def load_help_text(_folder: Path) -> TextData:
    """Load the language reference that ``help()`` prints, by character, its last tenth to validate.

    It differs a little between versions of Python, and with it the perplexity.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "data set 'text' is the module pydoc_data.topics of CPython, which this Python was "
            "installed without; name another data set with --data"
        ) from None
    content = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(content))
    number = {character: index for index, character in enumerate(characters)}
    stream = torch.tensor([number[character] for character in content])
    border = len(stream) - int(len(stream) * VALIDATION_FRACTION)
    train, validation = stream[:border], stream[border:]
    return TextData(vocabulary=len(characters), train=train, validation=validation, test=None)


PTB_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")

END_OF_SENTENCE = "<eos>"
UNKNOWN = "<unk>"


def load_ptb(folder: Path) -> TextData:
    """Load the three files of the Penn Treebank, in the form of Mikolov; a sentence is a line.

    The vocabulary is that of the training file. Words that it lacks count as ``<unk>``.
    """
    splits = [_words(folder / name) for name in PTB_FILES]
    number = {word: index for index, word in enumerate(sorted(set(splits[0])))}
    streams: list[Tensor] = []
    for words, name in zip(splits, PTB_FILES, strict=True):
        missing = next((word for word in words if word not in number), None)
        if missing is not None and UNKNOWN not in number:
            raise FileError(
                f"{folder / name}: the word {quoted(missing)} is not in {PTB_FILES[0]}, and that "
                f"file has no {UNKNOWN} to stand for it"
            )
        streams.append(torch.tensor([number[w if w in number else UNKNOWN] for w in words]))
    train, validation, test = streams
    return TextData(vocabulary=len(number), train=train, validation=validation, test=test)


def _words(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; expected {', '.join(PTB_FILES)}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: expected UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    words = [word for line in lines for word in (*line.split(), END_OF_SENTENCE)]
    if len(words) == len(lines):
        raise FileError(f"{path}: expected words separated by blanks, found none")
    return words
