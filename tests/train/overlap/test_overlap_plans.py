"""Any plan on any number of ranks gives what its messages give one after the other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.engine.layout import needs_engine
from tests.cases import first_few
from tests.train.overlap import overlap_jobs
from tests.train.overlap.overlap_plans import Style
from tests.train.overlap.overlap_rig import OVERLAPS, SYNCHRONOUS
from tests.workers import WorkerPool

STYLES = {
    "pieces, need first": (Style(), 0.0),
    "pieces, as they get ready": (Style(order="ready", in_flight=1), 0.5),
    "shuffled, 4 in flight": (Style(order="3", piece_elements=70, in_flight=4), 0.3),
    "buckets of their own": (Style(aligned=True, piece_elements=60), 0.0),
    "one message": (Style(piece_elements=10**6, in_flight=1), 0.0),
    "an element each, almost": (Style(piece_elements=13, in_flight=8), 0.7),
    "decoupled": (Style(decoupled=True), 0.0),
    "decoupled, shuffled, 3 in flight": (Style(decoupled=True, order="5", in_flight=3), 0.4),
    "decoupled, of odd sizes": (Style(decoupled=True, piece_elements=97, aligned=True), 0.2),
    "held back (Horovod)": (Style(delay_s=0.002, order="ready"), 1.0),
}
WAITING = {
    "backward waits": Style(wait="update", order="5"),
    "backward waits, decoupled": Style(wait="update", decoupled=True, in_flight=4),
    "backward waits, held back": Style(wait="update", delay_s=0.002, in_flight=1),
}


def check(results: list[dict[str, object]], happens: str | None) -> None:
    for result in results:
        assert result["differences"] == []
        assert result["plan"] is None, "the reducer did not take the buckets"
        assert result["parameters"] == results[0]["parameters"]
        if happens is not None:
            assert result["happened"] == happens


# On our backend, in a fifth of the time; any plan at all, below, on Gloo.


@pytest.mark.parametrize("ranks", first_few([3, 4]))
@pytest.mark.parametrize("name", STYLES)
def test_every_kind_of_plan(workers: WorkerPool, name: str, ranks: int) -> None:
    style, let_through = STYLES[name]
    optimizer = ("sgd", "adamw")[ranks % 2]
    arguments = (ranks, None, style, let_through, optimizer, 20)
    results = workers.run(overlap_jobs.beside_oracle, *arguments, backend="syncline")
    check(results, OVERLAPS if let_through < 0.5 else None)


@pytest.mark.parametrize("name", WAITING)
def test_plans_for_which_backward_waits(workers: WorkerPool, name: str) -> None:
    arguments = (3, None, WAITING[name], 0.0, "sgd", 20)
    check(workers.run(overlap_jobs.beside_oracle, *arguments, backend="syncline"), SYNCHRONOUS)


SIZES = {
    "leave.bias": 5,
    "leave.weight": 100,
    "norm.weight": 20,
    "norm.bias": 20,
    "hidden.bias": 20,
    "hidden.weight": 400,
    "enter.bias": 20,
    "enter.weight": 240,
}
TOTAL = sum(SIZES.values())
TENSORS = tuple(Tensor(name=name, elements=n) for name, n in SIZES.items())


@st.composite
def spans(draw: st.DrawFn, start: int, stop: int, most: int) -> list[tuple[int, int]]:
    cuts = draw(st.sets(st.integers(start, stop), max_size=most)) | {start, stop}
    return list(itertools.pairwise(sorted(cuts)))


@st.composite
def plans(draw: st.DrawFn, ranks: int) -> Plan:
    """Draw a plan with any cuts, any order, decoupled anyhow, gathered in other cuts."""
    whole: list[Message] = []
    gathers: list[tuple[int, int]] = []
    for start, stop in draw(spans(0, TOTAL, 6)):
        if draw(st.booleans()):
            kind = "all-reduce"
        else:
            kind = "reduce-scatter"
            gathers += draw(spans(start, stop, 2))
        whole += [Message(start=a, stop=b, collective=kind) for a, b in draw(spans(start, stop, 2))]
    messages = draw(st.permutations(whole))
    for start, stop in draw(st.permutations(gathers)):
        over = [n for n, m in enumerate(messages) if m.start < stop and start < m.stop]
        sums = [n for n in over if messages[n].collective == "reduce-scatter"]
        at = draw(st.integers(max(sums, default=-1) + 1, len(messages)))
        messages.insert(at, Message(start=start, stop=stop, collective="all-gather"))
    how = {"planner": "drawn", "model": "Net", "workers": ranks, "tensors": TENSORS}
    how["wait"] = draw(st.sampled_from(["need", "need", "update"]))
    return Plan(messages=tuple(messages), in_flight=draw(st.integers(1, 4)), **how)


@pytest.mark.parametrize("ranks", first_few([2, 3]))
def test_any_plan(workers: WorkerPool, ranks: int) -> None:
    @settings(
        max_examples=8,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(plan=plans(ranks), let_through=st.sampled_from([0.0, 0.3, 0.8]))
    def run(plan: Plan, let_through: float) -> None:
        # DDP's reducer runs other plans, in its first buckets whenever it is made anew.
        assume(needs_engine(plan))
        arguments = (plan.to_json(), Style(), let_through, "sgd", 6)
        check(workers.run(overlap_jobs.beside_oracle, ranks, *arguments), None)

    run()
