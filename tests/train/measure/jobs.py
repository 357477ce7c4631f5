"""What the workers of the tests in this folder run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from syncline.train.measure.exchange import gather_json, gather_numbers, share_json
from syncline.train.measure.probe import _Session, probe
from syncline.train.measure.profiler import profile


def exchanges() -> dict[str, Any]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    return {
        "gathered": gather_json({"rank": rank, "text": "x" * (10 * rank)}, group, cpu),
        "numbers": gather_numbers([rank, 0.5 * rank], group, cpu),
        "empty": gather_json([], group, cpu),
        "shared": share_json({"from": rank, "text": "größe"}, group, cpu),
    }


def probes() -> str:
    return probe(largest_bytes=1 << 20, seconds=0.05, name="here").to_json()


def link_beside_a_device() -> set[str]:
    """Measure messages of a group whose tensors are on a device; say where messages are."""
    group = dist.group.WORLD
    assert group is not None
    session = _Session(group, torch.device("meta"))
    places = set()
    make = dist.P2POp

    def noted(way: Any, message: torch.Tensor, *given: Any, **named: Any) -> dist.P2POp:
        places.add(message.device.type)
        return make(way, message, *given, **named)

    with mock.patch.object(session, "_slowest", list), mock.patch.object(dist, "P2POp", noted):
        session.link(1 << 16)
    return places


def probes_subgroup() -> tuple[int, str]:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 1, ""
    found = probe(group, largest_bytes=1 << 16, seconds=0.02)
    return found.workers, found.to_json()


def profiles() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    batches = [(torch.randn(4, 8), torch.randint(3, (4,)))]
    return profile(model, batches, cross_entropy, iterations=3).to_json()
