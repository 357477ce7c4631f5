"""Who sums what, where all-reduces are decoupled."""

from __future__ import annotations

from hypothesis import given

from syncline.plan.plan import Message, Plan, Tensor
from syncline.train.engine.layout import shares_of
from tests.strategies import many
from tests.train.engine.test_layout import plans


@many
@given(plans())
def test_shares_are_disjoint_and_complete(plan: Plan) -> None:
    for message, shares in zip(plan.messages, shares_of(plan), strict=True):
        if message.collective == "all-reduce":
            assert shares == ()
            continue
        assert len(shares) == plan.workers
        held = [e for pieces in shares for start, stop in pieces for e in range(start, stop)]
        assert sorted(held) == list(range(message.stop - message.start))


@many
@given(plans())
def test_gathered_shares_are_what_was_summed(plan: Plan) -> None:
    """A worker hands round exactly those elements that a reduce-scatter has left with it."""
    shares = shares_of(plan)
    summed: dict[int, set[int]] = {worker: set() for worker in range(plan.workers)}
    gathered: dict[int, set[int]] = {worker: set() for worker in range(plan.workers)}
    for message, workers in zip(plan.messages, shares, strict=True):
        into = {"reduce-scatter": summed, "all-gather": gathered}.get(message.collective)
        for worker, pieces in enumerate(workers):
            for start, stop in pieces:
                assert into is not None
                into[worker].update(range(message.start + start, message.start + stop))
    assert summed == gathered


@many
@given(plans())
def test_reduce_scatters_are_even(plan: Plan) -> None:
    for message, workers in zip(plan.messages, shares_of(plan), strict=True):
        if message.collective == "reduce-scatter":
            sizes = [sum(stop - start for start, stop in pieces) for pieces in workers]
            assert all(len(pieces) <= 1 for pieces in workers)
            assert max(sizes) == -(-(message.stop - message.start) // plan.workers)
            # Rows of equal length: what the all-to-all exchange needs. Later workers get less.
            assert sizes == sorted(sizes, reverse=True)


def test_an_example() -> None:
    plan = Plan(
        planner="by hand",
        model="model",
        workers=3,
        tensors=(Tensor(name="a", elements=10),),
        messages=(
            Message(start=0, stop=7, collective="reduce-scatter"),
            Message(start=7, stop=10, collective="all-reduce"),
            Message(start=2, stop=7, collective="all-gather"),
            Message(start=0, stop=2, collective="all-gather"),
        ),
    )
    assert shares_of(plan) == (
        (((0, 3),), ((3, 6),), ((6, 7),)),
        (),
        (((0, 1),), ((1, 4),), ((4, 5),)),
        (((0, 2),), (), ()),
    )
