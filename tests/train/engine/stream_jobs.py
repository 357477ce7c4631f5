"""What workers run to test the CUDA paths of the engine on recorded streams."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.train import engine_executor
from syncline.train.engine.dense_transport import CudaDenseTransport
from syncline.train.engine.engine import Engine
from tests.streams import HOST, FakeNccl, Place, recorded_streams
from tests.train.overlap.features import features
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import Ours, Script, Side, Stock, differences, patched

BATCH = 4


def clips_and_accumulates(side: Side) -> None:
    """Train with clipping by the norm, and now and then by gradients added up over two passes."""
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss_of(model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * side.step + side.rank)
        loss: torch.Tensor = model(torch.randn(BATCH, 6, generator=generator)).square().mean()
        return loss

    ddp = side.wrap(net, loss_of)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, foreach=False)
    optimizer = side.overlap(ddp, inner)
    for step in side.steps:
        optimizer.zero_grad()
        if step % 4 == 3:
            with ddp.no_sync():
                loss_of(ddp).backward()
        loss = loss_of(ddp)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1, foreach=False)
        optimizer.step()
        side.note("loss", loss)
    side.synchronize(ddp)
    side.finish(ddp, inner)


def on_streams(
    row: str | None, style: Style, length: int, dropped: Place | None = None
) -> dict[str, Any]:
    """Run a row of the table of features on recorded streams, and under DDP on the CPU.

    Without a row, run the script above. At the place ``dropped`` waits are left out.
    """
    script: Script = clips_and_accumulates if row is None else features()[row].script
    ours, stock = Ours(style), Stock()
    ours.length = stock.length = length
    # A norm by messages is added up in another order.
    ours.near = stock.near = style.norm is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        with recorded_streams(dropped) as recorder:
            streams = {
                (engine_executor, "transport_for"): lambda group, _device: CudaDenseTransport(
                    FakeNccl(group, recorder), HOST
                ),
                # The host never finds a message complete, so that only events order what follows.
                (Engine, "arrived"): lambda _engine, _tensor: False,
            }
            with patched(streams), ours.observed():
                script(ours)
                ours.close()
        if dropped is None:
            torch.manual_seed(1)
            script(stock)
    return {
        "differences": differences(ours, stock) if dropped is None else [],
        "races": list(dict.fromkeys(recorder.races)),
        "waits": sorted(recorder.waits),
    }


def unnoticed(style: Style, length: int) -> list[Place]:
    """Return the places whose waits can be left out on all ranks without a race on any."""
    waits = on_streams(None, style, length)["waits"]
    found = []
    for place in waits:
        races = torch.tensor(len(on_streams(None, style, length, place)["races"]))
        dist.all_reduce(races)
        if not races:
            found.append(place)
    return found
