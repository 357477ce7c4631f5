"""The papers' layer table: dag-model, section VI and Table VI.

Each row is a layer: id, name, forward, backward and communication time in microseconds, and the
bytes of its gradient. A file holds one table per iteration, one after another (100 in the published
data set); an iteration begins where the first id recurs. The row ``data`` is the reading of the
batch. Columns are separated by tabs or blanks; if by tabs, names may contain blanks. A
header row may come first, or before every iteration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from syncline.errors import UserError, quoted
from syncline.files.traces.layers import MOST_LAYERS, Layer, LayerTable, layers_of, profile_of
from syncline.files.traces.reading import ReadProgress, open_trace, text_lines
from syncline.files.traces.trace import (
    Trace,
    Written,
    bytes_in,
    measured_points,
    message_s,
    seconds_in,
)
from syncline.plan.network import Network
from syncline.plan.profile import Profile

US = 1e-6
HEADER = ("Id", "Name", "Forward", "Backward", "Comm.", "Size")
DATA = "data"


def is_layer_table(head: str) -> bool:
    """Return whether text begins with the header row, or with a row of the table."""
    line = next((text for text in head.splitlines() if text.strip()), "")
    cells = _cells(line)
    if _is_header(cells):
        return True
    return len(cells) == len(HEADER) and cells[0].isdecimal() and all(map(_is_number, cells[2:]))


def read_layer_table(
    path: str | os.PathLike[str], *, progress: ReadProgress | None = None
) -> Trace:
    """Read a layer table, packed or not; times are means over its iterations.

    The ``Comm.`` column becomes measured messages. The table has no update and no worker count. It
    is read holding one iteration in memory.
    """
    layers: dict[int, Layer] = {}  # times are sums over the iterations
    order: list[int] = []  # the layers of the first iteration
    rows = 0
    with open_trace(path, progress=progress) as stream:
        for where, line in text_lines(stream):
            cells = _cells(line)
            if _is_header(cells):
                continue
            layer_id, row = _row(cells, where)
            if rows == len(order) and layer_id not in order[:1]:  # of the first iteration
                if layer_id in layers:
                    raise UserError(
                        f"{where}: layer {layer_id} comes twice; an iteration begins anew with "
                        f"layer {order[0]}"
                    )
                if len(order) == MOST_LAYERS:
                    raise UserError(
                        f"{where}: more than {MOST_LAYERS} layers; is it a layer table?"
                    )
                order.append(layer_id)
            elif layer_id != (expected := order[rows % len(order)]):
                raise UserError(
                    f"{where}: expected layer {expected}, found {layer_id}; every iteration must "
                    f"list the {len(order)} layers of the first, in its order"
                )
            rows += 1
            begun = Layer(name=row.name, gradient_bytes=row.gradient_bytes)
            layer = layers.setdefault(layer_id, begun)
            if (layer.name, layer.gradient_bytes) != (row.name, row.gradient_bytes):
                raise UserError(
                    f"{where}: layer {layer_id} is {quoted(row.name)} of {row.gradient_bytes} "
                    f"bytes, but was {quoted(layer.name)} of {layer.gradient_bytes} bytes in the "
                    "first iteration"
                )
            layer.forward_s += row.forward_s
            layer.weight_s += row.weight_s
            layer.message_s += row.message_s
        if not rows:
            raise UserError(f"no row of a layer table; expected {' '.join(HEADER)}")
        iterations, place = divmod(rows, len(order))
        if place:
            raise UserError(
                f"iteration {iterations + 1} ends before layer {order[place]}, the file is "
                "truncated; copy it again, or remove that iteration"
            )
        return _trace(list(layers.values()), iterations, Path(path).name)


def _trace(rows: list[Layer], iterations: int, file: str) -> Trace:
    data_s = 0.0
    layers = []
    for row in rows:
        if row.name.lower() == DATA and not row.gradient_bytes:
            data_s += (row.forward_s + row.weight_s) / iterations
        else:
            row.forward_s /= iterations
            row.weight_s /= iterations
            layers.append(row)
    notes = ["the table has no update, and no copying to the device"]
    untimed = sum(bool(row.gradient_bytes) and not row.message_s for row in rows)
    if untimed:
        notes.append(f"{untimed} layers with gradients have no communication time")
    model = file.removesuffix(".gz").rpartition(".")[0] or file
    profile = profile_of(layers, model=model, data_s=data_s, iterations=iterations)
    return Trace(
        model=profile.model,
        profile=profile,
        points=measured_points((row.gradient_bytes, row.message_s / iterations) for row in rows),
        steps=iterations,
        notes=tuple(notes),
    )


def write_layer_table(profile: Profile, network: Network | None = None) -> Written:
    """Write a profile as one iteration of the table; the network gives the ``Comm.`` column."""
    table = layers_of(profile)
    messages_s = [message_s(network, layer.gradient_bytes) for layer in table.layers]
    lines = ["\t".join(HEADER), *layer_rows(table, messages_s)]
    lost = list(table.lost)
    update_s = profile.phase_s("finalize", "update")
    if update_s:
        lost.append(f"{update_s * 1e3:.3g} ms of update: the table has no column for it")
    if network is None:
        lost.append("the time of communication: no network was given, the column is 0")
    return Written(("\n".join(lines) + "\n").encode(), tuple(lost))


def layer_rows(table: LayerTable, messages_s: Sequence[float], form: str = ".9g") -> list[str]:
    """Return the rows of one iteration, without the header; ``form`` formats its microseconds.

    ``messages_s`` are the seconds of each layer's message, 0 where it has no gradient.
    """
    rows = [(DATA, table.data_s, 0.0, 0.0, 0)] if table.data_s else []
    for layer, communication_s in zip(table.layers, messages_s, strict=True):
        name = "_" + layer.name if layer.name.lower() == DATA else layer.name
        backward_s = layer.weight_s + layer.input_s
        rows.append((name, layer.forward_s, backward_s, communication_s, layer.gradient_bytes))
    lines = []
    for layer_id, (name, forward_s, backward_s, communication_s, size_bytes) in enumerate(rows):
        times = "\t".join(f"{s / US:{form}}" for s in (forward_s, backward_s, communication_s))
        name = "".join(c if c.isprintable() else "_" for c in name).strip() or "_"
        lines.append(f"{layer_id}\t{name}\t{times}\t{size_bytes}")
    return lines


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]


def _is_header(cells: list[str]) -> bool:
    wanted = [word.lower().rstrip(".") for word in HEADER]
    return [cell.lower().rstrip(".") for cell in cells] == wanted


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _row(cells: list[str], where: str) -> tuple[int, Layer]:
    if len(cells) != len(HEADER):
        raise UserError(
            f"{where}: expected {len(HEADER)} columns ({' '.join(HEADER)}), found {len(cells)}"
        )
    if not (cells[0].isascii() and cells[0].isdecimal() and len(cells[0]) < 10):
        raise UserError(f"{where}: expected a layer id, found {cells[0][:40]!r}")
    forward_s, weight_s, message_s = (
        seconds_in(cell, f"the {what} time", where, unit_s=US)
        for cell, what in zip(cells[2:5], ("forward", "backward", "communication"), strict=True)
    )
    return int(cells[0]), Layer(
        name=cells[1],
        forward_s=forward_s,
        weight_s=weight_s,
        message_s=message_s,
        gradient_bytes=bytes_in(cells[5], "the size of the gradient", where),
    )
