"""Which optimizers can be stepped parameter by parameter, and that those found so really can."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Observer
from syncline.train.overlap.separable import separability
from tests.cases import first_few

Parameters = Iterable[Any]
Make = Callable[[Parameters], torch.optim.Optimizer]


def why_not_separable(optimizer: torch.optim.Optimizer) -> str | None:
    return separability(optimizer).why_not


class Net(nn.Module):
    """Parameters of no, one, two and four dimensions, wide and narrow ones."""

    def __init__(self, *, matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrices = matrices
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4 * 36, 24, bias=not matrices)
        self.narrow = nn.Linear(24, 5, bias=not matrices)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.narrow(torch.tanh(self.wide(hidden))) * self.scale

    def used(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.ndim == 2 or not self.matrices]


class Custom(torch.optim.Optimizer):
    """Gradient descent, and the place for what makes it special."""

    def __init__(self, params: Parameters, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.05, **defaults})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.prepare()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def prepare(self) -> None:
        pass

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p -= group["lr"] * p.grad


class Lamb(Custom):
    """A trust ratio for every parameter (You et al. 2020): the norms of one alone."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"], state["mean"], state["square"] = 0, torch.zeros_like(p), p * 0
        state["step"] += 1
        state["mean"].lerp_(p.grad, 0.1)
        state["square"].lerp_(p.grad * p.grad, 0.01)
        update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
        p -= group["lr"] * (p.norm() / update.norm().clamp(min=1e-9)).clamp(max=10) * update


class Centred(Custom):
    """Takes its options from a method of its own and treats marked parameters apart."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.rule = self.descend
        self.options = {"names": ["a", "b"], "nested": ({"k": 1.0}, None)}

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.rule(p, group)

    def descend(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p -= group["lr"] * (0.1 if getattr(p, "slow", False) else 1.0) * p.grad


class WithBuffer(Custom):
    """Keeps its state in the constructor, as Adagrad does, in shapes like the parameter's."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"rows": p.new_ones(p.shape[:1]), "seen": [torch.zeros(())]}

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["seen"][0] += 1
        state["rows"] += p.grad.reshape(*p.shape[:1], -1).abs().amax(dim=-1)
        p -= group["lr"] * p.grad / state["rows"].reshape(-1, *[1] * (p.ndim - 1))[..., :]


class Clipping(Custom):
    """Clips by the norm of all gradients."""

    def __init__(self, params: Parameters, threshold: float = 1.0) -> None:
        super().__init__(params)
        self.threshold = threshold

    def prepare(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.threshold)


class Counting(Custom):
    def prepare(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class CountingParameters(Custom):
    """Counts in the group, but once a parameter."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        super().update(p, group)


class CountingAttribute(Custom):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.steps = 0

    def prepare(self) -> None:
        self.steps += 1


class CountingInside(CountingAttribute):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.counts = {"steps": [0]}

    def prepare(self) -> None:
        self.counts["steps"][0] += 1


class CountingState(Custom):
    """A counter in the state under a name."""

    def prepare(self) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]


class Averaging(Custom):
    """A tensor of its own."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.average = torch.zeros(3)


class Remembering(Custom):
    """Tensors where they are hard to see: in a closure, behind a weak reference."""

    def __init__(self, params: Parameters, how: str) -> None:
        super().__init__(params)
        tensors = [p for group in self.param_groups for p in group["params"]]
        cell = {"deep": [(tensors[0],)]}
        self.kept: object = {
            "closure": lambda: cell,
            "partial": functools.partial(len, tensors),
            "weak": weakref.ref(tensors[0]),
            "object": type("Holder", (), {})(),
            "slots": Slotted(tensors),
            "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        }[how]
        if how == "object":
            self.kept.deep = cell  # type: ignore[attr-defined]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Wrapping(torch.optim.Optimizer):
    """Another optimizer in disguise, as some launchers make them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


class Noisy(Custom):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p -= group["lr"] * (p.grad + torch.randn_like(p) + random.random())


class Raising(Custom):
    def prepare(self) -> None:
        raise KeyError("momentum")


class NeedsLoss(Custom):
    def step(self, loss: float) -> None:  # type: ignore[override]
        pass


class OfNeighbours(Custom):
    """Each parameter's step depends on how many are stepped with it."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p -= group["lr"] / len(group["params"]) * p.grad


class Late(Custom):
    """Replaces its groups while stepping."""

    def prepare(self) -> None:
        self.param_groups = [*self.param_groups, {"params": []}]


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "maximize": {"maximize": True},
    "decay": {"weight_decay": 0.01},
}
FUSED = {"fused": {"fused": True}}
AMSGRAD = {"amsgrad": {"amsgrad": True}, "tensor-lr": {"lr": torch.tensor(1e-3)}}
VARIANTS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, dict[str, Any]]]] = {
    "SGD": (
        torch.optim.SGD,
        FLAGS
        | FUSED
        | {"momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}
        | {"tensor-lr": {"lr": torch.tensor(0.01)}},
    ),
    "Adam": (torch.optim.Adam, FLAGS | FUSED | AMSGRAD),
    "AdamW": (torch.optim.AdamW, FLAGS | FUSED | AMSGRAD),
    "NAdam": (torch.optim.NAdam, FLAGS | {"decoupled": {"decoupled_weight_decay": True}}),
    "RAdam": (torch.optim.RAdam, FLAGS | {"decoupled": {"decoupled_weight_decay": True}}),
    "Adamax": (torch.optim.Adamax, FLAGS),
    "Adagrad": (torch.optim.Adagrad, FLAGS | FUSED | {"decaying": {"lr_decay": 0.1}}),
    "Adadelta": (torch.optim.Adadelta, FLAGS),
    "ASGD": (torch.optim.ASGD, FLAGS | {"averaging": {"t0": 2.0}}),
    "RMSprop": (
        torch.optim.RMSprop,
        FLAGS | {"centered": {"centered": True}, "momentum": {"momentum": 0.9}},
    ),
    "Rprop": (torch.optim.Rprop, {k: v for k, v in FLAGS.items() if k != "decay"}),
    "Adafactor": (torch.optim.Adafactor, FLAGS),
    "Muon": (torch.optim.Muon, {"plain": {}, "nesterov": {"nesterov": False}}),
    "Lamb": (Lamb, {"plain": {}}),
    "Centred": (Centred, {"plain": {}}),
    "Counting": (Counting, {"plain": {}}),
}
SEPARABLE = {
    f"{name}-{variant}": functools.partial(kind, **options)
    for name, (kind, variants) in VARIANTS.items()
    for variant, options in variants.items()
}


def groups_of(net: Net, *, several: bool) -> list[Any]:
    """Return the parameters, or uneven groups of them with rates of their own."""
    used = net.used()
    if not several:
        return used
    return [
        {"params": used[:1], "lr": 0.02},
        {"params": used[1:2], "lr": 0.03},
        {"params": used[2:]},
    ]


def optimizer_for(name: str, *, several: bool) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(matrices=name.startswith("Muon"))
    # A copy: a rate that is a tensor may not be shared by runs that are compared.
    make = copy.deepcopy(SEPARABLE[name])
    return net, make(groups_of(net, several=several))


@pytest.mark.parametrize("several", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_ones_are_found_so(name: str, several: bool) -> None:
    _, optimizer = optimizer_for(name, several=several)
    assert why_not_separable(optimizer) is None


@pytest.mark.parametrize("name", first_few(SEPARABLE, 8))
def test_what_is_found_separable_trains_the_same_in_random_subsets(name: str) -> None:
    net, optimizer = optimizer_for(name, several=True)
    train(net, optimizer, step_whole)
    other, apart = optimizer_for(name, several=True)
    train(other, apart, Apart(random.Random(1)))
    for (label, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), label
    before = torch.cat([p.detach().flatten() for p in Net(matrices=net.matrices).used()])
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in net.used()]))


def train(net: Net, optimizer: torch.optim.Optimizer, step: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(10):
        inputs = torch.randn(6, 1, 6, 6, generator=generator)
        targets = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        step(optimizer)


def step_whole(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


class Apart:
    """Steps disjoint random subsets that cover all parameters, as the engine does."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        left = [p for group in groups for p in group["params"]]
        self.choose.shuffle(left)
        while left:
            size = self.choose.randint(1, min(4, len(left)))
            taken, left = {id(p) for p in left[:size]}, left[size:]
            subsets = [[p for p in g["params"] if id(p) in taken] for g in groups]
            optimizer.param_groups = [
                {**group, "params": subset}
                for group, subset in zip(groups, subsets, strict=True)
                if subset
            ]
            type(optimizer).step(optimizer)  # type: ignore[call-arg]
        optimizer.param_groups = groups


WHY_NOT: dict[str, tuple[Make, str]] = {
    "lbfgs": (torch.optim.LBFGS, "LBFGS.step needs the argument 'closure'"),
    "sparse": (
        torch.optim.SparseAdam,
        "its step failed on a small example (RuntimeError: SparseAdam does not support dense "
        "gradients, please consider Adam instead)",
    ),
    "differentiable": (
        lambda p: torch.optim.SGD(p, differentiable=True),
        "its step failed on a small example (RuntimeError: a leaf Variable that requires grad is "
        "being used in an in-place operation.)",
    ),
    "needs-loss": (NeedsLoss, "NeedsLoss.step needs the argument 'loss'"),
    "clipping": (
        Clipping,
        "Clipping, tried on a small example, updates a parameter differently when it is stepped "
        "without the others (parameter ",
    ),
    "clipping-rarely": (
        lambda p: Clipping(p, threshold=500.0),
        "Clipping, tried on a small example, updates a parameter differently when it is stepped ",
    ),
    "neighbours": (OfNeighbours, "OfNeighbours, tried on a small example, updates a parameter "),
    "noisy": (Noisy, "Noisy, tried on a small example, updates a parameter differently "),
    "counting-parameters": (CountingParameters, "its step changes 'k' of parameter group 0"),
    "counting-attribute": (CountingAttribute, "its step changes its attribute 'steps'"),
    "counting-inside": (CountingInside, "its step changes its attribute 'counts'"),
    "counting-state": (CountingState, "its step changes state that belongs to no parameter"),
    "groups": (Late, "its step changes its parameter groups"),
    "raising": (Raising, "its step failed on a small example (KeyError: 'momentum')"),
    "averaging": (
        Averaging,
        "its attribute 'average' holds a tensor, which parameters may share",
    ),
    "group-tensor": (
        lambda p: Custom(p, buffer=torch.zeros(2)),
        "'buffer' of parameter group 0 holds a tensor, which parameters may share",
    ),
    "wrapping": (
        lambda p: Wrapping(torch.optim.SGD(p)),
        "its param_groups are not its own: it seems to wrap another optimizer",
    ),
} | {
    f"remembering-{how}": (
        functools.partial(Remembering, how=how),
        f"its attribute 'kept' holds {what}, which parameters may share",
    )
    for how, what in [
        ("closure", "a tensor"),
        ("partial", "a tensor"),
        ("weak", "a tensor"),
        ("object", "a tensor"),
        ("slots", "a tensor"),
        ("optimizer", "another optimizer"),
    ]
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_others_are_refused_with_the_reason(name: str) -> None:
    make, reason = WHY_NOT[name]
    found = why_not_separable(make(Net().parameters()))
    assert found is not None
    assert found.startswith(reason)


def test_the_wrapped_optimizers_own_parameters_are_not_stepped() -> None:
    net = Net()
    before = copy.deepcopy(list(net.parameters()))
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = Custom(net.parameters())
    optimizer.inner = inner  # type: ignore[attr-defined]
    assert why_not_separable(optimizer) == (
        "its attribute 'inner' holds another optimizer, which parameters may share"
    )
    assert all(map(torch.equal, before, net.parameters()))


def test_state_made_by_the_constructor() -> None:
    weights = [nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(6))]
    optimizer = WithBuffer(weights)
    assert why_not_separable(optimizer) is None
    state = optimizer.state[weights[0]]
    assert torch.equal(state["rows"], torch.ones(5))
    assert state["seen"] == [torch.zeros(())]


def test_a_parameter_that_is_alone_is_not_enough_to_say_yes() -> None:
    assert why_not_separable(Clipping([nn.Parameter(torch.randn(4))])) is not None
    assert why_not_separable(torch.optim.Adam([nn.Parameter(torch.randn(4))])) is None


def test_only_what_a_group_treats_apart_is_enough_to_say_no() -> None:
    """Parameters of a kind that comes late in a long group are tried as well."""

    class SomeAlone(Custom):
        def prepare(self) -> None:
            nn.utils.clip_grad_norm_(
                [p for g in self.param_groups for p in g["params"] if p.ndim == 3], 1.0
            )

    vectors = [nn.Parameter(torch.randn(4)) for _ in range(20)]
    cubes = [nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.randn(4, 3, 2).double())]
    assert why_not_separable(SomeAlone([*vectors, cubes[0]])) is None
    assert why_not_separable(SomeAlone([*vectors, *cubes])) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_other_types_of_parameters(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(3, 4).to(dtype)) for _ in range(3)]
    assert why_not_separable(torch.optim.Adam(weights)) is None
    assert why_not_separable(Clipping(weights)) is not None


def test_frozen_and_empty_parameters_and_groups() -> None:
    weights = [nn.Parameter(torch.randn(n)) for n in (4, 0, 3)]
    weights[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": []}])
    assert why_not_separable(optimizer) is None


def test_nothing_of_the_optimizer_is_touched() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01), amsgrad=True)
    train(net, optimizer, step_whole)
    parameters = copy.deepcopy([(p, p.grad) for p in net.parameters()])
    versions = [p._version for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    attributes = dict(vars(optimizer))
    generators = torch.get_rng_state(), random.getstate()
    assert why_not_separable(optimizer) is None
    assert versions == [p._version for p in net.parameters()]
    for (p, grad), q in zip(parameters, net.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(grad, q.grad)
    assert str(state) == str(optimizer.state_dict())
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    assert vars(optimizer).keys() == attributes.keys()
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]


def test_no_memory_of_the_size_of_the_parameters() -> None:
    with torch.device("meta"):
        weights = [nn.Parameter(torch.empty(1 << 20, 1 << 10)) for _ in range(4)]
    real = [nn.Parameter(w.new_empty((), device="cpu").expand(w.shape)) for w in weights]
    optimizer = torch.optim.SGD(real, momentum=0.9)
    assert why_not_separable(optimizer) is None  # 16 TiB otherwise
    gc.collect()


def test_step_hooks_are_refused() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)

    def note(*_: object) -> None:
        pass

    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        where = "all optimizers" if "_optimizer_" in register.__name__ else "the optimizer"
        handle = register(note)
        try:
            reason = why_not_separable(optimizer)
        finally:
            handle.remove()
        assert reason == (
            f"the hook {note.__qualname__} on the step of {where} expects whole steps"
        )
    assert why_not_separable(optimizer) is None


def test_our_own_observer_does_not_count_as_a_hook() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    observer = Observer(net, dict(net.named_parameters()), CpuClock())
    observer.attach()
    observer.begin()
    try:
        assert why_not_separable(optimizer) is None
        finished = observer.begin()
    finally:
        observer.detach()
    assert finished is not None
    assert len(finished.events) == 1  # the trial's steps were not noted


def test_schedulers_are_no_reason() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=torch.tensor(0.1), momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    assert "step" in vars(optimizer)
    assert why_not_separable(optimizer) is None


def test_a_warm_up_from_a_rate_of_0_hides_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = Clipping(Net().to(dtype).parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        assert optimizer.param_groups[0]["lr"] == 0
        assert why_not_separable(optimizer) is not None
        assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_on_a_gpu(kind: Any, options: dict[str, Any]) -> None:
    assert why_not_separable(kind(Net().cuda().parameters(), **options)) is None


def test_a_step_replaced_on_the_object_is_a_reason() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    original = optimizer.step

    @functools.wraps(original)
    def clipped() -> None:
        original()

    optimizer.step = clipped  # type: ignore[method-assign, assignment]
    reason = why_not_separable(optimizer)
    assert reason is not None
    assert reason.startswith("its step was replaced by ")


def test_more_than_can_be_looked_through() -> None:
    optimizer = Custom(Net().parameters())
    optimizer.table = [[i] for i in range(100_001)]  # type: ignore[attr-defined]
    assert why_not_separable(optimizer) == (
        "its attribute 'table' holds too much to look through, which parameters may share"
    )


def test_an_attribute_that_cannot_be_copied_is_named_by_its_error() -> None:
    optimizer = Custom(Net().parameters())
    optimizer.numbers = (n for n in range(3))  # type: ignore[attr-defined]
    reason = why_not_separable(optimizer)
    assert reason is not None
    assert "cannot pickle 'generator' object" in reason
