"""What goes on being checked of an optimizer that has passed its trial."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.train.overlap import probe_parameters
from syncline.train.overlap.probe_parameters import StepCheck, kind_of
from tests.train.overlap.own_optimizers import Clipped, Custom, Signs


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(shape)) for shape in ((5, 4), (4,), (6, 5), (6,))]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def step_until_refused(optimizer: torch.optim.Optimizer, check: StepCheck, most: int) -> int | None:
    for number in range(most):
        if check.why_not() is not None:
            return number
        optimizer.step()
    return None


@pytest.mark.parametrize("before", [0, 3])
def test_a_coupling_is_seen_before_the_step_in_which_it_begins(before: int) -> None:
    optimizer = Clipped(parameters(), warm_up=7)
    for _ in range(before):
        optimizer.step()
    assert step_until_refused(optimizer, StepCheck(optimizer), 20) == 7 - before


def test_steps_that_were_not_checked_are_counted() -> None:
    optimizer = Clipped(parameters(), warm_up=7)
    check = StepCheck(optimizer)
    assert step_until_refused(optimizer, check, 2) is None
    optimizer.step()
    check.skip()
    assert step_until_refused(optimizer, check, 20) == 4


def test_nothing_couples_and_nothing_is_changed() -> None:
    optimizer = Signs(parameters())
    optimizer.step()
    check = StepCheck(optimizer)
    before = copy.deepcopy([optimizer.state_dict(), optimizer.param_groups])
    random = torch.get_rng_state()
    assert [check.why_not() for _ in range(20)] == [None] * 20
    assert torch.equal(random, torch.get_rng_state())
    after = [optimizer.state_dict(), optimizer.param_groups]
    assert probe_parameters.same(before, after)


def test_an_optimizer_without_state_stays_separable() -> None:
    optimizer = Custom(parameters())
    assert step_until_refused(optimizer, StepCheck(optimizer), 3 * probe_parameters.CYCLE) is None
    assert not optimizer.state


def test_a_state_without_a_corner_is_left_out() -> None:
    class Flat(Custom):
        """Keeps a flat state, whose corner does not fit the corner of a matrix."""

        def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
            mean = self.state[p].setdefault("mean", torch.zeros(p.numel()))
            p.sub_(mean.lerp_(p.grad.flatten(), 0.1).view(p.shape), alpha=group["lr"])

    optimizer = Flat(parameters())
    optimizer.step()
    check = StepCheck(optimizer)
    assert [check.why_not() for _ in range(3)] == [None] * 3


def test_a_step_that_fails_on_probe_parameters_is_refused_with_its_error() -> None:
    optimizer = Signs(parameters())
    optimizer.param_groups[0]["lr"] = None
    found = StepCheck(optimizer).why_not()
    assert found is not None
    assert found.startswith("its step failed on a small example (TypeError: ")


def test_a_trial_for_each_kind_of_settings() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=0.0)
    check, made = StepCheck(optimizer), list[int]()
    check.why_inseparable = lambda: made.append(1)
    group = optimizer.param_groups[0]

    def tried(**settings: Any) -> int:
        group.update(settings)
        before = len(made)
        assert check.why_not() is None
        return len(made) - before

    assert tried() == 0
    assert tried(lr=1e-3) == 1  # a warm-up begins
    assert sum(tried(lr=0.1 * rate, betas=(0.9 - 0.01 * rate, 0.99)) for rate in range(1, 9)) == 0
    assert tried(lr=0.0) == 0  # seen before
    assert tried(lr=0.1, amsgrad=True) == 1
    assert tried(max_norm=None) == 1
    assert tried(max_norm=1.0) == 1
    assert tried(max_norm=math.inf) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))]})
    assert tried() == 1
    optimizer.mode = "other"  # type: ignore[attr-defined]
    assert tried() == 1
    made_for_labels = sum(tried(label=f"step {number}") for number in range(100))
    assert made_for_labels < probe_parameters.MOST_TRIALS


KINDS: list[tuple[Any, Any, bool]] = [
    (0.1, 0.2, True),
    (0.0, 0.2, False),
    (-1.0, 0.2, False),
    (math.inf, 0.2, False),
    (1, 1.0, False),
    (False, True, False),
    (False, 0, False),
    (None, 0.0, False),
    ("a", "b", False),
    ((0.9, 0.99), (0.8, 0.95), True),
    ((0.9, 0.99), (0.9, 0.0), False),
    ((0.9,), [0.9], False),
    ({"a": 1}, {"a": 2}, True),
    ({"a": 1}, {"b": 1}, False),
    (torch.zeros(2), torch.ones(2), True),
    (torch.zeros(2), torch.zeros(3), False),
    (list(range(99)), list(range(1, 100)), True),
    (max, min, False),
]


@pytest.mark.parametrize(("one", "other", "alike"), KINDS)
def test_kinds(one: Any, other: Any, alike: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is alike
    assert hash(kind_of(one)) == hash(kind_of(copy.copy(one)))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_torchs_own_classes_are_not_stepped(
    make: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(probe_parameters, "ProbeParameters", never)
    assert StepCheck(make(parameters())).why_not() is None

    class Derived(make):  # type: ignore[misc, valid-type]
        pass

    found = StepCheck(Derived(parameters())).why_not()
    assert found == "its step failed on a small example (AssertionError)"
