"""The claims of linear-pipeline that can be counted or simulated."""

from __future__ import annotations

from collections.abc import Callable

from reproduce.claim import Claim, Finding, differs, not_here, percent
from reproduce.common import Result

__all__ = ["CLAIMS"]

FAMILIES = {
    "LP": "linear-pipeline",
    "MST": "minimum-spanning-tree",
    "BE": "bidirectional-exchange",
}
FLAT = 0.05
"""By how much a cost may grow from 2 to 64 workers and still be called flat."""


def _verdict(holds: bool, text: str) -> Finding:
    return Finding(verdict="reproduced" if holds else "differs", text=text)


def _cell(r: Result, collective: str, algorithm: str) -> Result:
    found: Result = next(
        cell
        for cell in r["cells"]
        if (cell["collective"], cell["algorithm"]) == (collective, algorithm)
    )
    return found


def _of(r: Result, collective: str, algorithm: str, ranks: int) -> tuple[str, str]:
    """Return what is printed and what is derived for a number of ranks, as text."""
    row = next(row for row in _cell(r, collective, algorithm)["rows"] if row["ranks"] == ranks)

    def text(terms: list[str]) -> str:
        units = zip(terms, ("alpha", "n beta", "n gamma"), strict=True)
        return " + ".join(f"{term} {unit}" for term, unit in units if term != "0")

    return text(row["printed"]), text(row["derived"])


def _tree(r: Result) -> Finding:
    cells = [
        _cell(r, collective, "minimum-spanning-tree")
        for collective in ("broadcast", "reduce", "all-reduce")
    ]
    return _verdict(
        all(cell["equal_on_all"] for cell in cells),
        "equal to what is counted from the programs, for 2 to 64 workers",
    )


def _exchange(r: Result) -> Finding:
    cells = [_cell(r, c, "bidirectional-exchange") for c in ("reduce", "all-reduce")]
    printed, derived = _of(r, "all-reduce", "bidirectional-exchange", 6)
    return _verdict(
        all(cell["equal_on_powers_of_two"] for cell in cells),
        "equal to what is counted from the programs for powers of two, for which alone ranks pair "
        "up. Our programs fold the others in: an all-reduce of 6 workers takes "
        f"{derived}, where {printed} is printed",
    )


def _exchange_broadcast(r: Result) -> Finding:
    printed, derived = _of(r, "broadcast", "bidirectional-exchange", 8)
    assert r["scatter_ring_is_the_printed_exchange_broadcast"]
    return Finding(
        verdict="differs",
        text="the p - 1 is an all-gather round a ring: the program `scatter-ring` costs exactly "
        f"what is printed, for 2 to 64 workers. With an exchange 8 workers take {derived} instead "
        f"of {printed}; section 3.2 says so itself where it treats the all-reduce",
    )


def _pipeline(collective: str, reason: str) -> Callable[[Result], Finding]:
    def find(r: Result) -> Finding:
        printed, derived = _of(r, collective, "linear-pipeline", 8)
        return Finding(
            verdict="reproduced" if printed == derived else "differs",
            text=f"{reason}: {derived} for 8 workers and {r['blocks']} blocks, not {printed}",
        )

    return find


def _figure_2(r: Result) -> Finding:
    one_way, both = r["steps_of_fig_2a_and_2b"], r["steps_of_fig_2c"]
    return _verdict(
        one_way == 10 and both == 9,
        f"broadcast and reduce take {one_way} steps, all-reduce {both}: the ninth would bring the "
        "last sum back to the worker that formed it",
    )


def _flat(r: Result) -> Finding:
    own = r["own_links_s"]
    grown = {
        collective: costs["linear-pipeline"][-1] / costs["linear-pipeline"][0] - 1
        for collective, costs in own.items()
        if collective != "all-reduce"
    }
    all_reduce = own["all-reduce"]["linear-pipeline"]
    from_three = all_reduce[-1] / all_reduce[1] - 1
    return _verdict(
        max(*grown.values(), from_three) < FLAT,
        "simulated with a link for each worker, 256 MiB in blocks of 64 KiB: from 2 to "
        f"{r['ranks'][-1]} workers a broadcast costs {percent(grown['broadcast'])} more, a reduce "
        f"{percent(grown['reduce'])}; an all-reduce {percent(from_three)} from 3 on, as two "
        f"workers swap parts and need {all_reduce[0] / all_reduce[1]:.2f} of that",
    )


def _tree_grows(r: Result) -> Finding:
    steps = r["tree_steps_of_2_to_6"]
    costs = r["own_links_s"]["broadcast"]["minimum-spanning-tree"]
    return _verdict(
        steps == [1, 2, 2, 3, 3],
        f"the program takes {', '.join(map(str, steps))} steps; simulated, {r['ranks'][-1]} "
        f"workers cost {costs[-1] / costs[0]:.2f} times as much as two",
    )


def _any_length(r: Result) -> Finding:
    eight = r["ranks"].index(8)
    rows = {
        int(blocks): costs[eight] / costs[0]
        for blocks, costs in r["pipeline_broadcast_by_blocks_s"].items()
    }
    listed = ", ".join(f"{ratio:.2f} times for {blocks}" for blocks, ratio in rows.items())
    return _verdict(
        max(rows.values()) < 1 + FLAT,
        "a broadcast to 8 costs (1 + 6 b / n) times one to 2, by the number of blocks of 64 KiB: "
        f"{listed}",
    )


def _twice(r: Result) -> Finding:
    own = r["own_links_s"]
    over = {
        collective: own[collective]["bidirectional-exchange"][-1]
        / own[collective]["linear-pipeline"][-1]
        for collective in own
    }
    return _verdict(
        min(over.values()) > 1.5,
        f"simulated, {r['ranks'][-1]} workers, 256 MiB: {over['broadcast']:.2f} and "
        f"{over['reduce']:.2f} times faster for broadcast and reduce, which the proof treats; "
        f"{over['all-reduce']:.2f} for all-reduce, where both send 2 n",
    )


def _over_tree(r: Result) -> Finding:
    own, ranks = r["own_links_s"], r["ranks"][-1]
    ratio = own["broadcast"]["minimum-spanning-tree"][-1] / own["broadcast"]["linear-pipeline"][-1]
    log2 = ranks.bit_length() - 1
    return _verdict(
        0.9 < ratio / log2 <= 1,
        f"simulated, {ranks} workers, 256 MiB: {ratio:.2f} times; log p is {log2}",
    )


def _shared(r: Result) -> Finding:
    own, shared = r["own_links_s"]["broadcast"], r["shared_links_broadcast_s"]
    slower = {name: shared[name][-1] / own[name][-1] for name in shared}
    return _verdict(
        slower["linear-pipeline"] < 1.01 < slower["bidirectional-exchange"],
        f"simulated with one link for every four workers, {r['ranks'][-1]} of them: the pipeline "
        f"takes {slower['linear-pipeline']:.2f} times as long as with a link for each, the "
        f"exchange {slower['bidirectional-exchange']:.2f} times. A tree along the switches takes "
        f"{slower['minimum-spanning-tree']:.2f} times: it crosses each once at a time",
    )


def _measured_growth(r: Result, algorithm: str) -> dict[str, float]:
    """Return how many times as long a collective takes on the most workers as on two."""
    return {
        collective: rows[algorithm]["measured_s"][-1] / rows[algorithm]["measured_s"][0]
        for collective, rows in r["collectives"].items()
    }


def _how_measured(r: Result) -> str:
    return (
        f"measured between 2 to {r['workers'][-1]} emulated hosts with links of "
        f"{r['rate_bytes_per_s'] * 8e-6:.0f} Mbit/s, {r['size_bytes'] >> 20} MiB in blocks of "
        f"{r['block_bytes'] >> 10} KiB, medians of {r['rounds']} rounds"
    )


def _measured_flat(r: Result) -> Finding:
    grown = _measured_growth(r, "linear-pipeline")
    # Table 1 itself has b (p - 1) more bytes on p workers: the pipe is filled.
    printed = 1 + (r["workers"][-1] - 2) * r["block_bytes"] / r["size_bytes"]
    rows = r["collectives"]["all-reduce"]["linear-pipeline"]["measured_s"]
    return _verdict(
        all(abs(grown[collective] / printed - 1) < 0.1 for collective in ("broadcast", "reduce")),
        f"{_how_measured(r)}: {r['workers'][-1]} workers take {grown['broadcast']:.2f} times as "
        f"long as 2 for a broadcast and {grown['reduce']:.2f} times for a reduce, where filling "
        f"the pipe makes it {printed:.2f}; an all-reduce {rows[-1] / rows[1]:.2f} times as long as "
        "3",
    )


def _measured_tree(r: Result) -> Finding:
    rows = r["collectives"]["broadcast"]["minimum-spanning-tree"]["measured_s"]
    steps = [f"{seconds / rows[0]:.2f}" for seconds in rows]
    log2 = [(count - 1).bit_length() for count in r["workers"]]
    near = all(abs(s / rows[0] / k - 1) < 0.1 for s, k in zip(rows, log2, strict=True))
    return _verdict(
        near,
        f"{_how_measured(r)}: a broadcast to {r['workers'][0]} to {r['workers'][-1]} takes "
        f"{', '.join(steps)} times as long as to two; log p is {', '.join(map(str, log2))}",
    )


def _measured_table(r: Result) -> Finding:
    texts, near = [], []
    for collective, rows in r["collectives"].items():
        ratios = {
            short: rows[name]["measured_s"][-1] / rows[name]["formula_s"][-1]
            for short, name in FAMILIES.items()
        }
        near += [abs(ratio - 1) < 0.1 for ratio in ratios.values()]
        listed = ", ".join(f"{short} {ratio:.2f}" for short, ratio in ratios.items())
        texts.append(f"{collective} {listed}")
    return _verdict(
        all(near),
        f"{_how_measured(r)}: measured over printed on {r['workers'][-1]} workers: "
        f"{'; '.join(texts)}. Our engine passes fragments of a message on before it is "
        "complete, so a reduce and a broadcast take less than their sum",
    )


def _measured_ratios(r: Result) -> Finding:
    at_8 = {
        short: r["collectives"]["broadcast"][name]["measured_s"][-1]
        for short, name in FAMILIES.items()
    }
    exchange, tree = at_8["BE"] / at_8["LP"], at_8["MST"] / at_8["LP"]
    log2 = (r["workers"][-1] - 1).bit_length()
    return _verdict(
        exchange > 1.5 and 0.8 < tree / log2 <= 1,
        f"{_how_measured(r)}: a broadcast to {r['workers'][-1]} takes {exchange:.2f} times as long "
        f"by exchange as by pipeline, and {tree:.2f} times by tree; log p is {log2}",
    )


def _overlap(r: Result) -> Finding:
    rows = r["algorithms"]
    over = {number: row["iteration_s"] / row["printed_s"] for number, row in rows.items()}
    listed = "; ".join(
        f"Algorithm {number} {row['iteration_s']:.2f} s, printed {row['printed_s']:.2f} s"
        for number, row in rows.items()
    )
    usual = r["longer_backward"]
    return _verdict(
        all(abs(ratio - 1) < 0.1 for ratio in over.values()),
        f"measured on {r['hosts']} emulated hosts with links of {r['rate']}, {r['layers']} layers "
        f"of {r['layer_bytes'] >> 20} MiB that only wait, {r['computing_s']:.2f} s in all, medians "
        f"of {r['rounds']} rounds: {listed}. The first layer's broadcast and reduce have nothing "
        f"to hide behind: 1/{r['layers']} of the communication. Broadcasts hide behind the forward "
        "pass and reduces behind the backward pass only: where that takes twice as long as the "
        f"forward pass, Algorithm 1 takes {usual['iteration_s']:.2f} s",
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        place="Fig. 2, section 3",
        says="3 GPUs, 4 blocks: reduce and broadcast take 10 steps, all-reduce 9",
        script="pipeline_table1",
        find=_figure_2,
    ),
    Claim(
        place="section 3.1",
        says="the exchange suffers where links between switches are shared, the pipeline does not",
        script="pipeline_fig4",
        find=_shared,
    ),
    Claim(
        place="Table 1",
        says="minimum spanning tree: broadcast, reduce and all-reduce",
        script="pipeline_table1",
        find=_tree,
    ),
    Claim(
        place="Table 1",
        says="bidirectional exchange: reduce and all-reduce",
        script="pipeline_table1",
        find=_exchange,
    ),
    Claim(
        place="Table 1",
        says="bidirectional exchange: broadcast, (log p + p - 1) alpha",
        script="pipeline_table1",
        find=_exchange_broadcast,
    ),
    Claim(
        place="Table 1",
        says="linear pipeline: broadcast, (p - 1 + n/b) alpha + (b (p - 1) + n) beta",
        script="pipeline_table1",
        find=_pipeline("broadcast", "a step too many, as Fig. 2 shows"),
    ),
    Claim(
        place="Table 1",
        says="linear pipeline: reduce, the same with beta + gamma",
        script="pipeline_table1",
        find=_pipeline("reduce", "a step too many, as Fig. 2 shows"),
    ),
    Claim(
        place="Table 1",
        says="linear pipeline: all-reduce, reduce and broadcast one after the other",
        script="pipeline_table1",
        find=_pipeline("all-reduce", "the pipe is filled once, as the text has it"),
    ),
    Claim(
        place="Proposition 1, Eq. 2",
        says="up to 2 times faster than bidirectional exchange for long messages",
        script="pipeline_fig4",
        find=_twice,
    ),
    Claim(
        place="Proposition 1, Eq. 3",
        says="O(log p) times faster than minimum spanning tree for long messages",
        script="pipeline_fig4",
        find=_over_tree,
    ),
    Claim(
        place="Proposition 1",
        says="up to 2 times faster than exchange and log p times faster than tree, measured",
        script="pipeline_measured",
        find=_measured_ratios,
    ),
    Claim(
        place="section 3.2",
        says="the cost is invariant to the GPU count regardless of message length",
        script="pipeline_fig4",
        find=_any_length,
    ),
    Claim(
        place="section 3.2",
        says="b about 64 KB and p within 10: (bp - p + n) beta is about n beta",
        script=None,
        find=differs("Table 1 has (bp - b + n) beta; a misprint, the conclusion is the same"),
    ),
    Claim(
        place="Fig. 4, section 4.1",
        says="the pipeline's cost stays the same for 2, 3, 4 and for 5, 6 GPUs",
        script="pipeline_fig4",
        find=_flat,
    ),
    Claim(
        place="Fig. 4, section 4.1",
        says="the steps of the minimum spanning tree for 2 to 6 GPUs are 1, 2, 2, 3, 3",
        script="pipeline_fig4",
        find=_tree_grows,
    ),
    Claim(
        place="Fig. 4, section 4.1",
        says="the pipeline's cost stays the same, measured",
        script="pipeline_measured",
        find=_measured_flat,
    ),
    Claim(
        place="Fig. 4, section 4.1",
        says="the cost of the minimum spanning tree grows by log p, measured",
        script="pipeline_measured",
        find=_measured_tree,
    ),
    Claim(
        place="Table 1",
        says="the terms with n of all nine collectives, measured",
        script="pipeline_measured",
        find=_measured_table,
    ),
    Claim(
        place="Fig. 3, section 4.1",
        says="2.3 to 360 times faster than MST and BE on 4 K40m",
        script=None,
        find=not_here(
            "measurements on the authors' GPUs; the paper itself puts most of it down to Open "
            "MPI's copies through the host's memory"
        ),
    ),
    Claim(
        place="section 3.3",
        says="overlapping makes an iteration max(comm, compt), where reduce and broadcast or "
        "all-reduce alone make it comm + compt, measured",
        script="pipeline_overlap",
        find=_overlap,
    ),
    Claim(
        place="section 4.2, Table 2",
        says="the cost of Algorithm 3 is max(comm, compt), of Algorithms 1 and 2 comm + compt",
        script=None,
        find=differs(
            "section 3.3 defines Algorithm 1 as the one that overlaps, 2 as reduce and broadcast, "
            "3 as all-reduce. Section 4.2 and Table 2 number them 3, 1 and 2; Syncline's numbers "
            "are those of section 3.3"
        ),
    ),
    Claim(
        place="Fig. 5, Table 2",
        says="training with the pipeline's collectives is up to 1.7 times faster",
        script=None,
        find=not_here("measurements on the authors' GPUs"),
    ),
)
"""In the order of the paper."""
