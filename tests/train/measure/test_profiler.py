"""Profiles of models whose structure is known, and what the observer behind them leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from syncline.errors import UserError
from syncline.plan.profile import Profile
from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Moment, Observer
from syncline.train.measure.profiler import profile
from tests.clock import added_time

wide, out = partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)


class Model(nn.Module):
    """Layers by name, and what is made of an input."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.how = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x)


def residual() -> Model:
    """Return two branches that meet: the graph has a diamond."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(model.enter(x))
        return model.out(x + model.branch(x))

    return Model(forward, enter=wide(), branch=wide(), never=nn.Linear(2, 2), out=out())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 8), torch.randint(3, (4,)))]


def profile_of(model: nn.Module) -> Profile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return profile(model, batches(), cross_entropy, optimizer=optimizer, iterations=6)


def index_of(found: Profile, name: str, phase: str) -> int:
    return next(i for i, o in enumerate(found.operations) if o.name == name and o.phase == phase)


def test_the_graph_of_a_residual_model() -> None:
    found = profile_of(residual())
    gradients = {g.name: g for g in found.gradients}
    modules = [name.partition(".")[0] for name in gradients]
    assert modules == [name for name in ("never", "out", "branch", "enter") for _ in range(2)]
    add = index_of(found, "AddBackward0", "backward")
    # relu's gradient needs both the sum's and the branch's
    after = found.operations[index_of(found, "ReluBackward0", "backward")].after
    assert add in after
    assert max(after) > add
    for module in ("enter", "branch", "out"):
        gradient = gradients[f"{module}.weight"]
        needed = found.operations[gradient.needed_by]
        assert (needed.name, needed.phase) == (module, "forward")
        assert found.operations[gradient.ready_after].phase == "backward"
    assert gradients["never.weight"].needed_by is None
    assert gradients["never.weight"].ready_after == index_of(found, "loss", "forward")


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting in every iteration would empty a GPU's queue, and the next one would take longer."""
    waits: list[CpuClock] = []
    monkeypatch.setattr(CpuClock, "synchronize", lambda clock: waits.append(clock))
    profile_of(residual())
    assert len(waits) == 1


def test_phases_in_order_and_positive_and_hooks_gone_afterwards() -> None:
    model = residual()
    found = profile_of(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    order = list(dict.fromkeys(o.phase for o in found.operations))
    assert order == ["data", "forward", "backward", "update"]
    assert all(found.phase_s(phase) > 0 for phase in ("forward", "backward", "update"))
    assert Profile.from_json(found.to_json()) == found


def test_a_slow_module_and_slow_data_are_seen_where_they_are() -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            add(20.0)
            return x

    def slow_batches():
        while True:
            add(10.0)
            yield batches()[0]

    model = nn.Sequential(nn.Linear(8, 3), Slow())
    with added_time() as add:
        found = profile(model, slow_batches(), cross_entropy, iterations=6, warmup=1)
    slow = found.operations[index_of(found, "1", "forward")]
    assert slow.duration_s == pytest.approx(20.0, rel=0.2)
    assert found.phase_s("forward") == pytest.approx(20.0, rel=0.2)
    assert found.phase_s("data") == pytest.approx(10.0, rel=0.2)
    assert found.phase_s("backward", "update") < 5.0


def test_parameters_that_are_read_from_outside_their_module() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + model.block["attention"](x, x, x)[0]
        return model.out(nn.functional.linear(x, model.inner["unseen"].weight))

    block = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    inner = nn.ModuleDict({"unseen": wide()})
    found = profile_of(Model(forward, block=block, inner=inner, out=out()))
    gradients = {g.name: g for g in found.gradients}
    # Attention does not call its projection; of the other layer only the model's own code knows.
    needed = gradients["block.attention.out_proj.weight"].needed_by
    assert needed == gradients["block.attention.in_proj_weight"].needed_by is not None
    assert gradients["inner.unseen.weight"].needed_by is None


def test_shared_parameters_are_needed_by_their_first_use() -> None:
    first, second = wide(), wide()
    second.weight = first.weight
    tied = Model(lambda m, x: m.out(m.second(m.first(x))), first=first, second=second, out=out())
    found = profile_of(tied)
    gradients = {g.name: g for g in found.gradients}
    shared = gradients.pop("first.weight")
    assert gradients.keys() == {"first.bias", "second.bias", "out.weight", "out.bias"}
    assert found.operations[shared.needed_by].name == "first"
    # its gradient is complete only when the first use's share has been added
    del gradients["first.bias"]
    assert shared.ready_after >= max(g.ready_after for g in gradients.values())


def test_outputs_in_containers_and_losses_as_outputs() -> None:
    nested = Model(lambda model, x: {"loss": [model.layer(x).square().mean()]}, layer=out())
    found = profile(nested, batches(), lambda output, _: output["loss"][0], iterations=3)
    assert index_of(found, "MeanBackward0", "backward")
    assert {g.name for g in found.gradients} == {"layer.weight", "layer.bias"}


def test_checkpointed_modules_are_counted_once() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.out(checkpoint(model.inner, x, use_reentrant=False))

    found = profile_of(Model(forward, inner=nn.Sequential(wide(), nn.ReLU()), out=out()))
    runs = [o for o in found.operations if o.name == "inner.0" and o.phase == "forward"]
    assert len(runs) == 1
    assert len(found.gradients) == 4


def test_what_cannot_be_profiled() -> None:
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        profile(nn.ReLU(), batches(), mse_loss)
    with pytest.raises(UserError, match="at least one batch"):
        profile(nn.Linear(8, 3), [], cross_entropy)
    with pytest.raises(UserError, match="at least 3 iterations"):
        profile(nn.Linear(8, 3), batches(), cross_entropy, iterations=1)


def test_an_operation_that_runs_again_counts_once() -> None:
    """A value that is kept with its graph, as tensor parallelism keeps its parameters."""
    net = torch.nn.Linear(3, 2)
    kept = net.weight * 2
    observer = Observer(net, dict(net.named_parameters()), CpuClock())
    observer.attach()
    observer.detail = True
    observer.begin()
    observer.output(kept.sum())
    kept.sum().backward(retain_graph=True)
    observer.detail = False
    first = observer.begin()
    observer.output(kept.sum())
    kept.sum().backward()
    second = observer.begin()
    observer.detach()
    nodes = [sum(e.moment is Moment.NODE for e in i.events) for i in (first, second)]
    assert nodes == [1, 0]


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
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    if when != "after the step":
        output.sum().backward()
    optimizer.step()
    gone_net = weakref.ref(net)
    del net, optimizer, output
    gc.collect()
    assert gone_net() is None
