"""Models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.train.overlap.loop import ADAMW, REFUSED, ROUNDS, STATIC, UNUSED, Loop
from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import SYNCHRONOUS, Side
from tests.train.overlap.parts import Training, accumulate, evaluate, every, finish, zero_in_place


class Branching(nn.Module):
    """Uses one branch or the other, another on every rank, or always the same; one layer never."""

    def __init__(self, turn: int | None = None) -> None:
        super().__init__()
        self.turn = turn
        self.enter = nn.Linear(FEATURES, 16)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.never = nn.Linear(7, 7)
        self.leave = nn.Linear(16, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        turn = (self.calls + dist.get_rank()) % 3 if self.turn is None else self.turn
        hidden = self.enter(x)
        if turn:
            hidden = self.left(hidden) if turn == 1 else self.right(hidden)
        return self.leave(torch.relu(hidden))


class Tied(nn.Module):
    """A layer used twice, and an embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.twice, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed((x * 10).long().remainder(40)).mean(1)
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        return self.head(self.norm(hidden))


class TiedByData(Tied):
    """Two parameters, and gradients, of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight.data = self.embed.weight.data


class Sliced(Net):
    """Weights that are slices of one tensor, and have its version."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.hidden, self.leave
        rows = torch.cat([layer.weight.detach().flatten() for layer in layers])
        parts = rows.split([layer.weight.numel() for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight = nn.Parameter(part.view_as(layer.weight))


class Checkpointed(Net):
    """Uses a layer twice, and computes it again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        for _ in range(2):
            hidden = checkpoint(self.hidden, hidden, use_reentrant=self.reentrant)
        return self.leave(self.norm(hidden))


class Convolutions(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), norm(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.leave = nn.Linear(4 * 12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x.view(-1, 1, 3, 4))))
        return self.leave(self.second(hidden).flatten(1))


class Counting(Net):
    """Registers a buffer when it is first called, and counts in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "calls" not in dict(self.named_buffers()):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += x.sum().detach()
        return super().forward(x)


class Assorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)
        self.act, self.bag = nn.PReLU(4), nn.EmbeddingBag(10, 6)
        self.mix = nn.Bilinear(4, 6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.instance(self.group(self.conv(x[:, None]))))
        words = self.bag((x * 5).long().remainder(10))
        return self.mix(hidden.mean(2), words)


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x.view(-1, 4, 3))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.leave(self.layer(hidden).flatten(1))


def evaluate_fast(t: Training) -> None:
    t.ddp.eval()
    with torch.inference_mode():
        inputs = batch(t.step, 1)[0]
        t.note("evaluated", t.net.layer(inputs.view(-1, 4, 3)[..., [0] * 8]), t.ddp(inputs))
    t.ddp.train()


class Teaching(Attending):
    """Runs its own layer as a teacher, without gradients, before it trains it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.eval()
            hint = self.layer(self.enter(x.view(-1, 4, 3))).flatten(1)
            self.layer.train()
        return super().forward(x) + 0.1 * hint[:, :CLASSES]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.cell = nn.GRU(12, 5, batch_first=True), nn.LSTMCell(5, 6)
        self.leave = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x.view(-1, 4, 3))
        hidden, _ = self.gru(hidden)
        return self.leave(self.cell(hidden[:, -1])[0])


def parametrized() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.hidden)
    parametrizations.spectral_norm(net.leave)
    parametrizations.orthogonal(net.enter, orthogonal_map="cayley")
    return net


def cached(model: nn.Module, step: int = 0) -> torch.Tensor:
    with parametrize.cached():
        return loss_of(model, step)


def pruned() -> nn.Module:
    net = Net()
    prune.l1_unstructured(net.hidden, "weight", amount=0.3)
    with torch.no_grad():  # a pruned module can be copied only so
        net.hidden.weight = net.hidden.weight.detach()
    return net


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.bank = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(3)])
        self.table = nn.ParameterDict({"scale": torch.ones(16), "shift": torch.zeros(16)})
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.one.weight, self.one.bias)
        hidden = hidden @ self.two.weight.T + self.two.bias
        for matrix in self.bank:
            hidden = torch.tanh(hidden @ matrix)
        hidden = torch.einsum("bi,i->bi", hidden, self.table["scale"]) + self.table["shift"]
        return torch.addmm(self.out.bias, hidden, self.out.weight.t())


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.randn(FEATURES, CLASSES) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eio->bo", x, torch.stack(list(self.experts))) / 4


class OwnFunction(torch.autograd.Function):
    """Somebody's own operation; saves its weight before it has used it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Own(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(OwnFunction.apply(x, self.enter.weight) + self.enter.bias)
        return self.leave(self.norm(self.hidden(hidden)))


class Clamping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.hidden.weight.clamp_(-0.15, 0.15)
        self.leave.weight.data.mul_(0.999)
        return super().forward(x)


class Converted(Net):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.enter.weight.dtype))


class SeveralTypes(nn.Module):
    def __init__(self, leave: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 16)
        self.middle = nn.Linear(16, 16, dtype=torch.float64)
        self.leave = nn.Linear(16, CLASSES, dtype=leave)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.enter(x).double()))
        return self.leave(hidden.to(self.leave.weight.dtype)).float()


class Rotation(nn.Module):
    """Complex layers between real inputs and outputs, with zeros among the gradients."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        linear = partial(nn.Linear, dtype=dtype)
        self.enter, self.hidden = linear(FEATURES, 20), linear(20, 20)
        self.leave = linear(20, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x.to(self.enter.weight.dtype))
        return self.leave(self.hidden(torch.relu(hidden.real) * hidden)).abs()


class Turned(Net):
    """Real layers, and outputs that are turned in the complex plane."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.turn).real


class Odd(nn.Module):
    """Parameters of one element, of none, without dimensions, frozen, in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.scale = map(nn.Parameter, (torch.zeros(0, FEATURES), torch.ones(())))
        self.enter = nn.Linear(FEATURES, 15)
        self.across = nn.Parameter(torch.randn(15, 9).t())
        self.frozen = nn.Linear(9, 9).requires_grad_(requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.leave = nn.Linear(9, CLASSES)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(self.enter(x), self.across) * self.scale + self.shift
        return self.leave(torch.tanh(self.frozen(hidden))) + self.none.sum() + self.empty.sum()


def with_ignored() -> nn.Module:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["norm.weight"])
    return net


class Synced(torch.autograd.Function):
    """Sums over all ranks, in the forward and in the backward pass, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        total = x.clone()
        dist.all_reduce(total)
        return total

    backward = forward


class Exchanging(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        hidden = hidden - Synced.apply(hidden.mean(0)) / 2
        hidden = self.norm(self.hidden(hidden))
        return self.leave(hidden - Synced.apply(hidden.mean(0)) / 2)


class Outcome(NamedTuple):
    logits: torch.Tensor
    parts: dict[str, Any]


class Returning(Net):
    def forward(self, x: torch.Tensor) -> Outcome:
        return Outcome(super().forward(x), {"weights": [self.leave.weight, None], "name": "x"})


def with_penalty(model: nn.Module, step: int = 0) -> torch.Tensor:
    inputs, targets = batch(step)
    outcome = model(inputs)
    penalty = outcome.parts["weights"][0].square().sum()
    return functional.cross_entropy(outcome.logits, targets) + 0.01 * penalty


def attach(t: Training) -> None:
    t.ddp.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    t.ddp.register_buffer("scale", torch.tensor(2.0))
    t.ddp.seen = []
    t.ddp.register_forward_hook(lambda *_: t.ddp.seen.append(t.step))


def backward_by_attached(t: Training) -> None:
    inputs, targets = batch(t.step)
    t.backward(t.ddp.scale * t.ddp.criterion(t.ddp(inputs), targets))


def note_attached(t: Training) -> None:
    t.note("seen", t.ddp.seen, list(t.ddp.state_dict()))
    finish(t)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def replace_module(t: Training) -> None:
    t.ddp.module = Around(t.ddp.module)


def own_group(side: Side) -> None:
    Loop(ddp={"process_group": dist.new_group([0, 1])}).script(side)


def tensor_parallel(side: Side) -> None:
    def note_parameters(t: Training) -> None:  # which the module has no more once it has run
        t.note("parameters", t.optimizer.param_groups[0]["params"])
        finish(t)

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    arguments = {"device_mesh": mesh["dp"]}
    Loop(model=lambda: net, ddp=arguments, end=note_parameters).script(side)


SCENARIOS = {
    "unused parameters, other ones on every rank (`find_unused_parameters=True`)": Loop(
        model=Branching, ddp=UNUSED
    ),
    "unused parameters with Adam, gradients zeroed in place": Loop(
        model=Branching, ddp=UNUSED, make=ADAMW, zero=zero_in_place
    ),
    "unused parameters, gradients accumulated under `no_sync` from the first step on": Loop(
        model=Branching, ddp=UNUSED, make=ADAMW, backward=partial(accumulate, passes=2)
    ),
    "`find_unused_parameters=True` where all are used": Loop(
        ddp={**UNUSED, "gradient_as_bucket_view": True}
    ),
    "shared and tied parameters": Loop(model=Tied),
    "parameters tied through `data`": Loop(SYNCHRONOUS, REFUSED, model=TiedByData),
    "parameters that are slices of one tensor": Loop(model=Sliced),
    "`static_graph=True`": Loop(ddp=STATIC),
    "`static_graph=True`, shared and tied parameters": Loop(model=Tied, ddp=STATIC),
    "`static_graph=True`, unused parameters": Loop(model=lambda: Branching(turn=1), ddp=STATIC),
    "BatchNorm": Loop(model=Convolutions),
    "BatchNorm, `forward_sync_buffers=False`": Loop(
        model=Convolutions, ddp={"forward_sync_buffers": False}
    ),
    "BatchNorm with momentum None, evaluation in between": Loop(
        model=lambda: Convolutions(partial(nn.BatchNorm2d, momentum=None)), after=every(4, evaluate)
    ),
    "channels-last memory format": Loop(
        model=lambda: Convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ),
    "buffers that are added later": Loop(model=Counting),
    "GroupNorm, InstanceNorm, PReLU, Embedding, Bilinear": Loop(model=Assorted),
    "`MultiheadAttention` and `TransformerEncoderLayer`": Loop(model=Attending),
    "the same, evaluated on torch's fast path in between": Loop(
        model=Attending, after=every(4, evaluate_fast)
    ),
    "a part of the model run without gradients in the forward pass": Loop(model=Teaching),
    "LSTM, GRU, LSTMCell": Loop(model=Recurrent),
    "`weight_norm`, `spectral_norm`, `orthogonal` (parametrizations)": Loop(model=parametrized),
    "cached parametrizations": Loop(model=parametrized, loss=cached),
    "pruning": Loop(model=pruned),
    "parameters used without calling the module that owns them": Loop(model=Functional),
    "parameters of `ParameterList`, stacked before use": Loop(model=Stacked),
    "an `autograd.Function` given another module's weight": Loop(model=Own),
    "weights changed by the forward pass itself": Loop(model=Clamping),
    "a model in bfloat16": Loop(sharded=ROUNDS, model=lambda: Converted(torch.bfloat16)),
    "gradients of several dtypes": Loop(sharded=ROUNDS, model=SeveralTypes),
    "gradients in float32 and float64": Loop(model=partial(SeveralTypes, torch.float32)),
    "the same with `find_unused_parameters=True`": Loop(
        model=partial(SeveralTypes, torch.float32), ddp=UNUSED
    ),
    "complex and real parameters": Loop(model=Turned),
    "gradients of several dtypes in a static graph": Loop(
        SYNCHRONOUS, REFUSED, model=SeveralTypes, ddp=STATIC
    ),
    "a model in float64": Loop(model=lambda: Converted(torch.float64)),
    "complex parameters": Loop(model=Rotation),
    "complex parameters in double precision, with Adam": Loop(
        model=lambda: Rotation(torch.complex128), make=ADAMW
    ),
    "parameters of one element, of none, without dimensions": Loop(sharded=ROUNDS, model=Odd),
    "parameters that are ignored (`_set_params_and_buffers_to_ignore_for_model`)": Loop(
        model=with_ignored
    ),
    "collectives of the model's own, forward and backward, as SyncBatchNorm has": Loop(
        model=Exchanging
    ),
    "a process group of the model's own (`process_group=`)": Loop(whole=own_group),
    "outputs in tuples, dicts and lists, one of them a parameter": Loop(
        model=Returning, loss=with_penalty, ddp=UNUSED
    ),
    "attributes, buffers and submodules on the wrapper": Loop(
        early=attach, backward=backward_by_attached, end=note_attached
    ),
    "`_set_static_graph()` after wrapping, a layer that is used twice": Loop(
        model=lambda: Checkpointed(reentrant=True), early=lambda t: t.ddp._set_static_graph()
    ),
    "the wrapper's `module` replaced by one around it": Loop(start=replace_module),
    "tensor parallelism in the model (`device_mesh=`)": Loop(
        SYNCHRONOUS, REFUSED, whole=tensor_parallel
    ),
}
