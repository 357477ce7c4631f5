"""The two texts become streams of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syncline.errors import FileError
from syncline.lab.training.data.text import PTB_FILES, load_help_text, load_ptb


def test_help_text_is_split_in_order() -> None:
    data = load_help_text(Path())
    length = len(data.train) + len(data.validation)
    assert length > 300_000  # a few letters more or less in every version of Python
    assert len(data.validation) == int(length * 0.1)
    both = torch.cat([data.train, data.validation])
    assert both.unique().tolist() == list(range(data.vocabulary))
    assert data.test is None


def write(folder: Path, train: str, valid: str = "a b\n", test: str = "b\n") -> Path:
    for name, content in zip(PTB_FILES, (train, valid, test), strict=True):
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_ptb_numbers_the_training_words(tmp_path: Path) -> None:
    data = load_ptb(write(tmp_path, " b <unk> a \n a\n", "a zebra\n"))
    words = ["<eos>", "<unk>", "a", "b"]
    assert data.vocabulary == 4
    assert [words[n] for n in data.train] == ["b", "<unk>", "a", "<eos>", "a", "<eos>"]
    assert [words[n] for n in data.validation] == ["a", "<unk>", "<eos>"]
    assert data.test is not None
    assert [words[n] for n in data.test] == ["b", "<eos>"]


def test_ptb_names_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, "a b\n", "a zebra\n")
    with pytest.raises(FileError, match=r"ptb.valid.txt: the word 'zebra' is not in ptb.train"):
        load_ptb(tmp_path)
    write(tmp_path, "a b\n", test="\n\n")
    with pytest.raises(FileError, match=r"ptb.test.txt: expected words"):
        load_ptb(tmp_path)
    (tmp_path / "ptb.valid.txt").write_bytes(b"a \xff b")
    with pytest.raises(FileError, match=r"ptb.valid.txt: expected UTF-8 text; byte 2 is not"):
        load_ptb(tmp_path)
    (tmp_path / "ptb.train.txt").unlink()
    with pytest.raises(FileError, match=r"ptb.train.txt: no such file; expected ptb.train.txt, "):
        load_ptb(tmp_path)
