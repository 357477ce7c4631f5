"""Calls that wait for due updates: when they are made, and what they see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from syncline.parallel.pending import is_pending, release, suspend
from syncline.parallel.postponed import Postponed, after_updates, postpone_averages


class Owner:
    """Makes the updates of a module's parameters: adds one."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.calls: list[Postponed] = []

    def suspend(self) -> None:
        for index, parameter in enumerate(self.parameters):
            suspend(parameter, self, index)  # type: ignore[arg-type] - no gradients are pending

    def postpone(self, call: Postponed) -> None:
        self.calls.append(call)

    def flush(self) -> None:
        for parameter in filter(is_pending, self.parameters):
            release(parameter)
            with torch.no_grad():
                parameter.add_(1)
        calls, self.calls = self.calls, []
        for call in calls:
            call.make()

    def read_parameters(self, indices: list[int]) -> None:  # noqa: ARG002 - all of them
        self.flush()


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.fixture
def owner(module: nn.Module) -> Owner:
    return Owner(module)


READS: dict[str, Callable[[AveragedModel], Any]] = {
    "forward pass": lambda mean: mean(torch.ones(4, 2)),
    "state_dict": lambda mean: mean.state_dict()["module.0.weight"].clone(),
    "deepcopy": lambda mean: copy.deepcopy(mean).module[0].weight,
    "count": lambda mean: int(mean.n_averaged),
    "a write": lambda mean: mean.module[0].weight.data.zero_(),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_an_average_is_made_when_it_is_read(
    module: nn.Module, owner: Owner, read: Callable[[AveragedModel], Any]
) -> None:
    postpone_averages()
    mean, at_once = AveragedModel(module), AveragedModel(module)
    owner.suspend()
    mean.update_parameters(module)
    assert len(owner.calls) == 1
    assert all(map(is_pending, [*mean.parameters(), *mean.buffers()]))
    found = read(mean)
    assert not owner.calls
    assert not any(map(is_pending, [*module.parameters(), *mean.parameters(), *mean.buffers()]))
    at_once.update_parameters(module)
    expected = read(at_once)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def test_nothing_pending_is_averaged_at_once(module: nn.Module) -> None:
    postpone_averages()
    mean = AveragedModel(module)
    mean.update_parameters(module)
    assert int(mean.n_averaged) == 1


def test_a_call_sees_buffers_and_switches_as_they_were(module: nn.Module, owner: Owner) -> None:
    seen: list[Any] = []
    owner.suspend()

    def call() -> None:
        seen.append((float(module[1].running_mean[0]), torch.is_grad_enabled()))  # type: ignore[index]

    after_updates(call, module, [])
    module[1].running_mean.fill_(7.0)  # type: ignore[index, union-attr]
    with torch.no_grad():
        owner.flush()
    assert seen == [(0.0, True)]
    assert float(module[1].running_mean[0]) == 7.0  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("why", ["written twice", "a class of its own", "scripted", "two owners"])
def test_what_cannot_wait_is_called_at_once(module: nn.Module, owner: Owner, why: str) -> None:
    class Own(torch.Tensor):
        pass

    owner.suspend()
    written = torch.zeros(2)
    if why == "written twice":
        after_updates(lambda: None, module, [written])
    elif why == "a class of its own":
        written = written.as_subclass(Own)
    elif why == "scripted":
        module.append(torch.jit.script(nn.Linear(3, 3)))  # type: ignore[operator]
    else:
        other = nn.Linear(2, 2)
        Owner(other).suspend()
        module.append(other)  # type: ignore[operator]
    after_updates(lambda: written.add_(1), module, [written])
    assert written.tolist() == [1.0, 1.0]


def test_an_error_of_the_call_leaves_everything_as_it_was(module: nn.Module, owner: Owner) -> None:
    def call() -> None:
        raise ValueError("no")

    buffers = list(module.buffers())
    written = torch.zeros(2)
    owner.suspend()
    after_updates(call, module, [written])
    with pytest.raises(ValueError, match="no"):
        written.sum()
    assert not is_pending(written)
    assert [id(b) for b in module.buffers()] == [id(b) for b in buffers]
