"""An optimizer's state that waits."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from syncline.train.overlap.pending import PendingState


class Guarded:
    """An optimizer with a pending state, and how often that was settled."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1, momentum=0.9)
        self.settled = 0
        self.state = PendingState(self.optimizer, self.synchronize)

    def synchronize(self) -> None:
        self.settled += 1
        self.state.show()
        self.optimizer.state[self.parameter]["settled"] = self.settled


@pytest.fixture
def guarded() -> Guarded:
    made = Guarded()
    made.state.hide()
    return made


def test_reading_synchronizes_once(guarded: Guarded) -> None:
    assert guarded.optimizer.state[guarded.parameter]["settled"] == 1
    assert guarded.optimizer.state[guarded.parameter]["settled"] == 1
    assert guarded.settled == 1


def test_the_class_is_a_subclass_and_comes_back(guarded: Guarded) -> None:
    assert isinstance(guarded.optimizer, torch.optim.SGD)
    assert type(guarded.optimizer) is not torch.optim.SGD
    assert type(guarded.optimizer).__name__ == "SGD"
    assert len(guarded.optimizer.param_groups) == 1
    assert guarded.settled == 0
    guarded.state.show()
    assert type(guarded.optimizer) is torch.optim.SGD


def test_replacing_synchronizes_first(guarded: Guarded) -> None:
    guarded.optimizer.state = defaultdict(dict)
    assert guarded.settled == 1
    assert not guarded.optimizer.state
    guarded.state.hide()
    del guarded.optimizer.state
    assert guarded.settled == 2
    assert "state" not in vars(guarded.optimizer)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), lambda o: o.state_dict()],
    ids=["copy", "pickle", "state_dict"],
)
def test_copies_have_what_was_settled(guarded: Guarded, copied) -> None:
    found = copied(guarded.optimizer)
    assert guarded.settled == 1
    state = found["state"] if isinstance(found, dict) else found.state
    assert next(iter(state.values()))["settled"] == 1
    assert isinstance(found, dict) or type(found) is torch.optim.SGD


def test_a_step_sees_its_own_groups_and_other_threads_the_real_ones(guarded: Guarded) -> None:
    optimizer, real = guarded.optimizer, guarded.optimizer.param_groups
    state = vars(optimizer)["state"].real
    part = [{**real[0], "params": []}]
    with guarded.state.stepping(part), ThreadPoolExecutor(1) as pool:
        assert optimizer.param_groups is part
        assert optimizer.state is state
        assert guarded.settled == 0
        assert pool.submit(lambda: optimizer.param_groups).result() is real
    assert optimizer.param_groups is real
    assert guarded.settled == 0
