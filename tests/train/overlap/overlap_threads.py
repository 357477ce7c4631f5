"""Scripts whose other threads read while they train."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from tests.train.overlap.features import feature
from tests.train.overlap.overlap_loops import begin
from tests.train.overlap.overlap_models import Net, loss_of
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side

__all__ = ["AT_ANY_TIME", "MAKERS", "READS", "reads_without_end"]

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: AdamW(p, lr=0.01),
}
Read = Callable[[Any, torch.optim.Optimizer], Any]
"""Takes the wrapped model and its optimizer."""


def _torch_save(ddp: Any, optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    return [saved["model"], saved["optimizer"]["state"]]


def _safetensors(ddp: Any, _: torch.optim.Optimizer) -> Any:
    return safetensors.torch.load(safetensors.torch.save(dict(ddp.module.named_parameters())))


def _states(_: Any, optimizer: torch.optim.Optimizer) -> Any:
    return [
        value.clone() if isinstance(value, torch.Tensor) else value
        for state in list(optimizer.state.values())
        for value in list(state.values())
    ]


READS: dict[str, Read] = {
    "p.clone()": lambda ddp, _: [p.detach().clone() for p in ddp.parameters()],
    "p.data.clone()": lambda ddp, _: [p.data.clone() for p in ddp.parameters()],
    "p.grad": lambda ddp, _: [g.clone() for p in ddp.parameters() if (g := p.grad) is not None],
    "optimizer.state": _states,
    "optimizer.state_dict()": lambda _, o: copy.deepcopy(o.state_dict()),
    "model.state_dict()": lambda ddp, _: copy.deepcopy(ddp.state_dict()),
    "copy.deepcopy(module)": lambda ddp, _: copy.deepcopy(ddp.module).state_dict(),
    "torch.save": _torch_save,
    "safetensors": _safetensors,
}
AT_ANY_TIME = [name for name in READS if name != "p.grad"]
"""Without those that end in a segmentation fault under DDP, too, while backward runs."""


# ---------------------------------------------------------------------- the script waits


def awaited(side: Side, read: Read, *, every: int = 1) -> None:
    ddp, optimizer = begin(side, MAKERS["adamw"])
    with ThreadPoolExecutor(1) as pool:
        for step in side.steps:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
            if step % every == every - 1:
                side.note("read in a thread", pool.submit(read, ddp, optimizer).result())
    side.finish(ddp, optimizer)


for _name, _happens in {
    "torch.save": SYNCHRONIZES,
    "safetensors": SYNCHRONIZES,
    "p.grad": SYNCHRONIZES,
    "optimizer.state": SYNCHRONIZES,
    "copy.deepcopy(module)": SYNCHRONIZES,
}.items():
    feature(f"`{_name}` in a thread after `step`, which the script waits for", _happens)(
        partial(awaited, read=READS[_name])
    )
feature("the same, every tenth step", OVERLAPS)(
    partial(awaited, read=READS["torch.save"], every=10)
)


@feature("gradients read in a thread before `step`, which the script waits for", SYNCHRONOUS)
def gradients_before(side: Side) -> None:
    ddp, optimizer = begin(side)
    with ThreadPoolExecutor(1) as pool:
        for step in side.steps:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            side.note("gradients", pool.submit(READS["p.grad"], ddp, optimizer).result())
            optimizer.step()
    side.finish(ddp, optimizer)


class Asking(nn.Module):
    """Waits, in its forward pass, for a thread that reads the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.enter = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        with ThreadPoolExecutor(1) as pool:
            scale = pool.submit(lambda: self.net.leave.weight.detach().abs().max()).result()
        output: torch.Tensor = self.net(hidden / scale)
        return output


@feature("a thread that the forward pass waits for, and that reads parameters", OVERLAPS)
def inside_forward(side: Side) -> None:
    ddp = side.wrap(Asking(), loss_of)
    optimizer = side.overlap(ddp, SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        side.note("loss", loss)
        loss.backward()
        optimizer.step()
    side.finish(ddp, optimizer)


@feature("threads that hooks of the backward pass wait for, and that read parameters", OVERLAPS)
def inside_hooks(side: Side) -> None:
    ddp, optimizer = begin(side)
    weight = ddp.module.enter.weight
    with ThreadPoolExecutor(1) as pool:

        def read(_: Any) -> None:
            side.note("hook", pool.submit(lambda: weight.detach().sum()).result())

        for parameter in ddp.parameters():
            parameter.register_hook(read)
            parameter.register_post_accumulate_grad_hook(read)
        for step in side.steps:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
    side.finish(ddp, optimizer)


@feature("a thread that makes the step, which the script waits for", OVERLAPS)
def steps_in_a_thread(side: Side) -> None:
    ddp, optimizer = begin(side)
    with ThreadPoolExecutor(1) as pool:
        for step in side.steps:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            pool.submit(optimizer.step).result()
    side.finish(ddp, optimizer)


# ---------------------------------------------------------------------- the script trains on


@feature("weights, state and averages copied in a thread until the next `step`", OVERLAPS)
def until_the_next_step(side: Side) -> None:
    ddp, optimizer = begin(side, MAKERS["adamw"])
    mean = AveragedModel(ddp.module)
    with ThreadPoolExecutor(3) as pool:
        for step in side.steps:
            if step % 10:
                copies = []
            else:
                copies = [
                    pool.submit(READS["p.clone()"], ddp, optimizer),
                    pool.submit(READS["optimizer.state"], ddp, optimizer),
                    pool.submit(READS["p.clone()"], mean, optimizer),
                ]
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            side.note("copies", [each.result() for each in copies])
            optimizer.step()
            mean.update_parameters(ddp.module)
    side.finish(ddp, optimizer)


@feature("`torch.distributed.checkpoint.async_save` after `step`, every tenth step", OVERLAPS)
def async_save(side: Side) -> None:
    ddp, optimizer = begin(side, partial(Adam, lr=0.01))
    own = dist.new_group()  # as for any collectives of another thread
    with _shared_folder() as folder:
        saved = None
        for step in side.steps:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
            if step % 10 == 4:
                state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
                saved = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=own)
                expected = copy.deepcopy(state["model"])
            if step % 10 == 8:
                assert saved is not None
                saved.result()
                side.note("saved", _loaded(f"{folder}/{step - 4}", expected))
    side.finish(ddp, optimizer)


@contextmanager
def _shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()  # all have read


def _loaded(folder: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(value) for name, value in like.items()}
    dcp.load({"model": found}, checkpoint_id=folder)
    return found


def reads_without_end(side: Side, make: str, reads: list[str]) -> None:
    """Train while a thread for each read does nothing else; their values are not compared."""
    ddp, optimizer = begin(side, MAKERS[make])
    scheduler = ExponentialLR(optimizer, 0.97)
    mean = AveragedModel(ddp.module)
    for name in reads:
        side.read_in_thread(partial(READS[name], ddp, optimizer))
    side.read_in_thread(lambda: [p.clone() for p in mean.parameters()])
    for step in side.steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, step)
        loss.backward()
        side.note("loss", loss)
        if step % 5 == 0:
            side.note("norm", nn.utils.get_total_norm(p.grad for p in ddp.parameters()))
        optimizer.step()
        scheduler.step()
        mean.update_parameters(ddp.module)
    side.note("mean", list(mean.parameters()))
    side.finish(ddp, optimizer)
