"""Stepping ahead with residuals: by itself, and through DDP's hook."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing import assert_close

from syncline.hooks import Recipe
from syncline.train.sparse.ahead import StepAhead
from syncline.train.sparse.memory import HostMemory
from syncline.train.sparse.residuals import Residuals
from tests.train.sparse import jobs
from tests.train.sparse.jobs import assert_alike, assert_same_bits, weights_of
from tests.workers import WorkerPool

Weights = dict[str, torch.Tensor]


class Stepping:
    """A model on one of two ranks that steps ahead, by residuals of its weights but not biases."""

    def __init__(self, momentum: float = 0.0, names: tuple[str, ...] = ()) -> None:
        torch.manual_seed(7)
        convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.net = nn.Sequential(convolution, nn.Flatten(), nn.Linear(288, 4))
        self.true = weights_of(self.net)
        named = dict(self.net.named_parameters())
        recipe = Recipe(density=0.05, dense_names=("*.bias",))
        elements = {name: p.numel() for name, p in named.items()}
        self.residuals = Residuals(recipe, elements, HostMemory())
        self.expected = {name: values.clone() for name, values in self.true.items()}
        for name in ("0.weight", "2.weight"):
            residual, weight = self.residuals.of(name).normal_(), self.expected[name]
            part = residual.as_strided(weight.shape, weight.stride())
            weight -= 0.1 / (1 - momentum) / 2 * part
        updated = [named[name] for name in names or named]
        self.optimizer = SGD(updated, lr=0.1, momentum=momentum)
        self.ahead: StepAhead | None = StepAhead(
            self.net, named, self.optimizer, self.residuals, ranks=2, synchronize=lambda: None
        )

    def loss(self) -> torch.Tensor:
        return self.net.train()(torch.randn(6, 3, 8, 8)).square().mean()

    @property
    def weights(self) -> Weights:
        return weights_of(self.net)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_weights_are_ahead_by_the_residuals(momentum: float) -> None:
    """As far as with the learning rate that they belong to, and once."""
    model = Stepping(momentum)
    for rate in (0.1, 0.1, 0.05, 0.2):
        model.optimizer.param_groups[0]["lr"] = rate
        for _ in range(2):
            model.loss()
            assert_close(model.weights, model.expected, rtol=0, atol=1e-6)
        model.residuals.changes += 1


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda model: model.net.state_dict(), id="is saved"),
        pytest.param(lambda model: model.net.eval()(torch.zeros(1, 3, 8, 8)), id="is judged"),
        pytest.param(torch.no_grad()(Stepping.loss), id="needs no gradient"),
        pytest.param(lambda model: model.optimizer.step(), id="is updated"),
    ],
)
def test_weights_are_where_they_belong_when_the_model(act: Callable[[Stepping], object]) -> None:
    model = Stepping()
    model.loss()
    ahead = model.weights
    act(model)
    assert_same_bits(model.weights, model.true)
    model.loss()
    assert_same_bits(model.weights, ahead)


def test_weights_that_are_loaded_meanwhile_stay() -> None:
    model = Stepping()
    model.loss()
    other = {name: values + 1 for name, values in model.true.items()}
    model.net.load_state_dict(other)
    model.loss()
    assert_same_bits(model.net.state_dict(), other)


@pytest.mark.parametrize("by", ["its optimizer", "a closure", "another optimizer"])
def test_an_update_is_made_where_the_weights_belong(by: str) -> None:
    model = Stepping()
    stepping, updated = model.optimizer, [*model.net.parameters()]
    if by == "another optimizer":  # of a parameter that is no model's, and some of the model's
        updated = updated[2:]
        stepping = SGD([nn.Parameter(torch.zeros(1)), *updated], lr=0.1)

    def closure() -> float:
        loss = model.loss()
        loss.backward()
        return loss.item()

    if by == "a closure":
        stepping.step(closure)
    else:
        closure()
        stepping.step()
    expected = model.true
    for name, parameter in model.net.named_parameters():
        if any(parameter is each for each in updated):
            expected[name] = expected[name] - 0.1 * parameter.grad
    assert_close(model.weights, expected, rtol=0, atol=1e-7)


def test_a_parameter_may_join_while_others_are_ahead() -> None:
    model = Stepping(names=("0.weight",))
    model.loss()
    found = model.weights
    assert_close(found["0.weight"], model.expected["0.weight"], rtol=0, atol=1e-6)
    assert found["2.weight"].equal(model.true["2.weight"])
    model.optimizer.add_param_group({"params": [model.net[2].weight]})
    assert_same_bits(model.net.state_dict(), model.true)
    model.loss()
    assert_close(model.weights, model.expected, rtol=0, atol=1e-6)
    assert_same_bits(model.net.state_dict(), model.true)


def test_copies_do_not_step_ahead() -> None:
    model = Stepping()
    model.loss()
    for each in (pickle.loads(pickle.dumps(model.net)), copy.deepcopy(model.net)):
        before = weights_of(each)
        each(torch.randn(6, 3, 8, 8))
        assert_same_bits(weights_of(each), before)


def test_it_ends_with_its_owner() -> None:
    """In the midst of another optimizer's step, where torch goes through the hooks on all steps."""
    model = Stepping()
    model.loss()
    gone = weakref.ref(model.ahead)

    def let_go(*_: Any) -> None:
        model.ahead = None
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (let_go, lambda *_: None)]
    SGD([nn.Parameter(torch.zeros(1))]).step()
    for handle in handles:
        handle.remove()
    assert gone() is None
    assert_same_bits(model.weights, model.true)
    hooks = "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"
    assert not any(getattr(model.net, name) for name in hooks)


# Through the hook.


def test_ranks_are_ahead_by_what_they_keep(workers: WorkerPool) -> None:
    for found, expected in workers.run(jobs.moved_ahead, 2):
        assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_what_waits_is_not_asked_for_again(workers: WorkerPool) -> None:
    assert max(workers.run(jobs.overshoots, 2, True)) < 0.01
    assert max(workers.run(jobs.overshoots, 2, False)) > 1


def test_with_nothing_left_over_nothing_changes(workers: WorkerPool) -> None:
    recipe = {"density": 1.0}
    plainly = workers.run(jobs.hooked, 2, recipe, 4)
    assert_same_bits(workers.run(jobs.hooked, 2, recipe, 4, {"ahead": True}), plainly)


def test_a_checkpoint_goes_on_bit_for_bit(workers: WorkerPool) -> None:
    pairs = workers.run(jobs.resumed, 2, {"density": 0.05, "momentum": 0.9}, True)
    for whole, found in pairs:
        assert_same_bits(found, whole)
    assert_alike([whole for whole, _ in pairs])


def test_one_that_steps_ahead_alone_is_told(workers: WorkerPool) -> None:
    """Or dropped sums could wait on no rank, or on two."""
    for found in workers.run(jobs.one_ahead_alone, 2):
        assert "MismatchError" in found
        assert "let all step ahead or none" in found


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("adam", "UserError: step_ahead needs torch.optim.SGD, for which it is known where"),
        ("dampening", "UserError: step_ahead knows SGD that descends without dampening, with a"),
        ("ascent", "dampening=0 and maximize=True"),
        ("momentum", "group 0 has momentum=1.0, "),
        ("all dense", "UserError: step_ahead is for what sparse exchange leaves behind; this"),
        ("other model", "UserError: step_ahead: the optimizer updates no parameter that is exch"),
        ("twice", "not stepped ahead with yet; give each optimizer of this model once"),
    ],
)
def test_other_optimizers_are_refused(workers: WorkerPool, case: str, said: str) -> None:
    for found in workers.run(jobs.ahead_refusals, 2, case):
        assert said in found
