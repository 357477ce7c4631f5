"""What ``syncline advise`` does in the processes of a script: probe, observe and advise."""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from syncline.files.report.advice import advice, print_advice
from syncline.files.report.bundle import Bundle
from syncline.files.report.page import save
from syncline.plan.advice import RankFacts
from syncline.plan.planners.auto import choose
from syncline.torch_private import TorchDDP
from syncline.train.ddp import DistributedDataParallel
from syncline.train.launched.request import Request
from syncline.train.log import logger
from syncline.train.measure.exchange import gather_json
from syncline.train.measure.interfaces import interface_used, segments
from syncline.train.measure.probe import probe
from syncline.train.measure.statistics import median

PROBED_S = 5.0  # approximate time of the network probe
LINK_BYTES = 1 << 20
LINK_REPETITIONS = 5
ASK_EVERY = 5  # iterations between the ranks' joint checks of whether the time is over


class Observation:
    """Observes the training of one wrapped model under DDP's buckets. All ranks make one.

    The wrapper is converted to ours, with the planner of DDP's buckets. It measures the
    baseline, profiles and records as usual, but tries no other plan and defers no updates.
    """

    def __init__(self, wrapper: TorchDDP, request: Request) -> None:
        self._request = request
        self._began_s = time.monotonic()
        self._seen = 0
        self._computing_s: list[float] = []
        self._group = wrapper.process_group
        self._rank = dist.get_rank(self._group)
        before = segments()
        logger.setLevel(logging.WARNING)  # no decision here is worth a log line
        self._tell("probing the network, then observing iterations under DDP")
        device = next(wrapper.module.parameters()).device
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._network = probe(self._group, device=self._device, limit_s=PROBED_S)
        self._link_s = self._time_link()
        sent, resent = (now - was for now, was in zip(segments(), before, strict=True))
        self._retransmitted = resent / sent if sent else 0.0
        self.model = DistributedDataParallel.convert(
            wrapper, planner="ddp", cache=False, network=self._network
        )

    def _time_link(self) -> float | None:
        """Return the seconds to receive 1 MiB from the previous rank while sending to the next."""
        workers = dist.get_world_size(self._group)
        if workers == 1:
            return None
        after, before = (self._rank + 1) % workers, (self._rank - 1) % workers
        is_gloo = dist.get_backend(self._group) == "gloo"
        place = torch.device("cpu") if is_gloo else self._device
        out, into = (torch.zeros(LINK_BYTES, dtype=torch.uint8, device=place) for _ in range(2))
        times = []
        for _ in range(1 + LINK_REPETITIONS):  # the first one connects
            dist.barrier(self._group)
            began_s = time.perf_counter()
            ways = [
                dist.P2POp(dist.irecv, into, group=self._group, group_peer=before),
                dist.P2POp(dist.isend, out, group=self._group, group_peer=after),
            ]
            works = dist.batch_isend_irecv(ways)
            works[0].wait()  # over NCCL there is one work for both
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - began_s)
            for work in works[1:]:
                work.wait()
        return min(times[1:])

    def poll(self) -> None:
        """Call before each training pass: in the end, advise, and exit unless training goes on."""
        runner = self.model._training.runner
        if runner is None:
            self._finish()
            return
        iteration = runner.tuning.iteration
        if iteration == self._seen:
            return
        self._seen = iteration
        timed = self.model._training.executor.sample(0.0)
        if timed is not None:
            self._computing_s.append(timed.computation_s)
        is_over = runner.stage.is_steady
        if not is_over and iteration % ASK_EVERY == 0:
            # Without a profile there is no advice, so that gets as long again.
            limit_s = self._request.seconds * (2 if self.model.profile is None else 1)
            late = float(time.monotonic() - self._began_s > limit_s)
            is_over = max(gather_json(late, self._group, self._device)) > 0
        if is_over:
            self._finish()

    def end(self) -> None:
        """Call when the script ends: if no advice was given, report what is known, on rank 0."""
        if not self.is_over and self._rank == 0:
            self._advise([])

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            print(f"syncline advise: {text}", file=sys.stderr, flush=True)

    @property
    def is_over(self) -> bool:
        """Whether advice was given and training goes on."""
        return self._seen < 0

    def _finish(self) -> None:
        self._seen = -1
        facts = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "interface": msgspec.to_builtins(interface_used()),
            "computing_s": median(self._computing_s) if self._computing_s else None,
            "link_s": self._link_s,
            "retransmitted": self._retransmitted,
        }
        everyone = gather_json(facts, self._group, self._device)
        if self._rank == 0:
            self._advise(msgspec.convert(everyone, list[RankFacts]))
        if not self._request.goes_on:
            sys.exit(0)

    def _advise(self, ranks: list[RankFacts]) -> None:
        model, folder = self.model, Path(self._request.folder)
        profile, network = model.profile, model.network
        if profile is None or network is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._network.save(folder / "network.json")
            self._tell(
                "too little was observed to profile an iteration; observe more of them, with "
                f"--seconds if the time was over; the network is in {folder / 'network.json'}"
            )
            return
        found = advice(profile, network, ranks)
        chosen = choose(profile, network)
        runner = model._training.runner
        bundle = Bundle(
            profile=profile,
            network=network,
            plan=chosen.plan,
            comparison=chosen.comparison,
            timeline_predicted=chosen.forecast.timeline,
            timeline_measured=runner.tuning.measured_timeline if runner else None,
        )
        page = save(bundle, folder)
        found.save(folder / "advice.json")
        if self._request.json:
            print(found.to_json(), end="", flush=True)
            return
        print_advice(Console(highlight=False), found)
        print(f"written: {page}, advice.json, profile.json, network.json", flush=True)
