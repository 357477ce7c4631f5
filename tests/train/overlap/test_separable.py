"""Which optimizers can be stepped parameter by parameter, and that those found so really can."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
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
from tests.train.overlap.overlap_optimizers import PLAIN
from tests.train.overlap.own_optimizers import Custom, Noisy, TrustRatio, Voting
from tests.words import assert_tells

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


class Counting(Custom):
    def prepare(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Clipping(Custom):
    """Clips by the norm of all gradients, or of some of them."""

    threshold, ndim = 1.0, range(9)

    def prepare(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_([p for p in parameters if p.ndim in self.ndim], self.threshold)


class Wrapping(torch.optim.Optimizer):
    """Another optimizer in disguise, as some launchers make them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


class NeedsLoss(Custom):
    def step(self, loss: float) -> None:  # type: ignore[override]
        pass


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


def having(optimizer: torch.optim.Optimizer, **attributes: Any) -> torch.optim.Optimizer:
    vars(optimizer).update(attributes)
    return optimizer


def custom(
    prepare: Callable[[Any], object] = Custom.prepare,
    update: Callable[..., object] = Custom.update,
    **attributes: Any,
) -> Make:
    """Return what makes optimizers that do something once a step, or for each parameter."""
    kind = type("Custom", (Custom,), {"prepare": prepare, "update": update})
    return lambda params: having(kind(params), **attributes)


def remembering(params: Parameters, how: str) -> torch.optim.Optimizer:
    """Return one with tensors where they are hard to see: in a closure, in a weak reference."""
    tensors = list(params)
    cell = {"deep": [(tensors[0],)]}
    kept: dict[str, object] = {
        "closure": lambda: cell,
        "partial": functools.partial(len, tensors),
        "weak": weakref.ref(tensors[0]),
        "object": SimpleNamespace(deep=cell),
        "slots": Slotted(tensors),
    }
    return having(Custom(tensors), kept=kept[how])


def stepping_twice(params: Parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params)
    original = optimizer.step

    @functools.wraps(original)
    def twice() -> None:
        original()
        original()

    return having(optimizer, step=twice)


FLAGS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "maximize": {"maximize": True},
    "decay": {"weight_decay": 0.01},
}
FLAGGED = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD"]
FLAGGED += ["RMSprop", "Rprop", "Adafactor"]
SEPARABLE: dict[str, Make] = {
    **PLAIN,
    **{
        f"{name}-{flag}": functools.partial(getattr(torch.optim, name), **options)
        for name, (flag, options) in itertools.product(FLAGGED, FLAGS.items())
        if (name, flag) != ("Rprop", "decay")
    },
    "SGD-tensor-lr": functools.partial(torch.optim.SGD, lr=torch.tensor(0.01)),
    "AdamW-tensor-lr": functools.partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
    "NAdam-decoupled": functools.partial(torch.optim.NAdam, decoupled_weight_decay=True),
    "RAdam-decoupled": functools.partial(torch.optim.RAdam, decoupled_weight_decay=True),
    "Adagrad-fused": functools.partial(torch.optim.Adagrad, fused=True),
    "Adagrad-decaying": functools.partial(torch.optim.Adagrad, lr_decay=0.1),
    "ASGD-averaging": functools.partial(torch.optim.ASGD, t0=2.0),
    "Muon": torch.optim.Muon,
    "Muon-plain": functools.partial(torch.optim.Muon, nesterov=False),
    "TrustRatio": TrustRatio,
    "Centred": Centred,
    "Counting": Counting,
}


def optimizer_for(name: str, *, several: bool) -> tuple[Net, torch.optim.Optimizer]:
    """Return one for all parameters, or for uneven groups of them with rates of their own."""
    net = Net(matrices=name.startswith("Muon"))
    first, second, *others = net.used()
    rates = [{"params": [first], "lr": 0.02}, {"params": [second], "lr": 0.03}]
    # A copy: a rate that is a tensor may not be shared by runs that are compared.
    make = copy.deepcopy(SEPARABLE[name])
    return net, make([*rates, {"params": others}] if several else net.used())


@pytest.mark.parametrize("several", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_ones_are_found_so(name: str, several: bool) -> None:
    _, optimizer = optimizer_for(name, several=several)
    assert why_not_separable(optimizer) is None


@pytest.mark.parametrize("name", first_few(SEPARABLE, 8))
def test_what_is_found_separable_trains_the_same_in_random_subsets(name: str) -> None:
    net, optimizer = optimizer_for(name, several=True)
    train(net, optimizer)
    other, apart = optimizer_for(name, several=True)
    train(other, apart, functools.partial(step_apart, random.Random(1)))
    for (label, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), label
    before = torch.cat([p.detach().flatten() for p in Net(matrices=net.matrices).used()])
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in net.used()]))


def train(
    net: Net, optimizer: Any, step: Callable[[Any], None] = lambda optimizer: optimizer.step()
) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(10):
        inputs = torch.randn(6, 1, 6, 6, generator=generator)
        targets = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(inputs), targets).backward()
        step(optimizer)


def step_apart(choose: random.Random, optimizer: torch.optim.Optimizer) -> None:
    """Step disjoint random subsets that cover all parameters, as the engine does."""
    groups = optimizer.param_groups
    left = [p for group in groups for p in group["params"]]
    choose.shuffle(left)
    while left:
        size = choose.randint(1, min(4, len(left)))
        taken, left = {id(p) for p in left[:size]}, left[size:]
        subsets = [[p for p in g["params"] if id(p) in taken] for g in groups]
        pairs = zip(groups, subsets, strict=True)
        optimizer.param_groups = [{**group, "params": some} for group, some in pairs if some]
        type(optimizer).step(optimizer)  # type: ignore[call-arg]
    optimizer.param_groups = groups


FAILED = "its step failed on a small example "
DIFFERENTLY = "tried on a small example, updates a parameter differently"
WHY_NOT: dict[str, tuple[Make, str]] = {
    "lbfgs": (torch.optim.LBFGS, "LBFGS.step needs the argument 'closure'"),
    "sparse": (torch.optim.SparseAdam, FAILED + "(RuntimeError: SparseAdam does not support dense"),
    "differentiable": (
        lambda p: torch.optim.SGD(p, differentiable=True),
        FAILED + "(RuntimeError: a leaf Variable that requires grad",
    ),
    "needs-loss": (NeedsLoss, "NeedsLoss.step needs the argument 'loss'"),
    "clipping": (Clipping, f"Clipping, {DIFFERENTLY}"),
    "clipping-rarely": (lambda p: having(Clipping(p), threshold=500.0), DIFFERENTLY),
    "neighbours": (
        custom(update=lambda _, p, group: p.sub_(p.grad, alpha=0.1 / len(group["params"]))),
        DIFFERENTLY,
    ),
    "noisy": (Noisy, f"Noisy, {DIFFERENTLY}"),
    "counting-parameters": (
        custom(update=lambda _, __, group: group.update(k=group.get("k", 0) + 1)),
        "its step changes 'k' of parameter group 0",
    ),
    "counting-attribute": (
        custom(lambda self: having(self, steps=self.steps + 1), steps=0),
        "its step changes its attribute 'steps'",
    ),
    "counting-inside": (
        custom(lambda self: self.counts["steps"].append(1), counts={"steps": []}),
        "its step changes its attribute 'counts'",
    ),
    "counting-state": (
        custom(lambda self: self.state.update(steps=self.state.get("steps", 0) + 1)),
        "its step changes state that belongs to no parameter",
    ),
    "groups": (
        custom(lambda self: having(self, param_groups=[*self.param_groups, {"params": []}])),
        "its step changes its parameter groups",
    ),
    "raising": (custom(lambda _: {}["momentum"]), FAILED + "(KeyError: 'momentum')"),
    "averaging": (custom(average=torch.zeros(3)), "its attribute 'average' holds a tensor"),
    "group-tensor": (
        lambda p: Custom(p, buffer=torch.zeros(2)),
        "'buffer' of parameter group 0 holds a tensor",
    ),
    "wrapping": (lambda p: Wrapping(torch.optim.SGD(p)), "its param_groups are not its own"),
    "replaced": (stepping_twice, "its step was replaced by "),
    "too-much": (
        lambda p: having(Custom(p), table=[[i] for i in range(100_001)]),
        "its attribute 'table' holds too much",
    ),
    "collective": (Voting, "it calls collectives"),
    "not-copied": (custom(numbers=(n for n in range(3))), "cannot pickle 'generator' object"),
} | {
    f"remembering-{how}": (functools.partial(remembering, how=how), "its attribute 'kept' holds a")
    for how in ("closure", "partial", "weak", "object", "slots")
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_others_are_refused_with_the_reason(name: str) -> None:
    make, reason = WHY_NOT[name]
    assert reason in (why_not_separable(make(Net().parameters())) or "")


def test_the_wrapped_optimizers_own_parameters_are_not_stepped() -> None:
    net = Net()
    before = copy.deepcopy(list(net.parameters()))
    optimizer = having(Custom(net.parameters()), inner=torch.optim.SGD(net.parameters(), lr=1.0))
    assert "attribute 'inner' holds another optimizer" in (why_not_separable(optimizer) or "")
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
    vectors = [nn.Parameter(torch.randn(4)) for _ in range(20)]
    cubes = [nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.randn(4, 3, 2).double())]
    assert why_not_separable(having(Clipping([*vectors, cubes[0]]), ndim=(3,))) is None
    assert why_not_separable(having(Clipping([*vectors, *cubes]), ndim=(3,))) is not None


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
    train(net, optimizer)
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
        assert_tells(reason or "", note.__qualname__, where)
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
