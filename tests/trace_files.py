"""Readers of other projects' measurements, for tests and benchmarks only.

The traces lie in ``../shared/data`` beside the project where a developer has them; a user's
checkout has no such folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from syncline.files.traces.pipedream import read_pipedream as read_graph
from syncline.plan.profile import Gradient, Operation, Phase, Profile

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
ESPRESSO = ("resnet50", "vgg16", "bert", "gpt2", "LSTM")
PIPEDREAM = ("alexnet", "densenet121")


def read_espresso(path: Path) -> Profile:
    """Read a gradient-ready trace: elements and the microseconds since the tensor before.

    These traces have no forward pass. Here they get one, which is an assumption and no measurement:
    the forward operation of each tensor takes half of the tensor's gap in the backward pass (two
    thirds of the work of a layer is backward), in reverse order, and is the one that needs it.
    """
    tensors = json.loads(path.read_text())["tensors"]
    count = len(tensors)

    def op(tensor: dict[str, Any], phase: Phase, share: float, *after: int) -> Operation:
        return Operation(
            name=f"{phase} of {tensor['name']}",
            phase=phase,
            duration_s=tensor["gap_us"] * 1e-6 * share,
            after=tuple(sorted(set(after))),
        )

    forward = (
        op(t, "forward", 0.5, *([i - 1] if i else [])) for i, t in enumerate(reversed(tensors))
    )
    backward = (op(t, "backward", 1.0, count + i - 1, count - 1 - i) for i, t in enumerate(tensors))
    return Profile(
        model=f"espresso/{path.stem}",
        device="cuda",
        workers=1,
        iterations=1,
        operations=(*forward, *backward),
        gradients=tuple(
            Gradient(
                name=f"{i}.{t['name']}",
                elements=t["numel"],
                ready_after=count + i,
                needed_by=count - 1 - i,
            )
            for i, t in enumerate(tensors)
        ),
    )


def read_pipedream(path: Path) -> Profile:
    """Read an operator graph."""
    profile = read_graph(path).known_profile()
    return msgspec.structs.replace(profile, model=f"pipedream/{profile.model}", device="cuda")


def all_traces() -> list[Profile]:
    """Return every trace, or nothing where the folder is absent."""
    if not TRACES.is_dir():
        return []
    espresso = [read_espresso(TRACES / "espresso" / f"{name}.json") for name in ESPRESSO]
    pipedream = [read_pipedream(TRACES / "pipedream" / f"{name}.graph.txt") for name in PIPEDREAM]
    return espresso + pipedream
