"""Scripts whose other threads read while they train."""

from __future__ import annotations

import copy
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
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from tests.train.overlap.loop import ADAM, ADAMW, MAKERS, REFUSED, SHARES, TRAINS, Loop, no_shards
from tests.train.overlap.overlap_models import Net
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONIZES, SYNCHRONOUS, Side
from tests.train.overlap.parts import THREAD_READS, Part, Training, every


def _safetensors(t: Training) -> Any:
    return safetensors.torch.load(safetensors.torch.save(dict(t.net.named_parameters())))


READS = {**THREAD_READS, "safetensors": _safetensors}
AT_ANY_TIME = [name for name in READS if name != "p.grad"]
"""Without those that end in a segmentation fault under DDP, too, while backward runs."""


def in_a_thread(does: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(does, *args).result()


def reading(read: str) -> Part:
    return lambda t: t.note("read in a thread", in_a_thread(READS[read], t))


class Asking(nn.Module):
    """Waits, in its forward pass, for a thread that reads the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.enter = Net(), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        scale = in_a_thread(lambda: self.net.leave.weight.detach().abs().max())
        output: torch.Tensor = self.net(hidden / scale)
        return output


def ask_in_hooks(t: Training) -> None:
    weight = t.net.enter.weight

    def read(_: Any) -> None:
        t.note("hook", in_a_thread(lambda: weight.detach().sum()))

    for parameter in t.parameters:
        parameter.register_hook(read)
        parameter.register_post_accumulate_grad_hook(read)


def copied_until_the_next_step(side: Side) -> None:
    t = Loop(make=ADAMW).begin(side)
    mean = AveragedModel(t.net)
    of_mean = Training(side, mean)
    with ThreadPoolExecutor(3) as pool:
        for step in side.steps:
            weights = READS["p.detach().clone()"]
            reads = [(weights, t), (READS["optimizer.state"], t), (weights, of_mean)]
            copies = [pool.submit(*each) for each in reads if step % 10 == 0]
            t.optimizer.zero_grad()
            t.backward(t.loss())
            t.note("copies", [each.result() for each in copies])
            t.optimizer.step()
            mean.update_parameters(t.net)
    side.finish(t.ddp, t.optimizer)


def async_save(side: Side) -> None:
    t = Loop(make=ADAM).begin(side)
    own = dist.new_group()  # as for any collectives of another thread
    with _shared_folder() as folder:
        saved = None
        for step in side.steps:
            t.optimizer.zero_grad()
            t.backward(t.loss())
            t.optimizer.step()
            if step % 10 == 4:
                state = {"model": t.net.state_dict(), "optimizer": t.optimizer.state_dict()}
                saved = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=own)
                expected = copy.deepcopy(state["model"])
            if step % 10 == 8:
                assert saved is not None
                saved.result()
                found = {name: torch.zeros_like(value) for name, value in expected.items()}
                dcp.load({"model": found}, checkpoint_id=f"{folder}/{step - 4}")
                t.note("saved", found)
    side.finish(t.ddp, t.optimizer)


@contextmanager
def _shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()  # all have read


def reads_without_end(side: Side, make: str, reads: list[str]) -> None:
    """Train while a thread for each read does nothing else; their values are not compared."""
    t = Loop(make=MAKERS[make]).begin(side)
    scheduler = ExponentialLR(t.optimizer, 0.97)
    mean = AveragedModel(t.net)
    for name in reads:
        side.read_in_thread(partial(READS[name], t))
    side.read_in_thread(lambda: [p.clone() for p in mean.parameters()])
    for step in side.steps:
        t.optimizer.zero_grad()
        t.backward(t.loss())
        if step % 5 == 0:
            t.note("norm", nn.utils.get_total_norm(t.gradients))
        t.optimizer.step()
        scheduler.step()
        mean.update_parameters(t.net)
    t.note("mean", list(mean.parameters()))
    side.finish(t.ddp, t.optimizer)


AWAITED = {
    "torch.save": REFUSED,
    "safetensors": SHARES,
    "p.grad": REFUSED,
    "optimizer.state": SHARES,
    "copy.deepcopy(module)": TRAINS,
}  # reads, and what becomes of them where the optimizer is sharded
SCENARIOS = {
    **{
        f"`{name}` in a thread after `step`, which the script waits for": Loop(
            SYNCHRONIZES, sharded, make=ADAMW, after=reading(name)
        )
        for name, sharded in AWAITED.items()
    },
    "the same, every tenth step": no_shards(make=ADAMW, after=every(10, reading("torch.save"))),
    "gradients read in a thread before `step`, which the script waits for": Loop(
        SYNCHRONOUS, before=reading("p.grad")
    ),
    "a thread that the forward pass waits for, and that reads parameters": Loop(model=Asking),
    "threads that hooks of the backward pass wait for, and that read parameters": Loop(
        start=ask_in_hooks
    ),
    "a thread that makes the step, which the script waits for": Loop(
        update=lambda t: in_a_thread(t.optimizer.step)
    ),
    "weights, state and averages copied in a thread until the next `step`": Loop(
        OVERLAPS, SHARES, whole=copied_until_the_next_step
    ),
    "`torch.distributed.checkpoint.async_save` after `step`, every tenth step": no_shards(
        whole=async_save
    ),
}
