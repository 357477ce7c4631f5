"""Tests of ``syncline.train.measure.observer``; what it sees is tested with the profiler."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Observer


@pytest.mark.parametrize("when", ["in forward", "before backward", "after the step"])
def test_an_observer_that_is_dropped_leaves_nothing(when: str) -> None:
    """A global hook, or one on a node of autograd, must not keep it and its module alive."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters())
    observer = Observer(net, dict(net.named_parameters()), CpuClock())
    observer.attach()
    observer.detail = True
    observer.begin()
    output = net(torch.ones(1, 2))
    if when != "in forward":
        observer.output(output)
    if when == "after the step":
        output.sum().backward()
        optimizer.step()
    gone = weakref.ref(observer)
    del observer
    gc.collect()
    assert gone() is None
    hooks = [h for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    assert not any(hooks)
    if when != "after the step":
        output.sum().backward()
    optimizer.step()
    gone_net = weakref.ref(net)
    del net, optimizer, output
    gc.collect()
    assert gone_net() is None
