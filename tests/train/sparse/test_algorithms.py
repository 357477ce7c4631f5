"""Every algorithm in a simulated world: agreement, conservation, refusals, for P from 1 to 16."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.sparse_world import run_in_one_process
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline.errors import InternalError
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS, sends
from syncline.train.sparse.algorithms import (
    ALGORITHMS,
    Content,
    ExchangeOutcome,
    ExchangeStep,
    Refusal,
    Share,
)
from syncline.train.sparse.memory import HostMemory, Tracked
from syncline.train.sparse.vector import PRECISIONS, Precision, Quota, SparseVector, rounded
from syncline.train.sparse.wire import WireFormat
from tests.train.sparse.vectors import Dense, assert_same, entries_of, largest

every = pytest.mark.parametrize("name", ALGORITHMS)


class Case(NamedTuple):
    gradients: list[Dense]
    k: int
    precision: Precision = "float32"
    lowest_keeps: bool = False

    def largest(self) -> list[Content]:
        """Return what the ranks send without residuals."""
        return [rounded(largest(g, self.k), self.precision)[0] for g in self.gradients]


@st.composite
def cases(draw: st.DrawFn, *, exact: bool = False, powers: bool = False) -> Case:
    """Draw what P ranks have, of the same length; numbers by a seed, which is ten times faster.

    Args:
        exact: whether to draw whole numbers, whose sums are not rounded, and send all their bits.
        powers: whether P is a power of two.
    """
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]) if powers else st.integers(1, 16))
    length = draw(st.integers(0, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (ranks, length)
    drawn = generator.integers(-4, 5, shape).astype(np.float32)
    if not exact and draw(st.booleans()):
        sizes = np.float32(10) ** generator.integers(-6, 7, shape)
        drawn = (generator.standard_normal(shape, np.float32) * sizes).astype(np.float32)
    drawn[generator.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = 0
    k = draw(st.integers(1, max(1, length)))
    precision = "float32" if exact else draw(st.sampled_from(PRECISIONS))
    return Case(list(drawn), k, precision, draw(st.booleans()))


def shares_of(case: Case, vectors: list[Content]) -> list[Share]:
    quota = Quota((len(case.gradients[0]),), (case.k,))
    return [
        Share(rank, len(vectors), own, quota, case.precision, case.lowest_keeps)
        for rank, own in enumerate(vectors)
    ]


def exchanged(name: str, case: Case, own: list[Content]) -> list[ExchangeOutcome]:
    """Run an exchange in which everything is written and read."""
    length = len(case.gradients[0])
    wire = WireFormat(k=case.k, length=length, precision=case.precision, digest=7)
    return run_in_one_process(
        ALGORITHMS[name],
        shares_of(case, own),
        lambda contents: tuple(wire.read(wire.write(content)) for content in contents),
    )


def selections(case: Case, residuals: list[Dense]) -> list[Content]:
    """Take what each rank sends out of its residual."""
    taken: list[Content] = []
    for residual in residuals:
        values = torch.from_numpy(residual)
        unit = [Tracked(values, torch.zeros_like(values))]
        found = HostMemory().take([unit], [case.k], momentum=0.0)
        sent, remainder = rounded(found, case.precision)
        residual[remainder.indices] += remainder.values
        taken.append(sent)
    return taken


def kept_and_delivered(name: str, case: Case, steps: int) -> NDArray[np.float64]:
    """Make some exchanges; return the sum of what ranks keep and of what was delivered to all."""
    residuals = [np.zeros_like(gradient) for gradient in case.gradients]
    delivered = np.zeros(len(case.gradients[0]), np.float64)
    for _ in range(steps):
        for residual, gradient in zip(residuals, case.gradients, strict=True):
            residual += gradient
        outcomes = exchanged(name, case, selections(case, residuals))
        for outcome, residual in zip(outcomes, residuals, strict=True):
            assert_same(outcome.delivered, outcomes[0].delivered)
            residual[outcome.returned.indices] += outcome.returned.values
        delivered += outcomes[0].delivered.dense()
    return delivered + np.sum(residuals, axis=0, dtype=np.float64)


@every
@given(case=cases(exact=True), steps=st.integers(1, 4))
def test_nothing_is_lost_to_the_last_bit(name: str, case: Case, steps: int) -> None:
    """Whole numbers add up without rounding, so what is kept and delivered is exactly all."""
    expected = steps * np.sum(case.gradients, axis=0)
    np.testing.assert_array_equal(kept_and_delivered(name, case, steps), expected)


@every
@given(case=cases(), steps=st.integers(1, 3))
def test_nothing_is_lost_but_rounding(name: str, case: Case, steps: int) -> None:
    found = kept_and_delivered(name, case, steps)
    expected = steps * np.sum(case.gradients, axis=0, dtype=np.float64)
    magnitudes = steps * np.sum(np.abs(case.gradients), axis=0, dtype=np.float64)
    # Every addition rounds once, of numbers no larger than all magnitudes together.
    additions = 8 * steps * (len(case.gradients) + 4)
    allowed = additions * 2.0**-24 * magnitudes + 1e-37
    np.testing.assert_array_less(np.abs(found - expected), allowed)


@given(cases(exact=True))
def test_naive_delivers_the_best_of_all_and_top_k_everything(case: Case) -> None:
    own = case.largest()
    everything = np.sum([vector.dense() for vector in own], axis=0)
    naive, top_k = (exchanged(name, case, own) for name in ("gtop-k-naive", "top-k"))
    assert_same(naive[0].delivered, largest(everything, case.k))
    assert_same(top_k[0].delivered, entries_of(everything))
    assert all(len(outcome.returned) == 0 for outcome in top_k)


@pytest.mark.parametrize("name", ["gtop-k", "gtop-k-butterfly"])
@given(cases(exact=True))
def test_with_room_for_all_or_two_ranks_it_is_the_naive_one(name: str, case: Case) -> None:
    if len(case.gradients) > 2:
        case = case._replace(k=max(1, len(case.gradients[0])))
    own = case.largest()
    found, expected = exchanged(name, case, own), exchanged("gtop-k-naive", case, own)
    assert_same(found[0].delivered, expected[0].delivered)


@given(cases(powers=True))
def test_tree_and_butterfly_for_powers_of_two(case: Case) -> None:
    """Both merge neighbours first, so the butterfly gives up nothing for its speed."""
    own = case.largest()
    tree, butterfly = (exchanged(name, case, own) for name in ("gtop-k", "gtop-k-butterfly"))
    assert_same(butterfly[0].delivered, tree[0].delivered)
    for rank, (expected, found) in enumerate(zip(tree, butterfly, strict=True)):
        if case.lowest_keeps:
            assert_same(found.returned, expected.returned)
        else:
            # What is dropped waits on one of the two ranks of a first merge, which its index
            # tells, of the four of a second, and so on.
            assert (found.returned.indices % 2 == rank % 2).all()


def test_what_is_dropped_waits_where_its_index_says() -> None:
    """Rank 0's 2 at index 1 is dropped in round one, while ranks 2 and 3 deliver that index."""
    rows = [[5, 2, 0], [4, 0, 0], [0, 8, 0], [0, 7, 0]]
    case = Case([np.array(row, np.float32) for row in rows], 1)
    own = [entries_of(row) for row in case.gradients]
    own[0] = entries_of(np.array([0, 2, 0], np.float32))
    outcomes = exchanged("gtop-k-butterfly", case, own)
    assert outcomes[0].delivered.dense().tolist() == [0, 15, 0]
    returned = [outcome.returned.dense().tolist() for outcome in outcomes]
    assert returned == [[4, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0]]
    outcomes = exchanged("gtop-k-butterfly", case._replace(lowest_keeps=True), own)
    returned = [outcome.returned.dense().tolist() for outcome in outcomes]
    assert returned == [[4, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


@every
@pytest.mark.parametrize("ranks", range(1, 17))
def test_a_refusal_reaches_every_rank(name: str, ranks: int) -> None:
    case = Case([np.arange(6, dtype=np.float32)] * ranks, 2)
    for refusing in range(ranks):
        own = case.largest()
        own[refusing] = Refusal(refusing, 3, 4)
        for outcome in exchanged(name, case, own):
            assert outcome.delivered == Refusal(refusing, 3, 4)
    everyone = [Refusal(rank, 1, rank) for rank in range(ranks)]
    for outcome in exchanged(name, case, everyone):
        assert outcome.delivered == Refusal(0, 1, 0)


def cost_of(name: str, ranks: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Return the steps and the contents one way of the rank that has most, and all that is sent."""
    steps, contents = [0] * ranks, [0] * ranks
    sent = []

    def counted(share: Share) -> Any:
        run = ALGORITHMS[name](share)
        arrived = None
        while True:
            try:
                asked = run.send(arrived)
            except StopIteration as ended:
                return ended.value
            steps[share.rank] += 1
            contents[share.rank] += max(len(asked.contents), asked.receives)
            if asked.send_to is not None:
                sent.append((share.rank, asked.send_to, len(asked.contents)))
            arrived = yield asked

    case = Case([np.arange(4, dtype=np.float32)] * ranks, 2)
    run_in_one_process(counted, shares_of(case, case.largest()))
    return max(steps), max(contents), sorted(sent)


@pytest.mark.parametrize("name", sorted(SPARSE_ALGORITHMS))
@pytest.mark.parametrize("ranks", range(1, 17))
def test_rounds_and_contents_are_those_of_the_cost_model(name: str, ranks: int) -> None:
    modelled = [(rank, to, count) for count, pairs in sends(name, ranks) for rank, to in pairs]
    assert cost_of(name, ranks) == (*SPARSE_ALGORITHMS[name](ranks)[:2], sorted(modelled))


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (lambda _own, other: ExchangeStep(receive_from=other, receives=1), "wait for each other"),
        (lambda own, other: ExchangeStep(send_to=other, contents=(own,)), "never received"),
        (
            lambda own, other: ExchangeStep(other, (own,), other, 2),
            "rank 0 expected 2 contents, 1 came",
        ),
    ],
)
def test_a_wrong_algorithm_is_told(asks: Any, said: str) -> None:
    def wrong(share: Share) -> Any:
        yield asks(share.own, 1 - share.rank)

    shares = shares_of(Case([np.zeros(1, np.float32)] * 2, 1), [SparseVector.empty(1)] * 2)
    with pytest.raises(InternalError, match=said):
        run_in_one_process(wrong, shares)
