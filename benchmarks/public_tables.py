"""Predictions of what others have measured and published; none of it was fitted.

`public_tables.json` holds the figures and where each was published. A training's profile comes from
the model's layers and the throughput of one worker. The network is the nominal one. Where a table
says `fitted_at`, it is a link calibrated with the iteration at that number of workers, which does
not count. Assumed, since no source states them: 20 us a message over TCP and 5 us over RDMA, 12
GB/s over PCIe and 60 GB/s over NVLink. `flat-ring` stands for NCCL before 2.4, which has no trees,
and for 2.5 on two hosts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import median, save
from benchmarks.step_models import MODELS, bert, profile_of, resnet
from syncline.cli.networks import network_argument
from syncline.plan.network import Network
from syncline.plan.planners import planned
from syncline.plan.profile import Profile
from syncline.plan.simulator.calibration import calibrated
from syncline.plan.simulator.interval import NOMINAL, SIMULATED
from syncline.plan.simulator.predict import predict
from syncline.plan.simulator.transformations import with_compute_scale, with_wire

TABLES = Path(__file__).with_suffix(".json")
KNOWN = {
    **MODELS,
    "resnet101": resnet("resnet101", "ResNet-101", (3, 4, 23, 3)),
    "bert_base": MODELS["bert"],
    "bert_large": bert("bert_large", "BERT-large", width=1024, depth=24),
}
CLOSE = 0.1


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    tables = json.loads(TABLES.read_text())
    rows = [row for table in tables["trainings"] for row in trainings(table)]
    rows += [row for table in tables["all_reduces"] for row in all_reduces(table)]
    save("public_tables", {"rows": rows})
    shown = Table("measured by others", "cells", "median error", "within 10 %", "in the interval")
    names = list(dict.fromkeys(row["table"] for row in rows))
    for name in (*names, "all"):
        found = [row for row in rows if name in ("all", row["table"])]
        errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in found]
        close = sum(error <= CLOSE for error in errors)
        inside = sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in found)
        shown.add_row(name, str(len(found)), f"{median(errors):.1%}", str(close), str(inside))
    Console(width=110).print(shown)


def trainings(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a table of throughputs by numbers of workers."""
    plan = partial(planned, table["planner"])
    fitted_at = table["fitted_at"]
    title = table["name"] + (f", fitted at {fitted_at}" if fitted_at else "")
    for entry in table["entries"]:
        step_s = {
            int(workers): int(workers) * entry["batch"] / rate
            for workers, rate in entry["samples_per_s"].items()
        }
        profile = trained(entry["model"], entry["dtype"], step_s[1])

        def network(workers: int, text: str = table["network"]) -> Network:
            return network_argument(f"{text},{place(table, workers)}")

        base = None
        if fitted_at:
            at = {fitted_at: step_s[fitted_at]}
            base = calibrated(profile, network(fitted_at), at, plan).network
        for workers, measured_s in step_s.items():
            if workers <= max(fitted_at, 1):
                continue
            net = network(workers) if base is None else base.with_workers(workers)
            found = predict(profile, net, plan(profile, net)).prediction
            assert found.interval_s is not None
            low_s, high_s = found.interval_s
            yield {
                "table": title,
                "of": f"{entry['model']}, {entry['batch']} in {entry['dtype']}",
                "workers": workers,
                "measured_s": measured_s,
                "predicted_s": found.iteration_s,
                "low_s": low_s,
                "high_s": high_s,
            }


def trained(model: str, dtype: str, step_s: float) -> Profile:
    """Return the profile of a model that one worker trains in ``step_s`` an iteration."""
    profile = profile_of(KNOWN[model])
    return with_wire(with_compute_scale(profile, step_s / profile.computation_s), dtype)


def place(table: dict[str, Any], workers: int) -> str:
    """Return where the workers are, in the words of a NETWORK."""
    on_one = table["workers_per_host"]
    if not on_one:
        return f"workers={workers}"
    hosts = -(-workers // on_one)
    servers = f",servers={hosts},servers-on=workers" if "server" in table["network"] else ""
    return f"hosts={hosts}x{min(workers, on_one)}{servers}"


def all_reduces(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a table of all-reduces by size and number of workers."""
    latency_ms = table["delay_ms"] or 0.02
    text = f"{table['rate_gbit']}gbit,latency={latency_ms}ms,algorithm={table['algorithm']}"
    for workers, size_bytes, measured_s in table["cells"]:
        predicted_s = network_argument(f"{text},workers={workers}").all_reduce.seconds(size_bytes)
        yield {
            "table": table["name"].partition(" over ")[0].partition(" of ")[0] + "s alone",
            "of": f"{size_bytes} bytes, {text}",
            "workers": workers,
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "low_s": predicted_s / SIMULATED,
            "high_s": predicted_s * NOMINAL,
        }


if __name__ == "__main__":
    main()
