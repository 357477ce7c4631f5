"""Tests of ``syncline.train.measure.step_hooks``."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from syncline.train.measure.step_hooks import StepHooks


class Watch:
    def __init__(self, changed: Any = None) -> None:
        self.steps = 0
        self._changed = changed

    def note(self, _: torch.optim.Optimizer, *given: Any) -> Any:
        self.steps += 1
        self.given = given
        return self._changed


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def test_nothing_is_registered_but_while_it_is_needed() -> None:
    hooks, before = StepHooks(register_optimizer_step_pre_hook), len(_global_optimizer_pre_hooks)
    one, other = Watch(), Watch()
    for watch in (one, other):
        hooks.add(watch.note)
    optimizer().step()
    assert len(_global_optimizer_pre_hooks) == before + 1
    hooks.remove(one.note)
    optimizer().step()
    hooks.remove(other.note)
    assert len(_global_optimizer_pre_hooks) == before
    assert (one.steps, other.steps) == (1, 2)


def test_who_is_dropped_in_the_midst_of_a_step_is_not_called_any_more() -> None:
    hooks, before = StepHooks(register_optimizer_step_pre_hook), len(_global_optimizer_pre_hooks)
    called: list[str] = []

    class Listed:
        def __init__(self, name: str) -> None:
            self.name = name

        def note(self, *_: Any) -> None:
            called.append(self.name)

    held, stays = [Listed("first"), Listed("dropped")], Watch()

    class Drops:
        def note(self, *_: Any) -> None:
            held.clear()
            gc.collect()

    drops = Drops()
    for method in (held[0].note, drops.note, held[1].note, stays.note):
        hooks.add(method)
    optimizer().step()
    optimizer().step()
    assert (called, stays.steps) == (["first"], 2)
    hooks.remove(drops.note)
    hooks.remove(stays.note)
    assert len(_global_optimizer_pre_hooks) == before


def test_changed_arguments_reach_the_next_and_the_step() -> None:
    hooks = StepHooks(register_optimizer_step_pre_hook)
    stepped = optimizer()
    called: list[str] = []
    first = Watch(changed=((stepped,), {"closure": lambda: called.append("closure")}))
    second = Watch()
    for watch in (first, second):
        hooks.add(watch.note)
    stepped.step()
    assert second.given[1].keys() == {"closure"}
    assert called == ["closure"]
    for watch in (first, second):
        hooks.remove(watch.note)
