"""Progress is a live line on a terminal and one line an epoch elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from syncline.lab.training.progress import Snapshot, TrainingProgress
from syncline.train.log import announce, logger

NOW = Snapshot(
    epoch=2,
    epochs=5,
    step=20,
    steps=50,
    loss=0.51234,
    samples_per_s=1234.5,
    exposed_s=0.0012,
    phase="profiling",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_an_epoch() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(stream)
    progress.step(NOW)
    progress.epoch(NOW, {"test accuracy": 0.5})
    progress.close()
    assert stream.getvalue() == (
        "epoch 2/5  step 20  test accuracy 0.5  loss 0.5123  1234 samples/s  exposed 1.2 ms  "
        "profiling\n"
    )


def test_a_terminal_gets_a_live_line_and_its_cursor_back() -> None:
    stream = Terminal()
    progress = TrainingProgress(stream)
    progress.step(NOW)
    progress._progress.refresh()
    progress.epoch(NOW, {"test accuracy": 0.5})
    progress.close()
    shown = stream.getvalue()
    assert "2/5" in shown
    assert "1234 samples/s" in shown
    assert "profiling  loss" in shown  # first what is not to be cut
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_what_the_wrapper_announces_goes_above_the_live_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)  # pytest has some
    progress = TrainingProgress(sys.stderr)
    announce("measuring [red]")
    progress.close()
    assert stream.getvalue().count("\x1b[2Ksyncline: measuring [red]\n") == 1
    assert sys.stderr is stream


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress()
    progress.step(NOW)
    progress.epoch(NOW, {"test accuracy": 0.5})
    progress.close()
    assert capfd.readouterr() == ("", "")
