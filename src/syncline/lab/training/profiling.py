"""Profiling one of our models: a worker process of ``syncline profile``.

``python -m syncline.lab.training.profiling SOCKET STORE``. Its order is a
:class:`~syncline.lab.training.config.TrainingConfig`, of which ``steps`` is the number of
iterations that give the durations, and ``report`` the folder of the results.
"""

from __future__ import annotations

import gzip
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from syncline.files.report.bundle import DOCUMENTS
from syncline.files.traces.layer_table import HEADER, layer_rows
from syncline.files.traces.layers import Layer, LayerTable, layers_of
from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.data.sampling import seed_from
from syncline.lab.training.group import Worker, process_group
from syncline.lab.training.replica import sgd
from syncline.lab.training.task import task_of
from syncline.lab.training.worker import main
from syncline.plan.files import write_atomically
from syncline.plan.fit import fit_cost_curve
from syncline.plan.network import Measurement, Network
from syncline.plan.profile import Profile
from syncline.train.measure.exchange import telling_lost_peers
from syncline.train.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.train.measure.profiler import profile, trainable_parameters
from syncline.train.measure.statistics import lower_quartile

OBSERVED = 3
"""One in this many iterations gives durations. The others give the shares of single operations and
the cost of observing (:func:`syncline.train.measure.profiler.profile`)."""
PROBE_S = 1.0
LAYERS = "layers.txt.gz"
TIME_FORMAT = ".0f"  # whole microseconds: 100 iterations of ResNet-50 take 180 kB


def run_profiling(config: TrainingConfig, store: str | None = None) -> None:
    """Measure the model's computation and the cost of its messages, apart from each other.

    All workers take part; rank 0 writes ``profile.json``, ``network.json`` and
    ``layers.txt.gz``, the layer table of its single iterations. The model is not wrapped for
    data-parallel training, so nothing is in flight while it computes: in the iterations that give
    the durations, gradients are averaged between the backward pass and the update, layer by layer.
    The curve is fitted to the times of these messages and to those of the network probe.
    """
    assert config.steps is not None
    doing, rank = f"while profiling (--timeout {config.timeout_s:g})", os.environ.get("RANK")
    telling = telling_lost_peers(doing, rank=rank, then="profile again")
    with telling, process_group(config, store) as worker:
        found, exchange, singles = _profile(config, worker, config.steps)
        network = _network(found, exchange, worker)
        if worker.rank == 0:
            folder = Path(config.report)
            found.save(folder / DOCUMENTS["profile"][0])
            network.save(folder / DOCUMENTS["network"][0])
            lines = ["\t".join(HEADER)]
            for index, single in singles:
                messages_s = [exchange.seconds(layer, index) for layer in single.layers]
                lines += layer_rows(single, messages_s, TIME_FORMAT)
            packed = gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)
            write_atomically(folder / LAYERS, packed)


def _profile(
    config: TrainingConfig, worker: Worker, iterations: int
) -> tuple[Profile, _Exchange, list[tuple[int, LayerTable]]]:
    """Return the profile, the messages, and this rank's iterations: their numbers and layers."""
    task = task_of(config)
    torch.manual_seed(config.seed)
    module = task.build().to(worker.device)
    torch.manual_seed(seed_from(config.seed, worker.rank))
    steps = itertools.chain.from_iterable(task.steps(epoch, worker) for epoch in itertools.count())
    batches = ((batch.inputs, batch.targets) for step in steps for batch in step)
    optimizer = sgd(module, config)
    singles: list[tuple[int, LayerTable]] = []
    with worker.autocast(config.precision):
        # A first short profile tells which gradients belong to one layer.
        first = profile(module, batches, _loss, optimizer=optimizer, iterations=OBSERVED)
        exchange = _Exchange(module, layers_of(first).layers, worker)
        found = profile(
            module,
            batches,
            _loss,
            optimizer=optimizer,
            iterations=iterations * OBSERVED,
            name=config.model,
            exchange=exchange if worker.workers > 1 else None,
            each=lambda index, single: singles.append((index, layers_of(single))),
        )
    exchange.synchronize()
    return found, exchange, singles


class _Exchange:
    """Averages the gradients of a module, one message per layer in turn, and times the messages.

    The last layer's message goes first, after a barrier at the end of the backward pass. So no time
    includes waiting for another worker.
    """

    def __init__(self, module: nn.Module, layers: Sequence[Layer], worker: Worker) -> None:
        parameters = trainable_parameters(module)
        self._worker = worker
        self._parts = {
            tuple(layer.gradients): [parameters[name] for name in layer.gradients]
            for layer in reversed(layers)
            if layer.gradients
        }
        self.times_s: dict[tuple[str, ...], list[float]] = {names: [] for names in self._parts}
        """Each message's times, by iteration; after :meth:`synchronize`, on the slowest worker."""

    def __call__(self) -> None:
        self._worker.barrier()
        for names, parts in self._parts.items():
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parts]
            message = torch.cat([gradient.flatten() for gradient in gradients])
            self._worker.synchronize()
            start = time.perf_counter()
            dist.all_reduce(message)
            self._worker.synchronize()
            self.times_s[names].append(time.perf_counter() - start)
            message /= self._worker.workers
            pieces = message.split([gradient.numel() for gradient in gradients])
            for parameter, piece in zip(parts, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def synchronize(self) -> None:
        """Replace the times by those of the slowest worker; all workers must call this."""
        for names, times_s in self.times_s.items():
            self.times_s[names] = self._worker.largest(times_s)

    def seconds(self, layer: Layer, iteration: int) -> float:
        """Return the time of a layer's message in an iteration; 0 if nothing was sent."""
        times_s = self.times_s.get(tuple(layer.gradients))
        return times_s[iteration] if times_s else 0.0

    def points(self) -> list[Measurement]:
        """Return the times by message size, as the network probe does."""
        by_size: dict[int, list[float]] = {}
        for names, times_s in self.times_s.items():
            size_bytes = sum(parameter.nbytes for parameter in self._parts[names])
            by_size.setdefault(size_bytes, []).extend(times_s)
        return [
            Measurement(size_bytes=size, time_s=lower_quartile(times_s), repetitions=len(times_s))
            for size, times_s in by_size.items()
            if times_s
        ]


def _loss(output: Tensor | tuple[Tensor, object], targets: Tensor) -> Tensor:
    """Return the cross entropy of a class for each image, or of a token for each place."""
    logits = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _network(found: Profile, exchange: _Exchange, worker: Worker) -> Network:
    largest = min(max(found.gradient_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
    network = probe(
        device=worker.device, largest_bytes=1 << (largest - 1).bit_length(), seconds=PROBE_S
    )
    if worker.workers == 1:
        return network
    own = {point.size_bytes: point for point in (*network.points, *exchange.points())}
    points = tuple(own[size] for size in sorted(own))
    fit = fit_cost_curve(points)
    return msgspec.structs.replace(
        network,
        all_reduce=fit.curve,
        points=points,
        fit_error=fit.error,
        fit_error_max=fit.error_max,
    )


if __name__ == "__main__":
    main(run_profiling)
