"""Profiles of models whose structure is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from syncline.errors import UserError
from syncline.plan.profile import Profile
from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Moment, Observer
from syncline.train.measure.profiler import profile
from tests.clock import added_time


class Residual(nn.Module):
    """Two branches that meet: the graph has a diamond."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.branch = nn.Linear(8, 8)
        self.never = nn.Linear(2, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(x))
        return self.out(x + self.branch(x))


def batches(width: int = 8, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, width), torch.randint(classes, (4,)))]


def profile_of(model: nn.Module) -> Profile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return profile(model, batches(), cross_entropy, optimizer=optimizer, iterations=6)


def index_of(found: Profile, name: str, phase: str) -> int:
    return next(i for i, o in enumerate(found.operations) if o.name == name and o.phase == phase)


def test_the_graph_of_a_residual_model() -> None:
    found = profile_of(Residual())
    names = [g.name for g in found.gradients]
    assert names[:2] == ["never.weight", "never.bias"]
    assert set(names[2:4]) == {"out.weight", "out.bias"}
    assert set(names[4:6]) == {"branch.weight", "branch.bias"}
    assert set(names[6:]) == {"enter.weight", "enter.bias"}
    add = index_of(found, "AddBackward0", "backward")
    relu = index_of(found, "ReluBackward0", "backward")
    # relu's gradient needs both the sum's and the branch's
    assert add in found.operations[relu].after
    assert len([b for b in found.operations[relu].after if b > add]) >= 1
    gradients = {g.name: g for g in found.gradients}
    for module in ("enter", "branch", "out"):
        needed = gradients[f"{module}.weight"].needed_by
        assert needed is not None
        assert found.operations[needed].name == module
        assert found.operations[needed].phase == "forward"
        ready = gradients[f"{module}.weight"].ready_after
        assert found.operations[ready].phase == "backward"
    assert gradients["never.weight"].needed_by is None
    loss = index_of(found, "loss", "forward")
    assert gradients["never.weight"].ready_after == loss


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting in every iteration would empty a GPU's queue, and the next one would take longer."""
    waits: list[CpuClock] = []
    monkeypatch.setattr(CpuClock, "synchronize", lambda clock: waits.append(clock))
    profile_of(Residual())
    assert len(waits) == 1


def test_phases_in_order_and_positive() -> None:
    found = profile_of(Residual())
    order = list(dict.fromkeys(o.phase for o in found.operations))
    assert order == ["data", "forward", "backward", "update"]
    assert found.phase_s("forward") > 0
    assert found.phase_s("backward") > 0
    assert found.phase_s("update") > 0
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
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
            self.inner = nn.Module()
            self.inner.unseen = nn.Linear(8, 8)
            self.out = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.block["attention"](x, x, x)[0]
            return self.out(nn.functional.linear(x, self.inner.unseen.weight))

    found = profile_of(Attending())
    gradients = {g.name: g for g in found.gradients}
    # Attention does not call its projection; of the other layer only the model's own code knows.
    needed = gradients["block.attention.out_proj.weight"].needed_by
    assert needed == gradients["block.attention.in_proj_weight"].needed_by is not None
    assert gradients["inner.unseen.weight"].needed_by is None


def test_shared_parameters_are_needed_by_their_first_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.out = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.second(self.first(x)))

    found = profile_of(Tied())
    shared = next(g for g in found.gradients if g.name == "first.weight")
    assert "second.weight" not in {g.name for g in found.gradients}
    assert found.operations[shared.needed_by].name == "first"
    # its gradient is complete only when the first use's share has been added
    assert shared.ready_after >= max(
        g.ready_after for g in found.gradients if g.name.startswith(("second", "out"))
    )


def test_outputs_in_containers_and_losses_as_outputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"loss": [self.layer(x).square().mean()]}

    found = profile(Nested(), batches(), lambda out, _: out["loss"][0], iterations=3)
    assert index_of(found, "MeanBackward0", "backward")
    assert {g.name for g in found.gradients} == {"layer.weight", "layer.bias"}


def test_checkpointed_modules_are_counted_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.out = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(checkpoint(self.inner, x, use_reentrant=False))

    found = profile_of(Checkpointed())
    runs = [o for o in found.operations if o.name == "inner.0" and o.phase == "forward"]
    assert len(runs) == 1
    assert len(found.gradients) == 4


def test_hooks_are_gone_afterwards() -> None:
    model = Residual()
    profile_of(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


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
    assert first is not None
    assert second is not None
    nodes = [sum(e.moment is Moment.NODE for e in i.events) for i in (first, second)]
    assert nodes == [1, 0]
