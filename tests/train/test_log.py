"""Messages of the wrapper during training."""

from __future__ import annotations

import io
import sys

import pytest
from tqdm import tqdm

from syncline.train.log import announce


@pytest.mark.parametrize("module", [sys.modules["tqdm"], None], ids=["tqdm", "no tqdm"])
def test_what_is_announced_is_a_line(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", module)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    announce("running the plan")
    assert stream.getvalue() == "syncline: running the plan\n"


def test_what_is_announced_goes_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with tqdm(total=4, file=stream, ncols=40, initial=1):
        announce("running the plan")
    bar, cleared, said, *_ = stream.getvalue().lstrip("\r").split("\r")
    assert (cleared.strip(), said) == ("", "syncline: running the plan\n")
    assert stream.getvalue().count(bar) > 1  # it is shown again
