"""An optimizer that takes its time, whole or parameter by parameter."""

from __future__ import annotations

import copy

import torch

from syncline.lab.replay.model import Replayed, ReplayedOptimizer
from tests.lab.replay.examples import layers
from tests.lab.replay.fake import FakeTime

MS = 1_000_000


def trained() -> tuple[Replayed, ReplayedOptimizer]:
    module = Replayed(layers(), FakeTime().clock())
    optimizer = module.optimizer()
    module().backward()
    return module, optimizer


def test_a_step_takes_the_profiles_update_and_changes_nothing() -> None:
    module, optimizer = trained()
    before_ns = module.clock.free_ns()
    optimizer.step()
    assert module.clock.free_ns() - before_ns == 4 * MS
    assert all(not parameter.any() for parameter in module.parameters())
    assert not optimizer.state


def test_stepping_some_parameters_takes_their_share_by_bytes() -> None:
    module, optimizer = trained()
    module()  # a gate asks in the next forward pass
    before_ns = module.clock.free_ns()
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[0], "params": [module.b.weight, module.b.bias]}]
    type(optimizer).step(optimizer)
    optimizer.param_groups = groups
    assert module.clock.free_ns() - before_ns == 4 * MS * (20 + 30) // 100


def test_what_has_no_gradient_takes_no_time() -> None:
    module, optimizer = trained()
    optimizer.step()
    before_ns = module.clock.free_ns()
    optimizer.zero_grad()
    optimizer.step()
    assert module.clock.free_ns() == before_ns


def test_a_closure_is_called_with_gradients() -> None:
    _, optimizer = trained()

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 7.0

    assert optimizer.step(closure) == 7.0


def test_groups_carry_the_device_to_other_optimizers() -> None:
    module, optimizer = trained()
    other = ReplayedOptimizer(optimizer.param_groups)
    settings = copy.deepcopy({k: v for k, v in other.param_groups[0].items() if k != "params"})
    assert settings["work"] is module.work
    before_ns = module.clock.free_ns()
    other.step()
    assert module.clock.free_ns() - before_ns == 4 * MS


def test_it_holds_no_tensor() -> None:
    _, optimizer = trained()
    assert not any(isinstance(value, torch.Tensor) for value in vars(optimizer).values())
