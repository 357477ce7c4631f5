"""Hooks that note an iteration, and what is left of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from syncline.measure.clock import CpuClock
from syncline.measure.observer import Moment, Observer


def attached(net: nn.Module) -> Observer:
    observer = Observer(net, dict(net.named_parameters()), CpuClock())
    observer.attach()
    return observer


def iterate(net: nn.Module, observer: Observer | None = None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    output = net(torch.ones(2, 3))
    if observer is not None:
        observer.output(output)
    output.sum().backward()
    optimizer.step()


def hooks_left(net: nn.Module) -> int:
    of_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules())
    of_optimizers = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return of_modules + sum(
        str(getattr(hook, "__module__", "")) == Observer.__module__
        for hooks in of_optimizers
        for hook in hooks.values()
    )


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def test_an_iteration_is_noted_in_order() -> None:
    net = network()
    observer = attached(net)
    observer.detail = True
    observer.begin()
    iterate(net, observer)
    finished = observer.begin()
    observer.detach()
    assert finished is not None
    assert finished.graph is not None
    moments = [event.moment for event in finished.events]
    assert moments[0] is Moment.FORWARD
    assert moments[-2:] == [Moment.STEP, Moment.STEPPED]
    assert [e.key for e in finished.events if e.moment is Moment.ENTER] == ["0", "1", "2"]
    ready = [e.key for e in finished.events if e.moment is Moment.READY]
    assert sorted(ready) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert moments.count(Moment.NODE) == len(finished.graph.nodes)


def test_a_step_of_another_models_optimizer_is_not_noted() -> None:
    net = network()
    observer = attached(net)
    observer.begin()
    observer.output(net(torch.ones(2, 3)))
    iterate(network())
    finished = observer.begin()
    observer.detach()
    assert finished is not None
    assert Moment.STEP not in {event.moment for event in finished.events}


@pytest.mark.parametrize("detail", [False, True])
def test_nothing_is_left_of_one_that_is_dropped(detail: bool) -> None:
    net = network()
    before = hooks_left(net)
    observer = attached(net)
    observer.detail = detail
    observer.begin()
    output = net(torch.ones(2, 3))
    observer.output(output)
    assert hooks_left(net) > before
    dropped = weakref.ref(observer)
    del observer
    gc.collect()
    assert dropped() is None
    assert hooks_left(net) == before
    output.sum().backward()  # its graph has hooks still
    iterate(net)


def test_one_that_is_attached_does_not_keep_the_model() -> None:
    net = network()
    observer = attached(net)
    observer.begin()
    iterate(net, observer)
    parameter = weakref.ref(net[0].weight)
    del net, observer
    gc.collect()
    assert parameter() is None
