"""On CUDA every access is ordered by an event: of the engine, the hooks and the deferral.

There is no GPU here: :mod:`tests.streams` stands in for its streams and records who may be ahead of
whom. That it would find a wait that is missing is shown by leaving out each one in turn.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from syncline.torch_private import without_torch_function
from tests.cases import first_few
from tests.streams import recorded_streams
from tests.timeouts import DEADLINE_S
from tests.train.engine import stream_jobs
from tests.train.overlap.features import features
from tests.train.overlap.overlap_plans import Style
from tests.workers import WorkerPool

ROWS = [
    "SGD, momentum, weight decay",
    "Adam, foreach",
    "`clip_grad_norm_`",
    "gradient accumulation without `no_sync`",
    "parameters read in every way after `step`",
]
STYLES = {
    "messages": Style(),
    "decoupled": Style(decoupled=True, order="7", piece_elements=77, in_flight=3),
    "norms": Style(decoupled=True, norm="2"),
}
LENGTH = 11
SHORT = 6  # steps of which the engine runs three


@pytest.mark.parametrize("case", [*first_few(ROWS, 2), *first_few(STYLES)])
def test_everything_is_ordered(workers: WorkerPool, case: str) -> None:
    row, style = None, STYLES.get(case)
    if style is None:
        row, style = case, Style(norm=features()[case].norm)
    for found in workers.run(stream_jobs.on_streams, 2, row, style, LENGTH):
        assert found["races"] == []
        assert found["differences"] == []


@pytest.mark.parametrize("style", first_few(["norms", "messages"], 0))
def test_every_wait_is_needed(workers: WorkerPool, style: str) -> None:
    """Each that the script comes to is left out in turn."""
    for unnoticed in workers.run(stream_jobs.unnoticed, 2, STYLES[style], SHORT):
        assert unnoticed == []


# ---------------------------------------------------------------------- the stand-in itself


@pytest.mark.parametrize("handed", [False, True])
def test_memory_that_is_reused_too_early_is_a_race(handed: bool) -> None:
    with recorded_streams() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = torch.ones(4)
        current = torch.cuda.current_stream()
        current.wait_stream(side)
        made.mul_(2)
        if handed:
            made.record_stream(current)
        del made
    assert bool(recorder.races) != handed


def test_a_number_that_the_host_reads_is_waited_for() -> None:
    with recorded_streams() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = torch.ones(4)
            here = torch.empty_like(made, pin_memory=True)
            here.copy_(made, non_blocking=True)
        here.tolist()
        assert recorder.races
        assert "read of the host" in recorder.races[0]
        recorder.races.clear()
        side.synchronize()
        here.tolist()
        assert recorder.races == []


def test_a_read_that_waits_for_another_thread_lets_it_be_recorded() -> None:
    """As a parameter whose update is deferred waits for the engine's threads."""

    class Pending(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(DEADLINE_S)
            ended.append(not thread.is_alive())
            with without_torch_function():
                return func(*args, **(kwargs or {}))

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(4).mul_(2)

    ended: list[bool] = []
    with recorded_streams() as recorder:
        assert torch.ones(2).as_subclass(Pending).tolist() == [1, 1]
        assert ended == [True]
        assert recorder.races == []
