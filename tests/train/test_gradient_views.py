"""Gradients that are views of buckets and keep DDP's promises, and hooks on gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from syncline.train.gradient_views import GradientViews
from syncline.train.measure.gradient_hooks import GradientHooks


class Bucket:
    """Two parameters and a reducer's bucket, and backward passes by hand."""

    def __init__(self, *, as_views: bool = False) -> None:
        self.parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        self.memory = torch.zeros(5)
        self.places = [self.memory[:2], self.memory[2:]]
        self.views = GradientViews(self.parameters, as_views=as_views)

    def backward(self, value: float, *, known: bool = True) -> None:
        """Accumulate ``value`` and let the exchange double it."""
        self.views.begin()
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += value
            if not self.views.take(index):
                self.places[index].copy_(parameter.grad)
                parameter.grad = self.places[index]
        self.memory.mul_(2)
        self.views.end(known=known)

    def gradients(self) -> list[list[float]]:
        return [p.grad.tolist() for p in self.parameters]

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@pytest.fixture
def bucket() -> Bucket:
    """A bucket after its first backward pass."""
    bucket = Bucket()
    bucket.backward(1)
    return bucket


def test_gradients_lie_in_the_bucket(bucket: Bucket) -> None:
    assert bucket.gradients() == [[2, 2], [2, 2, 2]]
    first = [p.grad for p in bucket.parameters]
    assert [g.data_ptr() for g in first] == [p.data_ptr() for p in bucket.places]
    bucket.backward(1)  # adds up, in the same tensors
    assert bucket.gradients() == [[6, 6], [6, 6, 6]]
    assert all(p.grad is g for p, g in zip(bucket.parameters, first, strict=True))
    assert bucket.memory.tolist() == [6] * 5


def test_nothing_is_copied_where_nobody_looks(bucket: Bucket) -> None:
    views = [weakref.ref(p.grad) for p in bucket.parameters]
    for value in (2, 3):
        bucket.clear()
        bucket.backward(value)
    assert all(view() is p.grad for view, p in zip(views, bucket.parameters, strict=True))


def test_kept_gradients_keep_their_values(bucket: Bucket) -> None:
    kept = [p.grad for p in bucket.parameters]
    for value in (5, 7):
        bucket.clear()
        bucket.backward(value)
        assert [g.tolist() for g in kept] == [[2, 2], [2, 2, 2]]
        assert bucket.gradients() == [[2 * value] * 2, [2 * value] * 3]
        assert bucket.memory.tolist() == [2 * value] * 5


def test_tensors_of_the_users_get_the_result() -> None:
    bucket = Bucket()
    flat = torch.zeros(5)
    bucket.parameters[0].grad, bucket.parameters[1].grad = flat[:2], flat[2:]
    for known in (False, True, True):
        flat.zero_()
        bucket.backward(3, known=known)
        assert flat.tolist() == [6] * 5
        assert bucket.gradients() == [[6, 6], [6, 6, 6]]
    own = bucket.parameters[0].grad = torch.zeros(2)
    bucket.backward(1)
    assert own.tolist() == [2, 2]
    assert bucket.parameters[0].grad is own


def test_accumulated_gradients_that_nobody_keeps_are_not_the_users(bucket: Bucket) -> None:
    bucket.clear()
    bucket.parameters[0].grad = torch.full((2,), 4.0)  # as a backward pass under no_sync leaves it
    bucket.views.begin()
    assert bucket.views.foreign == []


def test_other_memory_through_data(bucket: Bucket) -> None:
    gradient = bucket.parameters[0].grad
    gradient.data = torch.full((2,), 100.0)
    bucket.clear()
    bucket.backward(3)
    assert bucket.gradients() == [[6, 6], [6, 6, 6]]
    assert bucket.memory.tolist() == [6] * 5
    assert gradient.tolist() == [100, 100]


def test_before_the_buckets_are_final_gradients_are_apart() -> None:
    bucket = Bucket()
    bucket.backward(1, known=False)
    bucket.memory.fill_(-1)
    assert bucket.gradients() == [[2, 2], [2, 2, 2]]


def test_making_buckets_leaves_gradients_alone() -> None:
    bucket = Bucket()
    own = bucket.parameters[0].grad = torch.ones(2)
    with bucket.views.kept():
        bucket.parameters[0].grad = bucket.places[0]
    assert bucket.parameters[0].grad is own
    assert bucket.parameters[1].grad is None


def test_leaving(bucket: Bucket) -> None:
    kept = bucket.parameters[0].grad
    bucket.views.leave()
    bucket.memory.fill_(-1)
    assert bucket.gradients() == [[2, 2], [2, 2, 2]]
    assert bucket.parameters[0].grad is kept


def test_a_user_who_asked_for_views_gets_views() -> None:
    bucket = Bucket(as_views=True)
    bucket.backward(1)
    kept = bucket.parameters[0].grad
    bucket.clear()
    bucket.backward(5)
    assert kept.tolist() == [10, 10]
    own = bucket.parameters[0].grad = torch.zeros(2)
    bucket.backward(1)
    assert own.tolist() == [1, 1]
    assert bucket.gradients()[0] == [2, 2]


def test_a_gradient_without_elements_stays_where_buckets_are_not_known_yet() -> None:
    parameter = nn.Parameter(torch.empty(0, 3))
    views = GradientViews([parameter], as_views=False)
    views.begin()
    parameter.grad = torch.zeros(0, 3)
    views.end(known=False)
    assert parameter.grad is not None


def test_the_node_of_a_frozen_parameter_is_that_of_its_later_graphs() -> None:
    parameter, calls = nn.Parameter(torch.ones(2), requires_grad=False), list[int]()
    hooks = GradientHooks()
    hooks.add(parameter, lambda *_: calls.append(1))
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.sum().backward()
    assert calls == [1]
