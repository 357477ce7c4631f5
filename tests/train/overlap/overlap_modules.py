"""Scripts with models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS, Side


def train(
    side: Side,
    module: nn.Module,
    loss: Callable[..., torch.Tensor] = loss_of,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    every: Callable[[Any, int], None] | None = None,
    **arguments: Any,
) -> None:
    """Train a model, and do something after every step."""
    ddp = side.wrap(module, loss, **arguments)
    make = make or (lambda p: SGD(p, lr=0.05, momentum=0.9))
    optimizer = side.overlap(ddp, make(ddp.parameters()))
    for step in side.steps:
        optimizer.zero_grad()
        value = loss(ddp, step)
        value.backward()
        optimizer.step()
        side.note("loss", value)
        if every is not None:
            every(ddp, step)
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- which parameters are used


class Branching(nn.Module):
    """Uses one branch or the other, another on every rank; one layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.never = nn.Linear(7, 7)
        self.leave = nn.Linear(16, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        turn = (self.calls + torch.distributed.get_rank()) % 3
        hidden = self.enter(x)
        if turn:
            hidden = self.left(hidden) if turn == 1 else self.right(hidden)
        return self.leave(torch.relu(hidden))


@feature("unused parameters, other ones on every rank (`find_unused_parameters=True`)", OVERLAPS)
def unused(side: Side) -> None:
    train(side, Branching(), find_unused_parameters=True)


@feature("unused parameters with Adam, gradients zeroed in place", OVERLAPS)
def unused_in_place(side: Side) -> None:
    ddp = side.wrap(Branching(), loss_of, find_unused_parameters=True)
    optimizer = side.overlap(ddp, AdamW(ddp.parameters(), lr=0.01))
    for step in side.steps:
        optimizer.zero_grad(set_to_none=False)
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature(
    "unused parameters, gradients accumulated under `no_sync` from the first step on", OVERLAPS
)
def unused_accumulated(side: Side) -> None:
    ddp = side.wrap(Branching(), loss_of, find_unused_parameters=True)
    optimizer = side.overlap(ddp, AdamW(ddp.parameters(), lr=0.01))
    for step in side.steps:
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, step, 0).backward()
        loss_of(ddp, step, 1).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("`find_unused_parameters=True` where all are used", OVERLAPS)
def all_used(side: Side) -> None:
    train(side, Net(), find_unused_parameters=True, gradient_as_bucket_view=True)


class Tied(nn.Module):
    """A layer used twice, and an embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.twice = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed((x * 10).long().remainder(40)).mean(1)
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        return self.head(self.norm(hidden))


@feature("shared and tied parameters", OVERLAPS)
def tied(side: Side) -> None:
    train(side, Tied())


@feature("`static_graph=True`", OVERLAPS)
def static(side: Side) -> None:
    train(side, Net(), static_graph=True)


@feature("`static_graph=True`, shared and tied parameters", OVERLAPS)
def static_tied(side: Side) -> None:
    train(side, Tied(), static_graph=True)


class Partly(Branching):
    """Always leaves the same layers out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.relu(self.left(self.enter(x))))


@feature("`static_graph=True`, unused parameters", OVERLAPS)
def static_unused(side: Side) -> None:
    train(side, Partly(), static_graph=True)


# ---------------------------------------------------------------------- buffers and norms


class Convolutions(nn.Module):
    """Convolutions with batch norm, in channels-last order if asked."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = norm(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.leave = nn.Linear(4 * 12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 1, 3, 4)
        hidden = self.second(torch.relu(self.norm(self.first(image))))
        return self.leave(hidden.flatten(1))


@feature("BatchNorm", OVERLAPS)
def batch_norm(side: Side) -> None:
    train(side, Convolutions())


@feature("BatchNorm, `forward_sync_buffers=False`", OVERLAPS)
def own_buffers(side: Side) -> None:
    train(side, Convolutions(), forward_sync_buffers=False)


@feature("BatchNorm with momentum None, evaluation in between", OVERLAPS)
def batch_norm_eval(side: Side) -> None:
    def evaluate(ddp: Any, step: int) -> None:
        if step % 4 == 3:
            ddp.eval()
            with torch.no_grad():
                side.note("evaluated", ddp(batch(step, 1)[0]))
            ddp.train()

    train(side, Convolutions(lambda n: nn.BatchNorm2d(n, momentum=None)), every=evaluate)


@feature("channels-last memory format", OVERLAPS)
def channels_last(side: Side) -> None:
    train(side, Convolutions().to(memory_format=torch.channels_last))  # type: ignore[call-overload]


class Counting(Net):
    """Registers a buffer when it is first called, and counts in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "calls" not in dict(self.named_buffers()):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += x.sum().detach()
        return super().forward(x)


@feature("buffers that are added later", OVERLAPS)
def late_buffers(side: Side) -> None:
    train(side, Counting())


@feature("GroupNorm, InstanceNorm, PReLU, Embedding, Bilinear", OVERLAPS)
def assorted(side: Side) -> None:
    class Assorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 4, 3, padding=1)
            self.group = nn.GroupNorm(2, 4)
            self.instance = nn.InstanceNorm1d(4, affine=True)
            self.act = nn.PReLU(4)
            self.bag = nn.EmbeddingBag(10, 6)
            self.mix = nn.Bilinear(4, 6, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.act(self.instance(self.group(self.conv(x[:, None]))))
            words = self.bag((x * 5).long().remainder(10))
            return self.mix(hidden.mean(2), words)

    train(side, Assorted())


# ---------------------------------------------------------------------- attention and recurrence


class Attending(nn.Module):
    """Attention whose parent reads its children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x.view(-1, 4, 3))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.leave(self.layer(hidden).flatten(1))


@feature("`MultiheadAttention` and `TransformerEncoderLayer`", OVERLAPS)
def attention(side: Side) -> None:
    train(side, Attending())


@feature("the same, evaluated on torch's fast path in between", OVERLAPS)
def attention_fast(side: Side) -> None:
    def evaluate(ddp: Any, step: int) -> None:
        if step % 4 == 3:
            ddp.eval()
            with torch.inference_mode():
                side.note(
                    "evaluated", ddp.module.layer(batch(step, 1)[0].view(-1, 4, 3)[..., [0] * 8])
                )
                side.note("evaluated", ddp(batch(step, 1)[0]))
            ddp.train()

    train(side, Attending(), every=evaluate)


class Teaching(Attending):
    """Runs its own layer as a teacher, without gradients, before it trains it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.eval()
            hint = self.layer(self.enter(x.view(-1, 4, 3))).flatten(1)
            self.layer.train()
        return super().forward(x) + 0.1 * hint[:, :CLASSES]


@feature("a part of the model run without gradients in the forward pass", OVERLAPS)
def teacher(side: Side) -> None:
    train(side, Teaching())


class Recurrent(nn.Module):
    """An LSTM and a GRU: flat weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.cell = nn.LSTMCell(5, 6)
        self.leave = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x.view(-1, 4, 3))
        hidden, _ = self.gru(hidden)
        return self.leave(self.cell(hidden[:, -1])[0])


@feature("LSTM, GRU, LSTMCell", OVERLAPS)
def recurrent(side: Side) -> None:
    train(side, Recurrent())


# ---------------------------------------------------------------------- weights made of weights


def _parametrized(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = Net()
    net.hidden = make(net.hidden)
    return net


@feature("`weight_norm`, `spectral_norm`, `orthogonal` (parametrizations)", OVERLAPS)
def parametrized(side: Side) -> None:
    net = Net()
    parametrizations.weight_norm(net.hidden)
    parametrizations.spectral_norm(net.leave)
    parametrizations.orthogonal(net.enter, orthogonal_map="cayley")
    train(side, net)


@feature("cached parametrizations", OVERLAPS)
def cached(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        with parametrize.cached():
            return loss_of(model, step)

    net = Net()
    parametrizations.weight_norm(net.hidden)
    train(side, net, loss)


@feature("pruning", OVERLAPS)
def pruned(side: Side) -> None:
    net = Net()
    prune.l1_unstructured(net.hidden, "weight", amount=0.3)
    with torch.no_grad():  # a pruned module can be copied only so
        net.hidden.weight = net.hidden.weight.detach()
    train(side, net)


class Functional(nn.Module):
    """Reads its layers' parameters without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 16)
        self.two = nn.Linear(16, 16)
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


@feature("parameters used without calling the module that owns them", OVERLAPS)
def functional_use(side: Side) -> None:
    train(side, Functional())


@feature("parameters of `ParameterList`, stacked before use", OVERLAPS)
def stacked(side: Side) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterList([torch.randn(FEATURES, CLASSES) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bi,eio->bo", x, torch.stack(list(self.experts))) / 4

    train(side, Stacked())


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


@feature("an `autograd.Function` given another module's weight", OVERLAPS)
def own_function(side: Side) -> None:
    class Own(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(OwnFunction.apply(x, self.enter.weight) + self.enter.bias)
            return self.leave(self.norm(self.hidden(hidden)))

    train(side, Own())


@feature("weights changed by the forward pass itself", OVERLAPS)
def self_changing(side: Side) -> None:
    class Clamping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.hidden.weight.clamp_(-0.15, 0.15)
            self.leave.weight.data.mul_(0.999)
            return super().forward(x)

    train(side, Clamping())


# ---------------------------------------------------------------------- sizes and types


@feature("a model in bfloat16", OVERLAPS)
def bfloat16(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        inputs, targets = batch(step)
        return functional.cross_entropy(model(inputs.bfloat16()).float(), targets)

    train(side, Net().bfloat16(), loss)


@feature("a model in float64", OVERLAPS)
def float64(side: Side) -> None:
    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        inputs, targets = batch(step)
        return functional.cross_entropy(model(inputs.double()), targets)

    train(side, Net().double(), loss)


class Rotation(nn.Module):
    """Complex layers between real inputs and outputs, with zeros among the gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 20, dtype=dtype)
        self.hidden = nn.Linear(20, 20, dtype=dtype)
        self.leave = nn.Linear(20, CLASSES, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x.to(self.enter.weight.dtype))
        kept = torch.relu(hidden.real)
        return self.leave(self.hidden(kept * hidden)).abs()


@feature("complex parameters", OVERLAPS)
def complex_parameters(side: Side) -> None:
    train(side, Rotation(torch.complex64))


@feature("complex parameters in double precision, with Adam", OVERLAPS)
def complex_double(side: Side) -> None:
    train(side, Rotation(torch.complex128), make=lambda p: AdamW(p, lr=0.01))


class Odd(nn.Module):
    """Parameters of one element, of none, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, FEATURES))
        self.scale = nn.Parameter(torch.ones(()))
        self.enter = nn.Linear(FEATURES, 1)
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.leave = nn.Linear(1, CLASSES)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x) * self.scale + self.shift + self.none.sum() + self.empty.sum()
        return self.leave(hidden)


@feature("parameters of one element, of none, without dimensions", OVERLAPS)
def odd(side: Side) -> None:
    train(side, Odd())


@feature("parameters that are ignored (`_set_params_and_buffers_to_ignore_for_model`)", OVERLAPS)
def ignored(side: Side) -> None:
    net = Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["norm.weight"]
    )

    train(side, net)


class Synced(torch.autograd.Function):
    """Sums over all ranks, in the forward and in the backward pass, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        total = gradient.clone()
        dist.all_reduce(total)
        return total


@feature("collectives of the model's own, forward and backward, as SyncBatchNorm has", OVERLAPS)
def own_collectives(side: Side) -> None:
    class Exchanging(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.enter(x))
            hidden = hidden - Synced.apply(hidden.mean(0)) / 2
            hidden = self.norm(self.hidden(hidden))
            return self.leave(hidden - Synced.apply(hidden.mean(0)) / 2)

    train(side, Exchanging())


@feature("a process group of the model's own (`process_group=`)", OVERLAPS)
def own_group(side: Side) -> None:
    train(side, Net(), process_group=dist.new_group([0, 1]))


class Outcome(NamedTuple):
    """What a model may return beside a tensor."""

    logits: torch.Tensor
    parts: dict[str, Any]


@feature("outputs in tuples, dicts and lists, one of them a parameter", OVERLAPS)
def nested_outputs(side: Side) -> None:
    class Returning(Net):
        def forward(self, x: torch.Tensor) -> Outcome:
            return Outcome(super().forward(x), {"weights": [self.leave.weight, None], "name": "x"})

    def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
        inputs, targets = batch(step)
        outcome = model(inputs)
        penalty = outcome.parts["weights"][0].square().sum()
        return functional.cross_entropy(outcome.logits, targets) + 0.01 * penalty

    train(side, Returning(), loss, find_unused_parameters=True)


# ---------------------------------------------------------------------- the wrapper itself


@feature("attributes, buffers and submodules on the wrapper", OVERLAPS)
def attached(side: Side) -> None:
    ddp = side.wrap(Net(), loss_of)
    ddp.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    ddp.register_buffer("scale", torch.tensor(2.0))
    ddp.seen = []
    ddp.register_forward_hook(lambda *_: ddp.seen.append(side.step))
    optimizer = side.overlap(ddp, SGD(ddp.module.parameters(), lr=0.05, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        inputs, targets = batch(step)
        (ddp.scale * ddp.criterion(ddp(inputs), targets)).backward()
        optimizer.step()
    side.note("seen", ddp.seen, list(ddp.state_dict()))
    side.finish(ddp, optimizer)


@feature("`_set_static_graph()` after wrapping, a layer that is used twice", OVERLAPS)
def static_later(side: Side) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.enter(x))
            for _ in range(2):
                hidden = checkpoint(self.hidden, hidden, use_reentrant=True)
            return self.leave(self.norm(hidden))

    ddp = side.wrap(Twice(), loss_of)
    ddp._set_static_graph()
    optimizer = side.overlap(ddp, SGD(ddp.parameters(), lr=0.05, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("the wrapper's `module` replaced by one around it", OVERLAPS)
def replaced(side: Side) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.extra = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    ddp = side.wrap(Net(), loss_of)
    optimizer = side.overlap(ddp, SGD(ddp.parameters(), lr=0.05, momentum=0.9))
    ddp.module = Around(ddp.module)
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("tensor parallelism in the model (`device_mesh=`)", SYNCHRONOUS)
def tensor_parallel(side: Side) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = side.wrap(net, loss_of, device_mesh=mesh["dp"])
    parameters = list(ddp.parameters())  # which the module has no more once it has run
    optimizer = side.overlap(ddp, SGD(parameters, lr=0.05, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    side.note("parameters", parameters)
    side.finish(ddp, optimizer)
