"""The replayed module hands out gradients when the profile says, and calls owners on need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import nn

from syncline.lab.replay.model import Replayed, gradient_value
from syncline.plan.profile import Profile
from tests import strategies as some
from tests.lab.replay.examples import layers
from tests.lab.replay.fake import FakeTime

MS = 1_000_000


def observed(module: Replayed, fake: FakeTime) -> tuple[list[tuple[str, int]], list[str]]:
    """Run an iteration; return when each gradient was accumulated, and which owners were called."""
    seen: list[tuple[str, int]] = []
    called: list[str] = []
    began_ns = fake.now_ns

    def note(name: str) -> Callable[[nn.Parameter], None]:
        return lambda _: seen.append((name, (fake.now_ns - began_ns) // MS))

    handles = [
        parameter.register_post_accumulate_grad_hook(note(name))
        for name, parameter in module.named_parameters()
    ]
    handles += [
        owner.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, owner in module.named_modules()
        if list(owner.parameters(recurse=False))
    ]
    module().backward()
    for handle in handles:
        handle.remove()
    return seen, called


def test_gradients_become_ready_in_order_and_in_time() -> None:
    fake = FakeTime()
    module = Replayed(layers(), fake.clock())
    seen, called = observed(module, fake)
    assert seen == [("c.weight", 50), ("b.weight", 70), ("b.bias", 70), ("a.weight", 90)]
    assert called == ["a", "b", "c"]
    assert fake.now_ns == 1_000 + 93 * MS


def test_gradients_may_become_ready_in_another_order_than_modules_are_called() -> None:
    fake = FakeTime()
    module = Replayed(layers(need=(1, 0, 2, None)), fake.clock())
    seen, called = observed(module, fake)
    assert seen == [("c.weight", 50), ("b.weight", 70), ("b.bias", 70), ("a.weight", 90)]
    # What nothing needs is used at the end; then all are called to chain the backward pass.
    assert list(dict.fromkeys(called)) == ["b", "c", "a"]


def test_values_differ_by_rank_and_iteration_and_have_the_gradients_type() -> None:
    dtypes = ("bfloat16", "float16", "float64", "complex64")
    module = Replayed(layers(dtypes=dtypes), FakeTime().clock(), rank=3)
    for iteration in range(2):
        module.zero_grad()
        module().backward()
        for index, gradient in enumerate(module.profile.gradients):
            parameter = module.get_parameter(gradient.name)
            assert parameter.grad is not None
            assert parameter.grad.dtype == getattr(torch, dtypes[index])
            assert parameter.grad.shape == (gradient.elements,)
            value = gradient_value(3, iteration, index)
            assert torch.equal(parameter.grad, torch.full_like(parameter.grad, value))


def test_gradients_are_memory_of_their_own() -> None:
    module = Replayed(layers(), FakeTime().clock())
    module().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(grad.is_contiguous() for grad in grads)
    assert len({grad.data_ptr() for grad in grads}) == len(grads) == 4


def test_a_large_gradient_is_always_made_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("syncline.lab.replay.model.RECYCLED_BYTES", 0)
    model = Replayed(layers(), FakeTime().clock())
    places = []
    for iteration in range(2):
        model.zero_grad()
        model().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        places.append([grad.data_ptr() for grad in grads])
        for index, gradient in enumerate(model.profile.gradients):
            grad = model.get_parameter(gradient.name).grad
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, gradient_value(0, iteration, index)))
    assert places[0] == places[1]
    assert len(set(places[0])) == 4


def test_shapes_can_be_given() -> None:
    module = Replayed(layers(), FakeTime().clock(), shapes={"c.weight": (5, 2)})
    module().backward()
    assert module.c.weight.shape == (5, 2)
    assert module.c.weight.grad.shape == (5, 2)


def test_a_shape_must_have_the_gradients_elements() -> None:
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
    module = Replayed(layers(ready=(1, 4, 4, 5)), fake.clock())
    seen, _ = observed(module, fake)
    assert seen[0] == ("c.weight", 30)
