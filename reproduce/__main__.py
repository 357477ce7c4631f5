"""Run every script and write ``CLAIMS.md``: ``python -m reproduce [NAME ...]``."""

from __future__ import annotations

import importlib
import sys
import time

from reproduce import claims

SCRIPTS = (
    "dag_fig1",
    "dag_eq6",
    "dag_resnet",
    "dag_fig4",
    "dag_table6",
    "dag_traces",
    "mgwfbp_fig1",
    "mgwfbp_fig2",
    "mgwfbp_theorem1",
    "mgwfbp_table2",
    "mgwfbp_fig4",
    "mgwfbp_fig5",
    "mgwfbp_fig9",
    "mgwfbp_fig10",
    "mgwfbp_fig11",
    "pace_fig2",
    "pace_fig8",
    "pace_fig9",
    "pace_fig10",
    "pace_measured",
    "pace_use",
    "pipeline_table1",
    "pipeline_fig4",
    "gtopk_fig5",
    "gtopk_fig9",
    "gtopk_table7",
    "pipeline_measured",
    "pipeline_overlap",
)
"""One a figure or table."""


def main(names: list[str]) -> None:
    """Run the scripts of these names, all if there is none, and write the page."""
    unknown = sorted(set(names) - set(SCRIPTS))
    if unknown:
        raise SystemExit(f"no script {unknown[0]!r}; there are: {', '.join(SCRIPTS)}")
    begin = time.perf_counter()
    for name in names or SCRIPTS:
        importlib.import_module(f"reproduce.{name}").main()
    claims.main()
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
