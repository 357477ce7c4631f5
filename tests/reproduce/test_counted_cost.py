"""Costs counted from the programs, against the papers' tables and the formulas of the model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from reproduce.counted_cost import Cost, derived_cost
from reproduce.paper_costs import BROADCAST_ALGORITHMS, REDUCE_ALGORITHMS, pipeline_steps

from syncline.comm.collectives import PROGRAMS, Collective, program
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS, LineFormula
from tests.comm.collectives.programs import NAMES, PIPELINED, each, make, own
from tests.pages import evaluate, table_rows, text_of
from tests.plan import steps

POWERS = [1 << k for k in range(1, 8)]
OTHERS = [3, 5, 6, 7, 11, 12, 31, 33, 63, 100]
PAPERS: dict[Collective, dict[str, LineFormula]] = {
    "broadcast": BROADCAST_ALGORITHMS,
    "reduce": REDUCE_ALGORITHMS,
    "all-reduce": {n: f for n, f in ALL_REDUCE_ALGORITHMS.items() if "tree" not in n},
}
PAPERS["all-reduce"]["minimum-spanning-tree"] = ALL_REDUCE_ALGORITHMS["binary-tree"]
PAPERS["all-reduce"]["bidirectional-exchange"] = ALL_REDUCE_ALGORITHMS["halving-doubling"]
ROWS = [(collective, name) for collective, table in PAPERS.items() for name in table]
FOR_ANY_NUMBER = ("minimum-spanning-tree", "binary-tree", "ring", "scatter-ring")


def of_formula(formula: LineFormula, ranks: int) -> Cost:
    """Take a formula apart: alpha, beta and gamma alone, their shares as the fractions they are."""
    (a, _), (_, b), (_, c) = (formula(ranks, *(float(i == j) for j in range(3))) for i in range(3))
    transmitted, added = (Fraction(share).limit_denominator(1000) for share in (b, c))
    return Cost(latencies=int(a), transmitted=transmitted, added=added)


def cost(collective: Collective, algorithm: str, ranks: int, blocks: int = 5) -> Cost:
    return derived_cost(make(collective, algorithm, ranks, blocks=blocks))


@each((*row, ranks) for row in ROWS for ranks in (*POWERS, *OTHERS))
def test_the_papers_formulas(collective: Collective, algorithm: str, ranks: int) -> None:
    """MG-WFBP, Table 2, and linear-pipeline, Table 1, with the errata of ``syncline.plan``.

    Exact on powers of two and where no pairs are formed by bits; else the surplus is folded in.
    """
    printed = of_formula(PAPERS[collective][algorithm], ranks)
    found = cost(collective, algorithm, ranks)
    if ranks in POWERS or algorithm in FOR_ANY_NUMBER:
        assert found == printed
    else:
        assert found.transmitted > printed.transmitted


@each((ranks,) for ranks in range(2, 40))
def test_the_erratum_of_the_exchange_broadcast(ranks: int) -> None:
    """Both all-gathers of the paper's proof exist; only the doubling one takes log p rounds.

    That of a ring is in the row as printed, "scatter-ring".
    """
    rounds, _ = steps.bruck_all_gather(ranks)
    found = BROADCAST_ALGORITHMS["bidirectional-exchange"](ranks, 1, 0, 0)[0]
    assert found == steps.binomial_broadcast(ranks) + rounds


@each((ranks,) for ranks in OTHERS)
def test_what_folding_costs(ranks: int) -> None:
    """On top of the power of two below: alpha + beta M (+ gamma M) in, and out again."""
    power = 1 << (ranks.bit_length() - 1)
    folding: tuple[tuple[Collective, str, int, int], ...] = (
        ("all-reduce", "recursive-doubling", 2, 1),
        ("all-reduce", "halving-doubling", 2, 1),
        ("broadcast", "bidirectional-exchange", 1, 0),
        ("reduce", "bidirectional-exchange", 1, 1),
    )
    for collective, algorithm, times, adds in folding:
        core, found = (cost(collective, algorithm, n) for n in (power, ranks))
        assert found == Cost(
            latencies=core.latencies + times,
            transmitted=core.transmitted + times,
            added=core.added + adds,
        )


@each((ranks,) for ranks in range(1, 40))
def test_reduce_scatters_and_all_gathers(ranks: int) -> None:
    """What holds for any P: ring and direct collectives are optimal in bytes."""
    share = Fraction(ranks - 1, ranks)
    for algorithm in ("ring", "direct"):
        half = Cost(latencies=ranks - 1, transmitted=share, added=share)
        assert cost("reduce-scatter", algorithm, ranks) == half
        assert cost("all-gather", algorithm, ranks) == replace(half, added=Fraction(0))
        assert cost("all-reduce", algorithm, ranks) == Cost(
            latencies=2 * (ranks - 1), transmitted=2 * share, added=share
        )
    assert cost("reduce", "direct", ranks) == cost("all-reduce", "ring", ranks)
    assert cost("broadcast", "direct", ranks) == Cost(
        latencies=ranks - 1, transmitted=Fraction(ranks - 1), added=Fraction(0)
    )


@each((power,) for power in range(1, 8))
def test_halving_and_doubling_apart(power: int) -> None:
    ranks = 1 << power
    share = Fraction(ranks - 1, ranks)
    half = Cost(latencies=power, transmitted=share, added=share)
    assert cost("reduce-scatter", "recursive-halving", ranks) == half
    assert cost("all-gather", "recursive-doubling", ranks) == replace(half, added=Fraction(0))


@each(
    (collective, ranks, blocks)
    for collective in ("broadcast", "reduce", "all-reduce")
    for ranks in (*POWERS, *OTHERS)
    for blocks in (1, 2, 4, 9, 40, 200)
)
def test_the_linear_pipeline(collective: Collective, ranks: int, blocks: int) -> None:
    adding, passing = (int(n) for n in pipeline_steps(collective, ranks, blocks))
    assert cost(collective, "linear-pipeline", ranks, blocks) == Cost(
        latencies=adding + passing,
        transmitted=Fraction(adding + passing, blocks),
        added=Fraction(adding, blocks),
    )


@each((ranks,) for ranks in (3, 4, 7, 16, 33, 64))
def test_the_double_trees_send_everything_twice(ranks: int) -> None:
    """MG-WFBP, Table 2 prints b = beta + gamma; with many blocks it is 2 beta + gamma."""
    blocks = 4096
    found = cost("all-reduce", "double-binary-trees", ranks, blocks)
    filling = 8 * ranks.bit_length()
    assert 2 * blocks < found.latencies < 2 * blocks + filling
    assert found.transmitted == Fraction(found.latencies, blocks)
    assert blocks < found.added * blocks < blocks + filling
    for collective in ("broadcast", "reduce"):
        one_way = cost(collective, "double-binary-trees", ranks, blocks)
        assert blocks <= one_way.latencies < blocks + filling


def test_the_table_of_counted_costs() -> None:
    compared = set()
    for what, names, *formulas in table_rows(text_of("algorithms.md"), 5):
        collective, _, condition = what.partition(", ")
        if collective not in PROGRAMS or not names.startswith("`"):
            continue
        for algorithm in names.replace("`", "").split(", "):
            compared.add((collective, algorithm))
            for ranks in range(2, 41):
                power = 1 << (ranks.bit_length() - 1)
                if (condition == "2^k" and ranks != power) or (ranks == 2 and "N > 2" in condition):
                    continue
                found = cost(collective, algorithm, ranks, 41)  # type: ignore[arg-type]
                names_ = {"N": ranks, "Q": power, "f": int(power < ranks), "m": 41}
                expected = [evaluate(formula.strip("`"), **names_) for formula in formulas]
                counted = [float(found.latencies), float(found.transmitted), float(found.added)]
                assert counted == pytest.approx(expected), (collective, algorithm, ranks)
    assert compared == {name for name in NAMES if name[1] != "double-binary-trees"}


def test_a_step_lasts_as_long_as_its_busiest_port() -> None:
    """Rank 0 sends twice in the first step, and rank 2 receives most and adds most."""
    first = ((0, 0, 1, 0, 1, False), (0, 0, 2, 0, 1, True), (0, 3, 2, 1, 4, True))
    schedule = own("own", 4, 4, *first, (2, 1, 3, 0, 2, False))
    assert derived_cost(schedule) == Cost(
        latencies=2 + 1, transmitted=Fraction(4 + 2, 4), added=Fraction(4, 4)
    )


def test_seconds() -> None:
    half = Cost(latencies=3, transmitted=Fraction(3, 2), added=Fraction(1, 4))
    costs = {"alpha_s": 2.0, "beta_s_per_byte": 0.5}
    assert half.seconds(1000, **costs) == 756
    assert half.seconds(1000, **costs, gamma_s_per_byte=4.0) == 756 + 1000


@each([*ROWS, *PIPELINED])
def test_one_rank_pays_nothing(collective: Collective, algorithm: str) -> None:
    nothing = Cost(latencies=0, transmitted=Fraction(0), added=Fraction(0))
    assert cost(collective, algorithm, 1) == nothing


def test_a_root_elsewhere_costs_the_same() -> None:
    for algorithm in ("minimum-spanning-tree", "bidirectional-exchange", "direct"):
        costs = {derived_cost(program("broadcast", algorithm, 12, root=root)) for root in range(12)}
        assert len(costs) == 1
