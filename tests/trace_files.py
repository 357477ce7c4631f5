"""Readers of other projects' measurements, for tests and benchmarks only.

The traces lie in ``../shared/data`` beside the project where a developer has them; a user's
checkout has no such folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from syncline.model.profile import Gradient, Operation, Profile

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
ESPRESSO = ("resnet50", "vgg16", "bert", "gpt2", "LSTM")
PIPEDREAM = ("alexnet", "densenet121")


def read_espresso(path: Path) -> Profile:
    """Read a gradient-ready trace: elements and the microseconds since the tensor before."""
    tensors = json.loads(path.read_text())["tensors"]
    return Profile(
        model=f"espresso/{path.stem}",
        device="cuda",
        workers=1,
        iterations=1,
        operations=tuple(
            Operation(
                name=f"backward of {t['name']}",
                phase="backward",
                duration_s=t["gap_us"] * 1e-6,
                after=(i - 1,) if i else (),
            )
            for i, t in enumerate(tensors)
        ),
        gradients=tuple(
            Gradient(name=f"{i}.{t['name']}", elements=t["numel"], ready_after=i)
            for i, t in enumerate(tensors)
        ),
    )


_NODE = re.compile(
    r"^(?P<id>node\d+) -- (?P<desc>.*) -- forward_compute_time=(?P<f>[\d.]+), "
    r"backward_compute_time=(?P<b>[\d.]+), activation_size=[^,]*, parameter_size=(?P<p>[\d.]+)"
)


def read_pipedream(path: Path) -> Profile:
    """Read an operator DAG: times in ms, parameter sizes in bytes, tab-indented edges."""
    nodes: dict[str, re.Match[str]] = {}
    before: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            source, target = line.strip().split(" -- ")
            before.setdefault(target, []).append(source)
        elif match := _NODE.match(line):
            nodes[match["id"]] = match
    order: list[str] = []
    pending = set(nodes)
    while pending:
        free = sorted(
            (n for n in pending if all(b not in pending for b in before.get(n, []))),
            key=lambda n: int(n[4:]),
        )
        order += free
        pending -= set(free)
    operations = []
    at: dict[str, int] = {}
    for name in order:
        at[name] = len(operations)
        operations.append(
            Operation(
                name=f"{nodes[name]['desc']} ({name})",
                phase="data" if not before.get(name) else "forward",
                duration_s=float(nodes[name]["f"]) * 1e-3,
                after=tuple(at[b] for b in before.get(name, [])),
            )
        )
    gradients = []
    forward = dict(at)
    back: dict[str, int] = {}
    after: dict[str, list[str]] = {}
    for target, sources in before.items():
        for source in sources:
            after.setdefault(source, []).append(target)
    for name in reversed(order):
        if not before.get(name):
            continue
        back[name] = len(operations)
        operations.append(
            Operation(
                name=f"backward of {nodes[name]['desc']} ({name})",
                phase="backward",
                duration_s=float(nodes[name]["b"]) * 1e-3,
                after=tuple(sorted({forward[name], *(back[a] for a in after.get(name, []))})),
            )
        )
        elements = int(float(nodes[name]["p"])) // 4
        if elements:
            gradients.append(
                Gradient(
                    name=name,
                    elements=elements,
                    ready_after=back[name],
                    needed_by=forward[name],
                )
            )
    return Profile(
        model=f"pipedream/{path.name.split('.')[0]}",
        device="cuda",
        workers=1,
        iterations=1,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def all_traces() -> list[Profile]:
    """Return every trace, or nothing where the folder is absent."""
    if not TRACES.is_dir():
        return []
    espresso = [read_espresso(TRACES / "espresso" / f"{name}.json") for name in ESPRESSO]
    pipedream = [read_pipedream(TRACES / "pipedream" / f"{name}.graph.txt") for name in PIPEDREAM]
    return espresso + pipedream
