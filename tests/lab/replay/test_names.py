"""Names of gradients as torch can have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.lab.replay.model import RESERVED, Replayed, module_names, renamed_plan
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.profile import Gradient, Operation, Profile
from tests import strategies as some
from tests.lab.replay.fake import FakeTime


def replayed(names: list[str]) -> Replayed:
    profile = Profile(
        model="some",
        device="cpu",
        workers=1,
        iterations=1,
        operations=(Operation(name="backward", phase="backward", duration_s=0.0),),
        gradients=tuple(Gradient(name=name, elements=2, ready_after=0) for name in names),
    )
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
    assert [n for n, _ in replayed([name]).named_parameters()] == [expected]


def test_a_parameter_gives_way_to_a_submodule() -> None:
    assert module_names(["a.b", "a.b.c"]) == {"a.b": "a.b_", "a.b.c": "a.b.c"}


def test_a_name_that_must_change_gives_way_to_one_that_can_stay() -> None:
    assert module_names(["conv1", "conv1.weight"]) == {
        "conv1": "conv1.weight_",
        "conv1.weight": "conv1.weight",
    }


PARTS = st.sampled_from(
    ["a", "b", "", "_", "weight", "weight_", "half", "type", "0", "x y", "work"]
)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@some.many
@given(names=st.lists(PATHS, min_size=1, unique=True))
def test_torch_takes_every_name_and_keeps_it(names: list[str]) -> None:
    expected = module_names(names)
    found = {name for name, _ in replayed(names).named_parameters()}
    assert found == set(expected.values())
    assert len(found) == len(names)


@some.few
@given(names=st.lists(st.text(max_size=12), min_size=1, max_size=8, unique=True))
def test_torch_takes_any_text(names: list[str]) -> None:
    assert {n for n, _ in replayed(names).named_parameters()} == set(module_names(names).values())


def test_all_attributes_of_the_module_are_reserved() -> None:
    own = set(dir(replayed(["a.b"]))) - {"a"}
    assert {name for name in own if not name.startswith("_")} <= RESERVED
    assert {name for name in dir(nn.Module()) if not name.startswith("_")} <= RESERVED


def test_a_plan_follows() -> None:
    plan = Plan(
        planner="by hand",
        model="some",
        workers=2,
        tensors=(Tensor(name="fc", elements=3), Tensor(name="conv.weight", elements=4)),
        messages=(Message(start=0, stop=7),),
    )
    names = module_names([tensor.name for tensor in plan.tensors])
    renamed = renamed_plan(plan, names)
    assert [t.name for t in renamed.tensors] == ["fc.weight", "conv.weight"]
    assert renamed.messages == plan.messages
