"""The peers of ``step_time`` as contestants: what else exchanges gradients, each as its users do.

Every entry is made anew for every lap. The parameters are equal on all ranks to begin with, so
where a peer would send them round first, and lets itself be stopped, it does not.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.step_models import Model
from syncline.lab.replay.interleaved import Contestant, ddp_baseline
from syncline.lab.replay.model import Replayed, ReplayedOptimizer
from syncline.lab.testbed.cluster import DEVICE

__all__ = ["PEERS", "Peer"]

BYTES_PER_ELEMENT = 4
BYTES_PER_MIB = 1024 * 1024
A_MOMENT_S = 1e-6
"""Long enough to rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another way to train, that is measured beside ours."""

    name: str
    title: str
    contestant: Callable[[Model], Contestant]
    package: str | None = None
    """What must be importable; see ``tools/bench-peers``."""
    exact: bool = True
    """Whether it exchanges gradients in full precision."""


def _alone(_: Model) -> Contestant:
    """Return what exchanges nothing: whether the emulated computation takes as long as it says."""
    return Contestant(name="alone", wrap=lambda module, optimizer: (module, optimizer))


def _ddp(name: str, **arguments: Any) -> Callable[[Model], Contestant]:
    return lambda _: ddp_baseline(name, **arguments)


def _bf16(_: Model) -> Contestant:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    plain = ddp_baseline("bf16")

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        model, optimizer = plain.wrap(module, optimizer)
        # By its name torch lets the hook pass with NCCL only; Gloo sums these numbers as well.
        model.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return model, optimizer

    return Contestant(name="bf16", wrap=wrap)


def _powersgd(name: str, model: Model, *, rank: int = 1) -> Contestant:
    """Return PowerSGD with one bucket, by default of rank 1, as torch has it.

    With several, the hooks of two buckets start collectives in the order in which the first ones
    finish, which differs between ranks: Gloo then ends with a mismatch of sizes.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    # One bucket more than holds all of it, as the cap closes a bucket.
    whole_mib = 2 * model.elements * BYTES_PER_ELEMENT / BYTES_PER_MIB + 1
    plain = ddp_baseline(name, bucket_cap_mb=whole_mib)

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        model, optimizer = plain.wrap(module, optimizer)
        # The first compressed iteration is the second, the earliest that it allows.
        state = PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook)
        return model, optimizer

    return Contestant(name=name, wrap=wrap)


def _fsdp2(name: str, model: Model, *, reshards: bool = True) -> Contestant:
    """Return FSDP2, each block sharded by itself, by default again after the forward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks():
            modules = [module.get_submodule(name) for name in block]
            fully_shard(modules, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh)
        return module, _again(module, optimizer)  # of the sharded parameters

    return Contestant(name=name, wrap=wrap)


def _again(module: Replayed, optimizer: Optimizer) -> Optimizer:
    """Return such an optimizer of the parameters that the module has now."""
    if isinstance(optimizer, ReplayedOptimizer):
        return module.optimizer()
    return type(optimizer)(module.parameters(), lr=optimizer.defaults["lr"])


def _zero_redundancy(_: Model) -> Contestant:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain = ddp_baseline("zero-redundancy")

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        model, optimizer = plain.wrap(module, optimizer)
        if isinstance(optimizer, ReplayedOptimizer):
            given = {"work": module.work}
        else:
            given = {"lr": optimizer.defaults["lr"]}
        return model, ZeroRedundancyOptimizer(module.parameters(), type(optimizer), **given)

    return Contestant(name="zero-redundancy", wrap=wrap)


def _zero1(_: Model) -> Contestant:
    import deepspeed

    # What this does is to send the parameters round.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda _: None

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine, deferring, _, _ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={
                "train_batch_size": dist.get_world_size(),
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,  # ours, which only takes its time
            },
        )
        return engine, deferring

    def step(engine: Any, _: Any) -> None:
        engine.backward(engine())
        engine.step()

    return Contestant(
        name="zero1", wrap=wrap, step=step, synchronize=lambda engine: engine.destroy()
    )


def _hvd(_: Model) -> Contestant:
    """Return Horovod with its defaults, started and shut down in every lap.

    Its threads negotiate a thousand times a second for as long as it runs, and would disturb
    others.
    """
    import horovod.torch as hvd

    def wrap(module: Replayed, optimizer: Optimizer) -> tuple[Any, Any]:
        _start_horovod()
        names = list(module.named_parameters())
        return module, hvd.DistributedOptimizer(optimizer, named_parameters=names)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.synchronize()
        # It waits by asking again and again, and so never rests, which is what the emulated device
        # takes for waiting.
        time.sleep(A_MOMENT_S)
        with optimizer.skip_synchronize():
            optimizer.step()

    def synchronize(_: Any) -> None:
        hvd.shutdown()
        _stop_server()

    return Contestant(name="hvd", wrap=wrap, step=step, synchronize=synchronize)


_servers: list[Any] = []


def _start_horovod() -> None:
    """Bring Horovod up without its launcher: rank 0 keeps the server where its ranks meet."""
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = RendezvousServer(0)
        port[0] = server.start()
        hosts = ",".join(f"host{number}:1" for number in range(ranks))
        server.init(get_host_assignments(parse_hosts(hosts), ranks))
        _servers.append(server)
    dist.broadcast(port, 0)
    os.environ.update(
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(ranks),
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
        HOROVOD_CROSS_RANK=str(rank),
        HOROVOD_CROSS_SIZE=str(ranks),
        HOROVOD_HOSTNAME=f"host{rank}",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE=DEVICE,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=os.environ["MASTER_ADDR"],
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(int(port)),
    )
    hvd.init()


def _stop_server() -> None:
    dist.barrier()
    while _servers:
        _servers.pop().stop()


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="alone", title="no exchange", contestant=_alone),
        Peer(name="ddp", title="DDP (25 MiB)", contestant=_ddp("ddp")),
        Peer(name="ddp-1mb", title="DDP, 1 MB", contestant=_ddp("ddp-1mb", bucket_cap_mb=1)),
        Peer(name="ddp-5mb", title="DDP, 5 MB", contestant=_ddp("ddp-5mb", bucket_cap_mb=5)),
        Peer(
            name="ddp-100mb", title="DDP, 100 MB", contestant=_ddp("ddp-100mb", bucket_cap_mb=100)
        ),
        Peer(name="bf16", title="DDP + bf16 hook", contestant=_bf16, exact=False),
        Peer(
            name="powersgd",
            title="DDP + PowerSGD",
            contestant=functools.partial(_powersgd, "powersgd"),
            exact=False,
        ),
        Peer(
            name="powersgd-2",
            title="DDP + PowerSGD, rank 2",
            contestant=lambda model: _powersgd("powersgd-2", model, rank=2),
            exact=False,
        ),
        Peer(name="zero-redundancy", title="DDP + ZeroRedundancy", contestant=_zero_redundancy),
        Peer(name="fsdp2", title="FSDP2", contestant=functools.partial(_fsdp2, "fsdp2")),
        Peer(
            name="fsdp2-whole",
            title="FSDP2, whole till backward",
            contestant=lambda model: _fsdp2("fsdp2-whole", model, reshards=False),
        ),
        Peer(name="zero1", title="DeepSpeed ZeRO-1", contestant=_zero1, package="deepspeed"),
        Peer(name="hvd", title="Horovod", contestant=_hvd, package="horovod.torch"),
    )
}
"""By name, in the order of the table."""
