"""The replayed module: when gradients are ready, what updating takes, and names for torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.lab.replay import model
from syncline.lab.replay.model import Replayed, ReplayedOptimizer, gradient_value, module_names
from syncline.plan.profile import Gradient, Profile
from tests import strategies as some
from tests.lab.replay.examples import layers
from tests.lab.replay.fake import FakeTime
from tests.plan.documents import PLAN

MS = 1_000_000


def observed(module: Replayed, fake: FakeTime) -> tuple[list[tuple[str, int]], list[str]]:
    """Run an iteration; return when each gradient was accumulated, and which owners were called."""
    seen: list[tuple[str, int]] = []
    called: list[str] = []
    began_ns = fake.now_ns

    def note(name: str) -> Callable[[nn.Parameter], None]:
        return lambda _: seen.append((name, (fake.now_ns - began_ns) // MS))

    named = module.named_parameters()
    handles = [each.register_post_accumulate_grad_hook(note(name)) for name, each in named]
    handles += [
        owner.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, owner in module.named_modules()
        if list(owner.parameters(recurse=False))
    ]
    module().backward()
    for handle in handles:
        handle.remove()
    return seen, called


def replayed(**changes: Any) -> Replayed:
    return Replayed(layers(**changes), FakeTime().clock())


@pytest.mark.parametrize(
    ("need", "order"),
    # What nothing needs is used at the end; then all are called to chain the backward pass.
    [((2, 1, 1, 0), ["a", "b", "c"]), ((1, 0, 2, None), ["b", "c", "a"])],
)
def test_gradients_come_in_order_in_time(need: tuple[int | None, ...], order: list[str]) -> None:
    fake = FakeTime()
    module = Replayed(layers(need=need), fake.clock())
    seen, called = observed(module, fake)
    assert seen == [("c.weight", 50), ("b.weight", 70), ("b.bias", 70), ("a.weight", 90)]
    assert list(dict.fromkeys(called)) == order
    assert None in need or called == order
    assert fake.now_ns == 1_000 + 93 * MS


def test_values_differ_by_rank_and_iteration_and_have_the_gradients_type() -> None:
    dtypes = ("bfloat16", "float16", "float64", "complex64")
    module = Replayed(layers(dtypes=dtypes), FakeTime().clock(), rank=3)
    for iteration in range(2):
        module.zero_grad()
        module().backward()
        for index, gradient in enumerate(module.profile.gradients):
            found = module.get_parameter(gradient.name).grad
            value = gradient_value(3, iteration, index)
            expected = torch.full((gradient.elements,), value, dtype=getattr(torch, dtypes[index]))
            assert found is not None
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_gradients_are_memory_of_their_own() -> None:
    module = replayed()
    module().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(grad.is_contiguous() for grad in grads)
    assert len({grad.data_ptr() for grad in grads}) == len(grads) == 4


def test_a_large_gradient_is_made_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.lab.replay.model.RECYCLED_BYTES", 0)
    module = replayed()
    places = []
    for iteration in range(2):
        module.zero_grad()
        module().backward()
        grads = [module.get_parameter(g.name).grad for g in module.profile.gradients]
        places.append([grad.data_ptr() for grad in grads if grad is not None])
        for index, grad in enumerate(grads):
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, gradient_value(0, iteration, index)))
    assert places[0] == places[1]
    assert len(set(places[0])) == 4


def test_shapes_can_be_given() -> None:
    module = Replayed(layers(), FakeTime().clock(), shapes={"c.weight": (5, 2)})
    module().backward()
    assert module.c.weight.shape == module.c.weight.grad.shape == (5, 2)
    with pytest.raises(ValueError, match=r"'c.weight' has 10 elements.*\(3, 2\) has 6"):
        Replayed(layers(), FakeTime().clock(), shapes={"c.weight": (3, 2)})


@some.few
@given(profile=some.layer_profiles())
def test_any_profile_of_layers(profile: Profile) -> None:
    fake = FakeTime()
    module = Replayed(profile, fake.clock())
    seen, _ = observed(module, fake)
    assert [name for name, _ in seen] == [g.name for g in module.profile.gradients]


def test_a_gradient_that_forward_makes_is_ready_when_backward_begins() -> None:
    fake = FakeTime()
    seen, _ = observed(Replayed(layers(ready=(1, 4, 4, 5)), fake.clock()), fake)
    assert seen[0] == ("c.weight", 30)


def trained() -> tuple[Replayed, ReplayedOptimizer]:
    module = replayed()
    optimizer = module.optimizer()
    module().backward()
    return module, optimizer


def test_a_step_takes_the_profiles_update_and_changes_nothing() -> None:
    module, optimizer = trained()
    assert not any(isinstance(value, torch.Tensor) for value in vars(optimizer).values())
    before_ns = module.clock.free_ns()
    optimizer.step()
    assert module.clock.free_ns() - before_ns == 4 * MS
    assert all(not parameter.any() for parameter in module.parameters())
    assert not optimizer.state
    optimizer.zero_grad()
    optimizer.step()  # of what has no gradient
    assert module.clock.free_ns() - before_ns == 4 * MS


def test_stepping_some_parameters_takes_their_share_by_bytes() -> None:
    module, optimizer = trained()
    module()  # a gate asks in the next forward pass
    before_ns = module.clock.free_ns()
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[0], "params": [module.b.weight, module.b.bias]}]
    type(optimizer).step(optimizer)
    optimizer.param_groups = groups
    assert module.clock.free_ns() - before_ns == 4 * MS * (20 + 30) // 100


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


def module_of(names: list[str]) -> Replayed:
    profile = some.profile_of([0], [0])
    gradients = tuple(Gradient(name=name, elements=2, ready_after=1) for name in names)
    profile = msgspec.structs.replace(profile, gradients=gradients)
    return Replayed(profile, FakeTime().clock())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer4.2.conv3.weight", "layer4.2.conv3.weight"),
        ("encoder/block 7.kernel:0", "encoder/block 7.kernel:0"),
        ("\u00e4 <b>.\n", "\u00e4 <b>.\n"),
        ("conv1", "conv1.weight"),
        ("node23 Linear", "node23 Linear.weight"),
        ("a..b", "a._.b"),
        (".", "_._"),
        ("", "_.weight"),
        ("half.weight", "half_.weight"),
        ("net.training", "net.training_"),
        ("work.bias", "work_.bias"),
        ("_private.bias", "_private_.bias"),
    ],
)
def test_a_name_alone(name: str, expected: str) -> None:
    assert module_names([name]) == {name: expected}
    assert [n for n, _ in module_of([name]).named_parameters()] == [expected]


def test_a_name_gives_way_to_a_submodule_and_one_that_must_change_to_one_that_can_stay() -> None:
    assert module_names(["a.b", "a.b.c"]) == {"a.b": "a.b_", "a.b.c": "a.b.c"}
    expected = {"conv1": "conv1.weight_", "conv1.weight": "conv1.weight"}
    assert module_names(["conv1", "conv1.weight"]) == expected


PART = st.sampled_from(["a", "b", "", "_", "weight", "weight_", "half", "type", "0", "x y", "work"])
PATHS = st.lists(PART, min_size=1, max_size=4).map(".".join)


@some.many
@given(names=st.lists(PATHS | st.text(max_size=12), min_size=1, unique=True))
def test_torch_takes_every_name_and_keeps_it(names: list[str]) -> None:
    found = {name for name, _ in module_of(names).named_parameters()}
    assert found == set(module_names(names).values())
    assert len(found) == len(names)


def test_all_attributes_of_the_module_are_reserved() -> None:
    own = set(dir(module_of(["a.b"]))) - {"a"}
    assert {name for name in own if not name.startswith("_")} <= model.RESERVED
    assert {name for name in dir(nn.Module()) if not name.startswith("_")} <= model.RESERVED


def test_a_plan_follows() -> None:
    names = module_names(["fc", "conv.weight"])
    tensors = (msgspec.structs.replace(t, name=n) for t, n in zip(PLAN.tensors, names, strict=True))
    plan = msgspec.structs.replace(PLAN, tensors=tuple(tensors))
    renamed = model.renamed_plan(plan, names)
    assert [t.name for t in renamed.tensors] == ["fc.weight", "conv.weight"]
    assert renamed.messages == plan.messages
