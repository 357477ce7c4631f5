"""What is simulated: traces and measurements from the papers, from others and of our own.

Others' traces and measurements lie in ``../shared/data`` beside the project where a developer has
them; a user's checkout has no such folder, and scripts go on without. Our own are in ``traces/``.
"""

from __future__ import annotations

import csv
import functools
import tempfile
from pathlib import Path

import msgspec
from tests.trace_files import ESPRESSO, PIPEDREAM, TRACES, read_espresso, read_pipedream

from reproduce.architectures import NETWORKS, millions_of_macs, trained
from reproduce.common import FOLDER, absent, scaled, without_reading
from syncline.files.traces.layer_table import read_layer_table
from syncline.plan.network import PRESETS, Measurement
from syncline.plan.profile import Gradient, Operation, Profile

__all__ = [
    "CLUSTER_1",
    "K80_BACKWARD_S",
    "TABLE_VI",
    "V100_BACKWARD_S",
    "alexnet",
    "chain",
    "described",
    "messages_as_measured",
    "own_traces",
    "resnet50_k80",
    "shared",
    "shared_all_reduces",
    "shared_traces",
]

ALL_REDUCES = TRACES.parent / "allreduce"
OWN = FOLDER / "traces"

CLUSTER_1 = PRESETS["10gbe-k80"]
"""16 GK210 GPUs on 10 Gbit/s Ethernet: a = 0.972 ms, b = 1.97 ns a byte (MG-WFBP, Fig. 4(a))."""
K80_BACKWARD_S = 0.243
"""Backward pass of ResNet-50, batch 32, on a K80. Source: dag-model, section V-C."""
V100_BACKWARD_S = 0.0625
"""The same on a V100. Source: dag-model, section V-C."""
BATCH_SIZES = {
    "GoogleNet": 64,
    "ResNet-50": 32,
    "ResNet-152": 128,
    "DenseNet-161": 64,
    "DenseNet-201": 64,
    "Inception-v4": 128,
}
"""Examples a GPU. Source: MG-WFBP, Table 4."""

TABLE_VI = """\
Id	Name	Forward	Backward	Comm.	Size
0	data	1.20e+06	0	0	0
1	conv1	3.27e+06	288202	123.424	139776
2	relu1	17234.5	27650.9	0	0
3	pool1	32175.7	60732.6	0	0
4	conv2	3.14e+06	1.03216e+06	292.032	1229824
5	relu2	11507.5	18422.5	0	0
6	pool2	19831.2	32459	0	0
7	conv3	3.886e+06	791825	288214	3540480
8	relu3	4770.3	10996.3	0	0
9	conv4	1.87e+06	510405	1.03218e+06	2655744
10	relu4	4760.26	7872.45	0	0
11	conv5	1.13e+06	306129	275772	1770496
12	relu5	3201.22	4939.42	0	0
13	pool5	5812	18666.2	0	0
14	fc6	44689.7	73935	311170	151011328
15	relu6	295.168	1092.83	0	0
16	drop6	359.744	131247	0	0
17	fc7	19787.8	34423.8	610376	67125248
18	relu7	295.04	451.904	0	0
19	drop7	358.048	317.312	0	0
20	fc8	8033.12	9922.72	130964	16388000
21	loss	1723.49	293.024	0	0
"""
"""One iteration of AlexNet on two K80 GPUs, batch 1,024 a GPU; microseconds and bytes.

Source: S. Shi, Q. Wang, X. Chu, B. Li, *A DAG Model of Synchronous Stochastic Gradient Descent in
Distributed Deep Learning*, Table VI.
"""


def alexnet() -> tuple[Profile, tuple[Measurement, ...]]:
    """Return AlexNet as Table VI has it: the profile, and the ``Comm.`` column as messages."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "alexnet.txt"
        path.write_text(TABLE_VI)
        trace = read_layer_table(path)
    assert trace.profile is not None
    return msgspec.structs.replace(trace.profile, model="AlexNet, Table VI"), trace.points


def messages_as_measured() -> Profile:
    """Return Table VI with a byte for every nanosecond of the ``Comm.`` column.

    The column is no function of the size (0.31 s for 151 MB, 1.03 s for 2.7 MB), so no cost curve
    gives its times. On a network of a nanosecond a byte these messages take them.
    """
    profile, _ = alexnet()
    us = {}
    for line in TABLE_VI.splitlines()[1:]:
        _, name, _, _, communication, _ = line.split("\t")
        us[name] = float(communication)
    return msgspec.structs.replace(
        profile,
        gradients=tuple(
            msgspec.structs.replace(g, elements=round(us[g.name] * 500), dtype="float16")
            for g in profile.gradients
        ),
    )


def chain(
    model: str,
    *,
    forward_s: list[float],
    backward_s: list[float],
    size_bytes: list[int],
    data_s: float = 0.0,
    copy_s: float = 0.0,
    update_s: float = 0.0,
) -> Profile:
    """Return a chain of layers; lists are of layers 1 to L, as the papers number them."""
    layers = len(backward_s)
    rows = [("data", "data", data_s), ("copy", "copy", copy_s)]
    rows += [(f"F{i}", "forward", t) for i, t in enumerate(forward_s, start=1)]
    first = len(rows)
    rows += [(f"B{layers - i}", "backward", t) for i, t in enumerate(reversed(backward_s))]
    rows.append(("U", "update", update_s))
    return Profile(
        model=model,
        device="described",
        workers=1,
        iterations=1,
        operations=tuple(
            msgspec.convert(
                {"name": n, "phase": p, "duration_s": t, "after": [i - 1] if i else []}, Operation
            )
            for i, (n, p, t) in enumerate(rows)
        ),
        gradients=tuple(
            Gradient(
                name=f"W{layers - i}",
                elements=size // 2,
                dtype="float16",
                ready_after=first + i,
                needed_by=2 + layers - 1 - i if forward_s else None,
            )
            for i, size in enumerate(reversed(size_bytes))
        ),
    )


@functools.cache
def shared() -> bool:
    """Say whether others' traces are on this machine, and if not, tell the reader once."""
    if TRACES.is_dir():
        return True
    absent(f"the folder of others' traces ({TRACES.parent.name})", "goes on with our own")
    return False


def shared_traces(*names: str) -> dict[str, Profile]:
    """Return others' traces by name, all if none is named; empty where the folder is absent.

    Espresso's traces hold the moments at which gradients are ready. Their forward pass is taken as
    half of the backward pass, layer by layer: an assumption.
    """
    if not shared():
        return {}
    found = {n: read_espresso(TRACES / "espresso" / f"{n}.json") for n in ESPRESSO}
    for name in PIPEDREAM:
        found[name] = read_pipedream(TRACES / "pipedream" / f"{name}.graph.txt")
    return {name: found[name] for name in names or found}


def resnet50_k80() -> Profile | None:
    """Return ResNet-50 as a K80 computes it, or None where the trace is absent.

    The tensors and the shares of time are those of Espresso's trace (a V100), stretched so that the
    backward pass takes what dag-model measured on a K80.
    """
    found = shared_traces("resnet50")
    if not found:
        return None
    trace = without_reading(found["resnet50"])
    return scaled(trace, K80_BACKWARD_S / trace.phase_s("backward"), model="ResNet-50 on a K80")


def described(model: str, resnet50_backward_s: float) -> Profile:
    """Return a network of MG-WFBP's Table 4 as a GPU computes it.

    The backward pass is longer than that of ResNet-50 by the multiplications of the batch, and is
    divided among the layers by theirs: an assumption. Times of their layers are not printed.

    Args:
        model: its name in the table.
        resnet50_backward_s: what the GPU takes for ResNet-50's batch.
    """
    work, known = (BATCH_SIZES[n] * millions_of_macs(NETWORKS[n]) for n in (model, "ResNet-50"))
    return trained(model, NETWORKS[model], resnet50_backward_s * work / known)


def own_traces() -> dict[str, Profile]:
    """Return the layer tables that were measured for this project, by name."""
    found = {}
    for path in sorted(OWN.iterdir()) if OWN.is_dir() else ():
        if path.is_file() and path.suffix not in (".md", ".json"):
            profile = read_layer_table(path).profile
            if profile is not None:
                found[path.name.partition(".")[0]] = profile
    return found


def shared_all_reduces() -> dict[str, list[Measurement]]:
    """Return others' measured all-reduces: a list of sizes for each machine and worker count."""
    if not ALL_REDUCES.is_dir():
        absent("the folder of others' measured all-reduces", "only the papers' lines are drawn")
        return {}
    found: dict[str, list[Measurement]] = {}

    def add(name: str, size_bytes: int, time_s: float) -> None:
        point = Measurement(size_bytes=size_bytes, time_s=time_s, repetitions=1)
        found.setdefault(name, []).append(point)

    with (ALL_REDUCES / "deepbench" / "allreduce.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            # The library was chosen anew for each size, so these are the best of several.
            machine = f"{row['platform']}, {row['ranks']} ranks"
            add(machine, int(row["bytes"]), float(row["mean_ms"]) * 1e-3)
    for path in sorted((ALL_REDUCES / "vtrain").glob("*.csv")):
        ranks = path.name.partition("GPU")[2].partition("_")[0]
        with path.open(newline="") as file:
            for cells in list(csv.reader(file))[1:]:
                add(f"A100 NCCL, {ranks} ranks", int(cells[0]), float(cells[3]) * 1e-9)
    return {name: sorted(points, key=lambda p: p.size_bytes) for name, points in found.items()}
