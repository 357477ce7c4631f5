"""Every algorithm in a simulated world: agreement, conservation, refusals, for P from 1 to 16."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.sparse_world import run_in_one_process
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import InternalError
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS
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
    precision: Precision
    lowest_keeps: bool = False


@st.composite
def cases(draw: st.DrawFn, *, exact: bool = False, precision: Precision | None = None) -> Case:
    """Draw what P ranks have, of the same length; numbers by a seed, which is ten times faster."""
    ranks, length = draw(st.integers(1, 16)), draw(st.integers(0, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (ranks, length)
    drawn = generator.integers(-4, 5, shape).astype(np.float32)
    if not exact and draw(st.booleans()):
        drawn = generator.standard_normal(shape, np.float32) * np.float32(10) ** (
            generator.integers(-6, 7, shape)
        ).astype(np.float32)
    drawn[generator.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = 0
    k = draw(st.integers(1, max(1, length)))
    precision = precision or draw(st.sampled_from(PRECISIONS))
    return Case(list(drawn), k, precision, draw(st.booleans()))


def shares_of(case: Case, vectors: list[Content]) -> list[Share]:
    ranks, length = len(vectors), len(case.gradients[0])
    quota = Quota((length,), (case.k,))
    return [
        Share(rank, ranks, own, quota, case.precision, case.lowest_keeps)
        for rank, own in enumerate(vectors)
    ]


def over_the_wire(case: Case) -> WireFormat:
    return WireFormat(k=case.k, length=len(case.gradients[0]), precision=case.precision, digest=7)


def exchanged(name: str, case: Case, own: list[Content]) -> list[ExchangeOutcome]:
    """Run an exchange in which everything is written and read."""
    wire = over_the_wire(case)
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
        assert isinstance(found, SparseVector)
        sent, remainder = rounded(found, case.precision)
        residual[remainder.indices] += remainder.values
        taken.append(sent)
    return taken


def vector_of(content: Content) -> SparseVector:
    assert isinstance(content, SparseVector)
    return content


def step(name: str, case: Case, residuals: list[Dense]) -> SparseVector:
    """Make one exchange; return what was delivered, the same on all ranks."""
    outcomes = exchanged(name, case, selections(case, residuals))
    delivered = [vector_of(outcome.delivered) for outcome in outcomes]
    for outcome, residual in zip(outcomes, residuals, strict=True):
        assert_same(vector_of(outcome.delivered), delivered[0])
        residual[outcome.returned.indices] += outcome.returned.values
    return delivered[0]


# Conservation


@every
@given(case=cases(exact=True, precision="float32"), steps=st.integers(1, 4))
def test_nothing_is_lost_to_the_last_bit(name: str, case: Case, steps: int) -> None:
    """Whole numbers add up without rounding, so what is kept and delivered is exactly all."""
    residuals = [np.zeros_like(gradient) for gradient in case.gradients]
    delivered = np.zeros_like(case.gradients[0])
    for _ in range(steps):
        for residual, gradient in zip(residuals, case.gradients, strict=True):
            residual += gradient
        delivered += step(name, case, residuals).dense()
    expected = steps * np.sum(case.gradients, axis=0)
    np.testing.assert_array_equal(np.sum(residuals, axis=0) + delivered, expected)


@every
@given(case=cases(), steps=st.integers(1, 3))
def test_nothing_is_lost_but_rounding(name: str, case: Case, steps: int) -> None:
    residuals = [np.zeros_like(gradient) for gradient in case.gradients]
    delivered = np.zeros(len(case.gradients[0]), np.float64)
    given_ = np.zeros_like(delivered)
    magnitudes = np.zeros_like(delivered)
    for _ in range(steps):
        for residual, gradient in zip(residuals, case.gradients, strict=True):
            residual += gradient
            given_ += gradient
            magnitudes += np.abs(gradient, dtype=np.float64)
        delivered += step(name, case, residuals).dense()
    found = np.sum(residuals, axis=0, dtype=np.float64) + delivered
    # Every addition rounds once, of numbers no larger than all magnitudes together.
    additions = 8 * steps * (len(case.gradients) + 4)
    np.testing.assert_array_less(np.abs(found - given_), additions * 2.0**-24 * magnitudes + 1e-37)


# What is delivered


@given(cases(exact=True, precision="float32"))
def test_naive_delivers_the_best_of_all(case: Case) -> None:
    own: list[Content] = [largest(gradient, case.k) for gradient in case.gradients]
    outcomes = exchanged("gtop-k-naive", case, own)
    everything = np.sum([vector_of(vector).dense() for vector in own], axis=0)
    assert_same(vector_of(outcomes[0].delivered), largest(everything, case.k))


@given(cases(exact=True, precision="float32"))
def test_top_k_delivers_everything(case: Case) -> None:
    own: list[Content] = [largest(gradient, case.k) for gradient in case.gradients]
    outcomes = exchanged("top-k", case, own)
    everything = np.sum([vector_of(vector).dense() for vector in own], axis=0)
    assert_same(vector_of(outcomes[0].delivered), entries_of(everything))
    assert all(len(outcome.returned) == 0 for outcome in outcomes)


@pytest.mark.parametrize("name", ["gtop-k", "gtop-k-butterfly"])
@given(cases(exact=True, precision="float32"))
def test_with_room_for_all_or_two_ranks_it_is_the_naive_one(name: str, case: Case) -> None:
    if len(case.gradients) > 2:
        case = case._replace(k=max(1, len(case.gradients[0])))
    own: list[Content] = [largest(gradient, case.k) for gradient in case.gradients]
    found, expected = exchanged(name, case, own), exchanged("gtop-k-naive", case, own)
    assert_same(vector_of(found[0].delivered), vector_of(expected[0].delivered))


@given(cases(), st.integers(0, 4))
def test_tree_and_butterfly_deliver_the_same_for_powers_of_two(case: Case, power: int) -> None:
    """Both merge neighbours first, so the butterfly gives up nothing for its speed."""
    case = case._replace(gradients=(case.gradients * 16)[: 2**power])
    own: list[Content] = [
        rounded(largest(gradient, case.k), case.precision)[0] for gradient in case.gradients
    ]
    tree, butterfly = exchanged("gtop-k", case, own), exchanged("gtop-k-butterfly", case, own)
    assert_same(vector_of(butterfly[0].delivered), vector_of(tree[0].delivered))


@given(cases(), st.integers(1, 4))
def test_a_dropped_index_waits_on_ranks_that_it_tells(case: Case, power: int) -> None:
    """On one of the two ranks of a first merge, of the four of a second, and so on."""
    case = case._replace(gradients=(case.gradients * 16)[: 2**power], lowest_keeps=False)
    own: list[Content] = [
        rounded(largest(gradient, case.k), case.precision)[0] for gradient in case.gradients
    ]
    for rank, outcome in enumerate(exchanged("gtop-k-butterfly", case, own)):
        assert (outcome.returned.indices % 2 == rank % 2).all()


@given(cases(), st.integers(0, 4))
def test_the_lowest_keep_what_they_keep_in_the_tree(case: Case, power: int) -> None:
    case = case._replace(gradients=(case.gradients * 16)[: 2**power], lowest_keeps=True)
    own: list[Content] = [
        rounded(largest(gradient, case.k), case.precision)[0] for gradient in case.gradients
    ]
    tree, butterfly = exchanged("gtop-k", case, own), exchanged("gtop-k-butterfly", case, own)
    for expected, found in zip(tree, butterfly, strict=True):
        assert_same(found.returned, expected.returned)


def test_what_is_dropped_waits_where_its_index_says() -> None:
    """Rank 0's 2 at index 1 is dropped in round one, while ranks 2 and 3 deliver that index."""
    rows = [[5, 2, 0], [4, 0, 0], [0, 8, 0], [0, 7, 0]]
    case = Case([np.array(row, np.float32) for row in rows], 1, "float32")
    own: list[Content] = [entries_of(row) for row in case.gradients]
    own[0] = entries_of(np.array([0, 2, 0], np.float32))
    outcomes = exchanged("gtop-k-butterfly", case, own)
    assert_same(vector_of(outcomes[0].delivered), entries_of(np.array([0, 15, 0], np.float32)))
    returned = [outcome.returned.dense().tolist() for outcome in outcomes]
    assert returned == [[4, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0]]
    outcomes = exchanged("gtop-k-butterfly", case._replace(lowest_keeps=True), own)
    returned = [outcome.returned.dense().tolist() for outcome in outcomes]
    assert returned == [[4, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def published_loss(vectors: list[Dense], k: int) -> float:
    """Return the share of the mass that the published algorithm neither delivers nor keeps.

    gTop-k, Algorithms 3 and 4: a rank puts back what it sent and the final mask lacks.
    """
    held = [largest(vector, k).dense() for vector in vectors]
    sent = [vector.copy() for vector in held]
    while len(held) > 1:
        held = [largest(a + b, k).dense() for a, b in zip(held[::2], held[1::2], strict=True)]
    mask = held[0] != 0
    kept = np.sum([np.where(mask, 0, vector) for vector in sent], axis=0)
    lost = np.sum(sent, axis=0) - held[0] - kept
    return float(np.abs(lost).sum() / np.abs(sent).sum())


@pytest.mark.parametrize(("ranks", "least"), [(8, 0.005), (64, 0.02)])
def test_the_published_tree_loses_what_ours_keep(ranks: int, least: float) -> None:
    generator = np.random.default_rng(0)
    common = generator.standard_normal(10_000)
    vectors = [
        (common + generator.standard_normal(10_000)).astype(np.float32) for _ in range(ranks)
    ]
    assert published_loss(vectors, 100) > least
    case = Case(vectors, 100, "float32")
    own: list[Content] = [largest(vector, 100) for vector in vectors]
    outcomes = exchanged("gtop-k-butterfly", case, own)
    found = np.sum([o.returned.dense() for o in outcomes], axis=0, dtype=np.float64)
    found += vector_of(outcomes[0].delivered).dense()
    sent = np.sum([vector_of(vector).dense() for vector in own], axis=0, dtype=np.float64)
    np.testing.assert_allclose(found, sent, atol=1e-4)


# Refusals


@every
@pytest.mark.parametrize("ranks", range(1, 17))
def test_a_refusal_reaches_every_rank(name: str, ranks: int) -> None:
    gradients = [np.arange(6, dtype=np.float32) for _ in range(ranks)]
    case = Case(gradients, 2, "float32")
    for refusing in range(ranks):
        own: list[Content] = [largest(gradient, 2) for gradient in gradients]
        own[refusing] = Refusal(refusing, 3, 4)
        for outcome in exchanged(name, case, own):
            assert outcome.delivered == Refusal(refusing, 3, 4)
    everyone: list[Content] = [Refusal(rank, 1, rank) for rank in range(ranks)]
    for outcome in exchanged(name, case, everyone):
        assert outcome.delivered == Refusal(0, 1, 0)


# Cost


def cost_of(name: str, ranks: int) -> tuple[int, int]:
    """Return the steps and the contents one way of the rank that has most."""
    steps, contents = [0] * ranks, [0] * ranks

    def counted(share: Share) -> Generator[ExchangeStep, tuple[Content, ...], ExchangeOutcome]:
        run = ALGORITHMS[name](share)
        arrived: tuple[Content, ...] | None = None
        while True:
            try:
                asked = run.send(arrived)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as ended:
                outcome: ExchangeOutcome = ended.value
                return outcome
            steps[share.rank] += 1
            contents[share.rank] += max(len(asked.contents), asked.receives)
            arrived = yield asked

    case = Case([np.arange(4, dtype=np.float32)] * ranks, 2, "float32")
    run_in_one_process(counted, shares_of(case, [largest(g, 2) for g in case.gradients]))
    return max(steps), max(contents)


@pytest.mark.parametrize("name", sorted(SPARSE_ALGORITHMS))
@pytest.mark.parametrize("ranks", range(2, 17))
def test_rounds_and_contents_are_those_of_the_cost_model(name: str, ranks: int) -> None:
    assert cost_of(name, ranks) == SPARSE_ALGORITHMS[name](ranks)[:2]


def test_one_rank_sends_nothing() -> None:
    assert {cost_of(name, 1) for name in ALGORITHMS} == {(0, 0)}


def test_a_wrong_algorithm_is_told() -> None:
    case = Case([np.zeros(1, np.float32)] * 2, 1, "float32")
    shares = shares_of(case, [SparseVector.empty(1)] * 2)

    def waits(share: Share) -> Any:
        yield ExchangeStep(receive_from=1 - share.rank, receives=1)

    def talks(share: Share) -> Any:
        yield ExchangeStep(send_to=1 - share.rank, contents=(share.own,))

    def miscounts(share: Share) -> Any:
        yield ExchangeStep(1 - share.rank, (share.own,), 1 - share.rank, 2)

    for wrong, said in [
        (waits, "wait for each other"),
        (talks, "never received"),
        (miscounts, "rank 0 expected 2 contents, 1 came"),
    ]:
        with pytest.raises(InternalError, match=said):
            run_in_one_process(wrong, shares)
