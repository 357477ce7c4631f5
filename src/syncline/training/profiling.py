"""Profiling one of our models: a worker process of ``syncline profile``.

``python -m syncline.training.profiling SOCKET STORE``. Its order is a
:class:`~syncline.training.config.TrainingConfig`, of which ``steps`` is the number of iterations
that give the durations, and ``report`` the folder of the results.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from syncline.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.measure.profiler import profile
from syncline.measure.statistics import lower_quartile
from syncline.model.fit import fit_cost_curve
from syncline.model.network import Measurement, Network
from syncline.model.profile import Profile
from syncline.report.bundle import DOCUMENTS
from syncline.traces.layers import layers_of
from syncline.training.config import TrainingConfig
from syncline.training.data.sampling import seed_from
from syncline.training.group import Worker, process_group
from syncline.training.task import Task, task_of
from syncline.training.worker import lost_peers_as_errors, main
from syncline.training.wrap import sgd
from syncline.workers import leave

__all__ = ["run_profiling"]

OBSERVED = 3
"""One iteration in so many gives durations; the others, the share of single operations and what
observing costs (:func:`syncline.measure.profiler.profile`)."""
PROBE_S = 1.0


def run_profiling(config: TrainingConfig, store: str | None = None) -> None:
    """Measure the model's computation and the cost of its messages, apart from each other.

    All workers take part; rank 0 writes ``profile.json`` and ``network.json``. The model is not
    wrapped for data-parallel training, so nothing is in flight while it computes. Messages of
    exactly the bytes of each layer are timed, besides the sizes of the network probe and as often
    as the iterations, and the curve is fitted to all of them.

    Raises:
        UserError: the data do not fit, or the launcher started other workers than were asked for.
        PeerError: another worker was lost.
    """
    assert config.steps is not None
    iterations = config.steps
    with (
        lost_peers_as_errors(config.timeout_s),
        process_group(config, store) as worker,
    ):
        found = _profile(config, worker, iterations)
        network = _network(found, worker, iterations)
        if worker.rank == 0:
            folder = Path(config.report)
            found.save(folder / DOCUMENTS["profile"][0])
            network.save(folder / DOCUMENTS["network"][0])


def _profile(config: TrainingConfig, worker: Worker, iterations: int) -> Profile:
    task = task_of(config)
    torch.manual_seed(config.seed)
    module = task.build().to(worker.device)
    torch.manual_seed(seed_from(config.seed, worker.rank))
    with worker.autocast(config.precision):
        return profile(
            module,
            _batches(task, worker),
            _loss,
            optimizer=sgd(module, config),
            iterations=iterations * OBSERVED,
            name=config.model,
        )


def _batches(task: Task, worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        for step in task.steps(epoch, worker):
            for batch in step:
                yield batch.inputs, batch.targets


def _loss(output: Tensor | tuple[Tensor, object], targets: Tensor) -> Tensor:
    """Return the cross entropy of a class for each image, or of a token for each place."""
    logits = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _network(found: Profile, worker: Worker, iterations: int) -> Network:
    largest = min(max(found.gradient_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
    network = probe(
        device=worker.device, largest_bytes=1 << (largest - 1).bit_length(), seconds=PROBE_S
    )
    if worker.workers == 1:
        return network
    # In turns, so that each size meets the machine in the same states as every other.
    layers = {layer.gradient_bytes for layer in layers_of(found).layers} - {0}
    sizes = sorted(layers | {point.size_bytes for point in network.points})
    points = _message_times(sizes, worker, iterations)
    fit = fit_cost_curve(points)
    return msgspec.structs.replace(
        network,
        all_reduce=fit.curve,
        points=tuple(points),
        fit_error=fit.error,
        fit_error_max=fit.error_max,
    )


def _message_times(sizes: Sequence[int], worker: Worker, repetitions: int) -> list[Measurement]:
    """Time all-reduces of each size in turns; return what the slowest worker took, as the probe."""
    buffer = torch.zeros(-(-max(sizes) // 4), dtype=torch.float32, device=worker.device)
    times: list[list[float]] = [[] for _ in sizes]
    for repetition in range(repetitions + 1):
        for size, taken in zip(sizes, times, strict=True):
            message = buffer[: -(-size // 4)]
            start = time.perf_counter()
            dist.all_reduce(message)
            if worker.device.type == "cuda":
                torch.cuda.synchronize(worker.device)
            if repetition:  # the first warms up
                taken.append(time.perf_counter() - start)
    return [
        Measurement(
            size_bytes=size, time_s=lower_quartile(worker.largest(taken)), repetitions=repetitions
        )
        for size, taken in zip(sizes, times, strict=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1:], run_profiling)
    leave()
