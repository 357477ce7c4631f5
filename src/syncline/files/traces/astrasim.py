"""ASTRA-sim's text workload of data-parallel training.

The first line is ``DATA``, the second the number of layers. Each further line is a layer, with 12
columns: the name, -1, then a time, a collective and its bytes for each of the forward pass, the
input gradient and the weight gradient, and last the time of the update.

Times are cycles of the simulated accelerator. Its clock is not in the file; ASTRA-sim assumes one
cycle per nanosecond. It runs forward through the layers, then backward: for each layer the weight
gradient, which is sent, then the input gradient. The first layer's input gradient is left out, as
by ``text2chakra`` of MLCommons Chakra. A layer is updated after its message has arrived.
"""

from __future__ import annotations

import itertools
import os

from syncline.errors import UserError, quoted
from syncline.files.traces.layers import MOST_LAYERS, Layer, layers_of, profile_of
from syncline.files.traces.reading import ReadProgress, open_trace, text_lines
from syncline.files.traces.trace import Trace, Written, bytes_in, model_of, seconds_in
from syncline.plan.profile import Profile

DEFAULT_CLOCK_HZ = 1e9
POLICIES = (
    *("DATA", "MODEL", "HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA", "HYBRID_DLRM"),
    *("HYBRID_DLRM_ENHANCED", "HYBRID_TRANSFORMER", "HYBRID_TRANSFORMER_FWD_IN_BCKWD"),
    *("HYBRID_CUSTOMIZED", "MICRO", "DISTRIBUTED_INFERENCE"),
)
COLUMNS = 12


def is_astrasim(head: str) -> bool:
    """Return whether text begins with a parallelism policy and a number of layers."""
    lines = [line.split() for line in head.splitlines()[:2]]
    if len(lines) < 2 or not lines[0] or len(lines[1]) != 1:
        return False
    return lines[0][0] in POLICIES and lines[1][0].isdecimal()


def read_astrasim(
    path: str | os.PathLike[str],
    *,
    clock_hz: float = DEFAULT_CLOCK_HZ,
    progress: ReadProgress | None = None,
) -> Trace:
    """Read a data-parallel workload; one whose layers exchange activations is refused."""
    _check_clock(clock_hz)
    layers: list[Layer] = []
    with open_trace(path, progress=progress) as stream:
        lines = text_lines(stream)
        count = _header([line for _, line in itertools.islice(lines, 2)])
        for where, line in lines:
            if len(layers) == count:
                raise UserError(
                    f"{where}: the second line promises {count} layers, but this is one more; "
                    "correct the number"
                )
            layers.append(_layer(line, where, 1 / clock_hz))
        if len(layers) < count:
            raise UserError(
                f"the second line promises {count} layers, the file holds {len(layers)}; it is "
                "truncated: copy it again"
            )
        skipped_s, layers[0].input_s = layers[0].input_s, 0.0
        profile = profile_of(layers, model=model_of(path))
    notes = [
        f"times are cycles, taken as {clock_hz:.4g} a second",
        "the workload has no data loading and does not time its messages",
    ]
    if skipped_s:
        notes.append("the first layer's input gradient is left out, as ASTRA-sim does")
    return Trace(model=profile.model, profile=profile, notes=tuple(notes))


def _check_clock(clock_hz: float) -> None:
    if not 1 <= clock_hz <= 1e15:
        raise UserError(f"the clock must be 1 to 1e15 cycles a second, found {clock_hz:g}")


def _header(lines: list[str]) -> int:
    policy = lines[0].split()[0] if lines else ""
    if policy not in POLICIES:
        raise UserError(f"expected the parallelism (DATA) in the first line, found {policy[:40]!r}")
    if policy != "DATA":
        raise UserError(
            f"a workload of {policy} parallelism; only DATA can be read, because other kinds "
            "exchange activations, which a profile does not hold"
        )
    count = lines[1].strip() if len(lines) > 1 else ""
    if not (count.isascii() and count.isdecimal() and 0 < int(count[:9]) <= MOST_LAYERS):
        raise UserError(f"expected the number of layers in the second line, found {count[:40]!r}")
    return int(count[:9])


def _layer(line: str, where: str, cycle_s: float) -> Layer:
    cells = line.split()
    if len(cells) != COLUMNS:
        raise UserError(f"{where}: expected {COLUMNS} columns, found {len(cells)}")
    forward_s, input_s, weight_s, update_s = (
        seconds_in(cells[column], f"the {what}", where, unit_s=cycle_s)
        for column, what in (
            (2, "forward time"),
            (5, "time of the input gradient"),
            (8, "time of the weight gradient"),
            (11, "time of the update"),
        )
    )
    for column, what in ((3, "forward"), (6, "input gradient")):
        kind, size_bytes = cells[column], cells[column + 1]
        if bytes_in(size_bytes, "the size of a message", where, whole=False) and kind != "NONE":
            raise UserError(
                f"{where}: {quoted(cells[0])} exchanges {size_bytes} bytes ({kind}) in its {what} "
                "pass; data-parallel layers exchange weight gradients only"
            )
    kind = cells[9]
    gradient_bytes = bytes_in(cells[10], "the size of the gradient", where)
    if kind not in ("ALLREDUCE", "NONE"):
        raise UserError(
            f"{where}: {quoted(cells[0])} exchanges its weight gradient by {kind[:40]}; expected "
            "ALLREDUCE or NONE"
        )
    return Layer(
        name=cells[0],
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        update_s=update_s,
        gradient_bytes=gradient_bytes if kind == "ALLREDUCE" else 0,
    )


def write_astrasim(profile: Profile, *, clock_hz: float = DEFAULT_CLOCK_HZ) -> Written:
    """Write a profile as a data-parallel workload; times are rounded to whole cycles."""
    _check_clock(clock_hz)
    table = layers_of(profile)
    lines = ["DATA", str(len(table.layers))]
    for layer in table.layers:
        forward, inputs, weights, update = (
            str(round(seconds * clock_hz))
            for seconds in (layer.forward_s, layer.input_s, layer.weight_s, layer.update_s)
        )
        exchange = (
            ("ALLREDUCE", str(layer.gradient_bytes)) if layer.gradient_bytes else ("NONE", "0")
        )
        name = "_".join("".join(c if c.isprintable() else " " for c in layer.name).split()) or "_"
        cells = (name, "-1", forward, "NONE", "0", inputs, "NONE", "0", weights, *exchange, update)
        lines.append("\t".join(cells))
    lost = list(table.lost)
    if table.data_s:
        lost.append(f"{table.data_s * 1e3:.3g} ms of reading and copying the batch")
    if table.layers[0].input_s:
        lost.append(
            f"{table.layers[0].input_s * 1e3:.3g} ms after the first layer's gradient: ASTRA-sim "
            "leaves out its input gradient"
        )
    return Written(("\n".join(lines) + "\n").encode(), tuple(lost))
