"""All planners on other projects' traces, on the three clusters of MG-WFBP, Fig. 4.

Predictions by our simulator, not measurements: what is compared is the planners. Times are of the
backward pass and what follows for the Espresso traces (they have no forward pass), of the whole
iteration for PipeDream's.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from tests.trace_files import TRACES, all_traces

from benchmarks.common import save
from syncline.model.network import PRESETS
from syncline.planners.auto import choose


def main() -> None:
    traces = all_traces()
    if not traces:
        raise SystemExit(f"no traces at {TRACES}; see docs/algorithms.md for what they are")
    rows = []
    for network in PRESETS.values():
        table = Table(title=f"{network.name}: ms (messages)", box=None)
        table.add_column("trace")
        table.add_column("bound", justify="right")
        for name in ("wfbp", "single", "ddp", "buckets", "mgwfbp", "merge"):
            table.add_column(name, justify="right")
        table.add_column("mgwfbp over merge", justify="right")
        for profile in traces:
            found = {p.planner: p for p in choose(profile, network).comparison.predictions}
            loss = found["mgwfbp"].iteration_s / found["merge"].iteration_s - 1
            table.add_row(
                profile.model,
                f"{found['merge'].lower_bound_s * 1e3:.1f}",
                *(f"{p.iteration_s * 1e3:.2f} ({p.messages})" for p in found.values()),
                f"{loss:+.2%}",
            )
            rows.append(
                {
                    "trace": profile.model,
                    "network": network.name,
                    "lower_bound_s": found["merge"].lower_bound_s,
                    "iteration_s": {name: p.iteration_s for name, p in found.items()},
                    "messages": {name: p.messages for name, p in found.items()},
                    "mgwfbp_over_merge": loss,
                }
            )
        Console(width=150).print(table)
    save("planners_on_traces", {"rows": rows})


if __name__ == "__main__":
    main()
