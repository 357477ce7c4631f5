"""Whole starts of trainings, played without training: times are what the tests say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import Norm
from syncline.plan.simulator.contention import Measured
from syncline.train import experiments, trials
from syncline.train.policy import RECORDED_ITERATIONS, Policy
from syncline.train.stages import (
    Deferring,
    Findings,
    LogLine,
    Measurement,
    Probe,
    Settings,
    Stage,
    Typical,
)
from tests import strategies as some

# The first layer's gradient comes last and is as large as all others: its message can only be
# hidden by the next forward pass.
PROFILE = some.profile_of([10_000_000] * 8, [250_000] * 8, forward_ns=50_000_000)
NETWORK = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-8)
SINGLE = Plan.merging("by hand", PROFILE, 4, [7])
GIVEN = replace(SINGLE, wait="need")
STOCK_S = 0.19  # as the simulator predicts without contention
PASSES_S = 0.13  # of :data:`PROFILE`
CALIBRATING = [f"calibrating with {parts} equal parts" for parts in trials.CALIBRATION_PARTS]
"""Before a plan that defers updates, where DDP shows contention."""
READ = "gradients are read before each step"

DEFERRING = Deferring(can_defer=True, was_asked=True)
WAITING = Deferring()


class Run(Policy):
    def __init__(self, deferring: Deferring = DEFERRING, **asked: Any) -> None:
        more = {name: asked.pop(name) for name in ("remembered", "resumed") if name in asked}
        super().__init__(Settings(**asked), SINGLE, deferring, **more)
        self.now = deferring
        self.script = self.steps()


def play(
    run: Run,
    takes: Callable[[Stage], float] = lambda _: STOCK_S,
    reads: Callable[[Stage], str | None] = lambda _: None,
    *,
    norm: Norm | None = None,
    active: Callable[[Stage], float | None] = lambda _: None,
    computing: Callable[[Stage], float | None] = lambda _: None,
    scatter: float = 0.0,
    scale: float = 1.0,
    uneven: float = 0.0,
    **before: Any,
) -> list[Stage]:
    """Send what each step measured until the steady state; return the stages.

    Iterations take in turns as much less and more as ``scatter`` says, passes that are observed as
    ``uneven`` says. ``active`` and ``computing`` say how much longer a worker computed than alone.
    All times are multiplied by ``scale``. ``before`` is what the stage before them measured.
    """
    slow = tuple(replace(o, duration_s=o.duration_s * scale) for o in PROFILE.operations)
    profile = replace(PROFILE, operations=slow)
    network = Network.line(workers=4, a_s=1e-5 * scale, b_s_per_byte=1e-8 * scale)
    begun = {"times_s": (1.0,), "norm": norm, "deferring": run.now} | before
    step = run.script.send(Measurement(**begun)) if before else next(run.script)
    stages: list[Stage] = []
    times: list[float] = []

    def alone_and(slower_s: float | None) -> Typical | None:
        return None if slower_s is None else Typical(PASSES_S * scale + slower_s, 0.0)

    while not isinstance(step, Stage) or step.iterations:
        if isinstance(step, Probe):
            step = run.script.send(Measurement(network=network, deferring=run.now))
            continue
        stages.append(step)
        if not step.goes_on:
            times = []
        taken_s = takes(step) * scale
        times += [taken_s * (1 + scatter * (0, 1, -1)[n % 3]) for n in range(step.iterations)]
        read = reads(step)
        step = run.script.send(
            Measurement(
                times_s=tuple(times),
                passes_s=tuple(PASSES_S * (1 + uneven * (-1) ** n) for n in range(len(times))),
                profile=profile if step.turns and not step.record else None,
                active=alone_and(active(step)),
                computing=alone_and(computing(step)),
                read_early=read,
                norm=norm if read else None,
                deferring=run.now,
            )
        )
    return [*stages, step]


def contended(_: Stage) -> float:
    """Say that DDP's messages take 10 ms from computing."""
    return 0.01


def reads_early(stage: Stage) -> str | None:
    """Say that gradients are read before each step, wherever that could be seen."""
    return READ if stage.plan is not None and stage.plan.wait == "need" else None


def clips(stage: Stage) -> str | None:
    """Say that gradients are read before each step, where the plan has no norm."""
    return READ if reads_early(stage) and stage.plan and stage.plan.norm is None else None


def faster(stage: Stage) -> float:
    return STOCK_S if stage.plan is None else STOCK_S / 2


def gaining(stage: Stage) -> float:
    return STOCK_S + 0.01 if stage.plan is None else STOCK_S / 2


def slower(stage: Stage) -> float:
    return STOCK_S if stage.plan is None else STOCK_S * 2


def names(stages: list[Stage]) -> list[str]:
    """Return the names of stages, of several that go on once."""
    return [stage.name for stage in stages if not stage.goes_on]


def iterations(stages: list[Stage], name: str) -> int:
    return sum(stage.iterations for stage in stages if stage.name == name)


def said(run: Policy, text: str) -> list[LogLine]:
    return [line for line in run.notes.log_lines if text in line.text]


def trying(stages: list[Stage]) -> list[str]:
    return [name for name in names(stages) if name.startswith("trying")]


def test_overlap_is_tried_and_kept_where_it_gains() -> None:
    run = Run()
    stages = play(run, faster)
    measured = ["measuring DDP", "measuring DDP", "profiling", *CALIBRATING]
    assert names(stages) == [*measured, "trying overlap", "recording", "steady"]
    found = run.findings
    assert stages[-1].plan is found.plan
    assert (found.plan.planner, found.plan.wait, found.decision) == ("overlap", "need", "planned")
    assert found.reason.endswith("updates are deferred to the next forward pass")
    assert found.planned.iteration_s == STOCK_S / 2


def test_long_iterations_decide_after_a_few_of_each() -> None:
    stages = play(Run(), faster, scatter=0.005, scale=10.0)
    assert [(s.warmup, s.iterations) for s in stages] == [
        *((1, 1), (0, 3), (1, 2), (3, 3), (3, RECORDED_ITERATIONS), (3, 0))
    ]
    assert sum(s.warmup + s.iterations for s in stages[:3]) + 1 == 9  # the plan runs from there


def test_nothing_is_gained_by_any_plan_on_a_fast_network() -> None:
    run = Run(network=Network.line(workers=4, a_s=1e-6, b_s_per_byte=1e-12))
    stages = play(run, lambda _: 0.1301, scale=10.0, scatter=0.005)
    assert (run.findings.decision, run.findings.plan) == ("ddp", None)
    assert names(stages) == ["measuring DDP", "measuring DDP", "profiling", "recording", "steady"]
    assert sum(s.warmup + s.iterations for s in stages[:3]) == 8


@pytest.mark.parametrize(
    ("stock_s", "scatter", "count", "warmup"),
    [
        (2.0, 0.0, 3, 0),
        (2.0, 0.02, 7, 0),
        (0.1, 0.03, 33, 8),
        (0.05, 0.0, 20, 16),
        (1e-3, 0.0, 48, 16),
    ],
)
def test_short_and_uneven_iterations_are_compared_longer(
    stock_s: float, scatter: float, count: int, warmup: int
) -> None:
    """And a first second is waited for, at most 16 iterations."""
    stages = play(Run(planner="merge"), lambda _: stock_s, scatter=scatter)
    assert [stage.warmup for stage in stages[:2]] == [1, warmup]
    assert iterations(stages, "measuring DDP") == 1 + count  # the first look


@pytest.mark.parametrize(
    ("gain", "scatter", "least", "most"), [(0.2, 0.02, 3, 8), (0.02, 0.02, 9, 48), (0.0, 0, 12, 48)]
)
def test_a_trial_ends_as_soon_as_the_difference_is_significant(
    gain: float, scatter: float, least: int, most: int
) -> None:
    times = {None: 0.5, GIVEN: 0.5 * (1 - gain)}
    stages = play(Run(plan=GIVEN), lambda stage: times[stage.plan], scatter=scatter)
    assert least <= iterations(stages, "trying by hand") <= most


@pytest.mark.parametrize(
    ("scale", "uneven", "observed", "turns"),
    [(1.0, 0.0, 9, 3), (1.0, 0.3, 18, 3), (5.0, 0.0, 2, 1), (5.0, 0.3, 6, 1)],
)
def test_a_profile_is_measured_until_the_passes_are_known(
    scale: float, uneven: float, observed: int, turns: int
) -> None:
    """Short iterations are observed in turns, long ones in detail."""
    stages = play(Run(), faster, scale=scale, uneven=uneven)
    assert iterations(stages, "profiling") == observed
    for stage in stages:
        if stage.name == "profiling":
            assert (len(stage.turns), stage.observes_one_more) == (turns, turns == 3)


@pytest.mark.parametrize("norm", [None, "2"])
def test_what_the_engines_messages_take_from_computing_is_planned_for(norm: Norm | None) -> None:
    """5 ms each, found under a few messages and many, since DDP shows contention."""

    def active(stage: Stage) -> float | None:
        return 5e-3 * len(stage.plan.messages) if stage.name in CALIBRATING else None

    run = Run(profile=replace(PROFILE, norm=norm))
    stages = play(run, gaining, active=active, computing=contended)
    assert [s.plan.norm for s in stages if s.name in CALIBRATING] == [norm, norm]
    found = run.findings.network.contention_by_need
    assert found.per_message_s == pytest.approx(5e-3, rel=0.1)
    assert found.fitted


@pytest.mark.parametrize(("bytes_per_s", "calibrated"), [(1e8, True), (1e10, False)])
def test_the_engine_is_measured_where_overlapping_would_gain_much_if_it_cost_nothing(
    bytes_per_s: float, calibrated: bool
) -> None:
    """DDP alone says that every message stops computing, so that no plan is worth trying."""
    run = Run(network=Network.line(workers=4, a_s=1e-5, b_s_per_byte=1 / bytes_per_s))
    stages = play(
        run, lambda s: STOCK_S / 2 if s.plan else 0.25, computing=lambda _: 0.05, scatter=0.005
    )
    assert (names(stages)[3:5] == CALIBRATING) is calibrated


@pytest.mark.parametrize(("planner", "calibrated"), [("wfbp", CALIBRATING[-1:]), ("single", [])])
def test_the_reducer_is_measured_under_many_messages_where_such_a_plan_is_to_be_tried(
    planner: str, calibrated: list[str]
) -> None:
    """Each message takes 5 ms from computing, which DDP's do not tell."""

    def slowdown_s(stage: Stage) -> float:
        return 5e-3 * len(stage.plan.messages) if stage.plan is not None else 0.0

    run = Run(WAITING, planner=planner)
    stages = play(run, lambda s: STOCK_S + slowdown_s(s), computing=slowdown_s)
    tried = [f"trying {planner}", "comparing with DDP", f"comparing {planner}"]
    assert names(stages)[3:-2] == [*calibrated, *tried]
    expected_s = STOCK_S + 5e-3 * len(PLANNERS[planner].plan(PROFILE, NETWORK).messages)
    if calibrated:
        assert run.findings.predicted_planned_s == pytest.approx(expected_s, rel=0.05)


def test_an_engine_whose_computing_is_not_timed_tells_by_whole_iterations() -> None:
    """As on a GPU: both factors are the same."""
    run = Run()
    stages = play(run, lambda s: STOCK_S * (1.05 if s.plan is None else 2))
    assert set(CALIBRATING) <= set(names(stages))
    found = run.findings.network.contention_by_need
    assert found.computing == found.exchange > 1.5
    assert run.findings.plan is None


@pytest.mark.parametrize(("slowed", "tried"), [(1.05, True), (1.2, True), (3.0, False)])
def test_contention_that_is_fitted_does_not_alone_speak_against_deferring(
    slowed: float, tried: bool
) -> None:
    """Other work slowed the iterations that it is fitted to, and is gone when a plan is tried."""
    run = Run()
    stages = play(
        run, lambda s: STOCK_S * slowed if s.name in CALIBRATING else faster(s), computing=contended
    )
    assert set(CALIBRATING) <= set(names(stages))
    assert (trying(stages) == ["trying overlap"]) is tried
    assert (run.findings.plan is not None and run.findings.plan.wait == "need") is tried


@pytest.mark.parametrize(("deferring", "wait"), [(DEFERRING, "need"), (WAITING, "update")])
def test_what_is_predicted_is_what_runs(deferring: Deferring, wait: str) -> None:
    run = Run(deferring, planner="pace")
    play(run, faster)
    assert run.findings.plan.wait == wait
    stock = Measured(Ddp().plan(PROFILE, NETWORK), STOCK_S, 0.0)
    expected = trials.forecast(
        PROFILE, NETWORK, Settings(planner="pace"), [stock], defers=deferring.can_defer
    ).predicted_s("pace")
    assert run.findings.predicted_planned_s == expected
    timeline = run.findings.predicted_timeline(Ddp())
    assert timeline.iteration_ns / 1e9 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("stock_s", "slowdown_s", "computing", "exchange"),
    [
        # Without contention: 190 ms, in which a message of 20 ms runs beside 60 ms of computing.
        (0.193, 0.0, 1.0, 60 / 17),
        (0.1985, 0.005, 65 / 60, 65 / 16.5),
        (0.210, None, 2.0, 2.0),
        (0.150, 0.0, 1.0, 1.0),
    ],
)
def test_ddp_is_predicted_as_it_was_measured(
    stock_s: float, slowdown_s: float | None, computing: float, exchange: float
) -> None:
    run = Run(network=replace(NETWORK, contention=Contention(computing=1.25, exchange=1.25)))
    play(run, lambda s: stock_s if s.plan is None else stock_s / 2, computing=lambda _: slowdown_s)
    found = run.findings.network.contention
    assert found.fitted
    assert found.computing == pytest.approx(computing, abs=2e-3)
    assert found.exchange == pytest.approx(exchange, rel=2e-2)
    if stock_s >= 0.190:
        assert run.findings.predicted_baseline_s == pytest.approx(stock_s, rel=6e-3)


def test_a_slower_plan_is_dropped_after_another_look() -> None:
    run = Run()
    stages = play(run, lambda s: STOCK_S / 2 if s.name in CALIBRATING else slower(s))
    *_, checking, again, recording, steady = names(stages)
    assert (checking, recording, steady) == ("comparing with DDP", "recording", "steady")
    assert again.replace("comparing", "trying") in names(stages)
    assert (run.findings.plan, run.findings.decision) == (None, "reverted")
    assert stages[-1].plan is stages[-2].plan is None
    (news,) = said(run, "back to DDP's buckets")
    assert news.level == logging.WARNING


@pytest.mark.parametrize(
    ("times_s", "scatter", "decision"),
    [
        ((1.0, 0.999, 1.0, 1.0), 0.01, "planned"),  # 0.9995 in the mean
        ((1.0, 1.001, 1.0, 1.0), 0.01, "reverted"),
        ((1.0, 0.999, 1.0, 1.001), 0.01, "planned"),  # as fast
        ((1.0, 1.3, 1.4, 1.3, 1.4, 1.3), 0.001, "planned"),  # the machine has become slower
        ((1.0, 1.2, 1.5, 1.2, 1.0, 1.2), 0.001, "reverted"),  # it was slow for a moment
        ((1.0, 0.999, 1.0, 1.1, 1.0, 0.8), 0.001, "planned"),  # 0.95 in the mean
        ((1.0, 0.999, 1.0, 1.1, 1.0, 1.1), 0.001, "reverted"),
    ],
)
def test_a_plan_that_is_not_clearly_faster_must_show_it(
    times_s: tuple[float, ...], scatter: float, decision: str
) -> None:
    """DDP and the plan in turns: two looks that disagree are followed by a third."""
    now_s, *turns = times_s

    def time_s(stage: Stage) -> float:
        nonlocal now_s
        if stage.name.startswith(("trying", "comparing")) and not stage.goes_on:
            now_s = turns.pop(0)
        return now_s

    run = Run(plan=GIVEN)
    stages = play(run, time_s, scatter=scatter)
    looks = ["comparing with DDP", "comparing by hand"] * (len(times_s) // 2 - 1)
    assert names(stages)[2:] == ["trying by hand", *looks, "recording", "steady"]
    found = run.findings
    assert found.decision == decision
    planned_s = (times_s[-3] + times_s[-1]) / 2
    assert found.planned.iteration_s == pytest.approx(planned_s, rel=2 * scatter)
    assert found.baseline.iteration_s == pytest.approx(times_s[-2], rel=2 * scatter)


@pytest.mark.parametrize(("again_s", "decision"), [(1.5, "planned"), (2.0, "reverted")])
def test_a_plan_that_has_become_slow_is_compared_again(again_s: float, decision: str) -> None:
    run = Run()
    steady = play(run, faster)[-1]
    expected = run.findings.predicted_planned_s
    assert steady.baseline == run.findings.baseline
    stages = play(run, lambda s: again_s if s.plan else 1.7, times_s=(1.6,) * 50, slower=True)
    # It was the slower one so far: it must be the faster one twice.
    turns = 2 if decision == "planned" else 1
    looks = ["comparing with DDP", "comparing overlap"] * turns
    assert names(stages) == [*looks, "recording", "steady"]
    assert run.findings.decision == decision
    assert (stages[-1].baseline is not None) is (decision == "planned")
    assert len(said(run, "overlap takes longer than DDP did; measuring both again")) == 1
    measured_s = [again_s] * 2 if decision == "planned" else [1.6, again_s]
    assert run.findings.planned.iteration_s == pytest.approx(sum(measured_s) / 2)
    assert run.findings.predicted_planned_s == expected  # made before the first trial


@pytest.mark.parametrize(
    ("made_by", "named", "tried"),
    [
        ("wfbp wfbp single buckets merge mgwfbp", None, ["wfbp", "single", "buckets"]),
        ("wfbp wfbp single single", "wfbp", ["wfbp", "single"]),
    ],
    ids=["other planners", "one planner"],
)
def test_another_plan_is_tried_while_it_is_expected_to_gain_but_none_twice(
    monkeypatch: pytest.MonkeyPatch, made_by: str, named: str | None, tried: list[str]
) -> None:
    """What a trial teaches may change the messages of the same planner's plan."""
    forecast = trials.forecast
    made = {name: PLANNERS[name].plan(PROFILE, NETWORK) for name in made_by.split()}
    left = iter([replace(made[name], planner=named or name) for name in made_by.split()])

    def next_one(*given: Any, **more: Any) -> Any:
        found, plan = forecast(*given, **more), next(left)
        short = tuple(replace(p, iteration_s=0.1) for p in found.comparison.predictions)
        comparison = replace(found.comparison, chosen=plan.planner, predictions=short)
        return found._replace(comparison=comparison, plan=plan)

    monkeypatch.setattr(trials, "forecast", next_one)
    stages = play(Run(WAITING), lambda stage: 1.2 if stage.plan else 1.0)
    ran = [s.plan for s in stages if s.name.startswith("trying") and not s.goes_on]
    assert [plan.messages for plan in ran] == [made[name].messages for name in tried]
    assert len(ran) <= trials.TRIALS


def test_a_small_gain_is_tried_within_the_noise_of_a_short_baseline() -> None:
    """1.5 % are predicted; twice the error of the DDP baseline's three iterations is 2 %."""
    run = Run(WAITING, network=Network.line(workers=4, a_s=1e-4, b_s_per_byte=4e-9))
    stages = play(run, lambda s: 0.1304 if s.plan else 0.1324, scale=10.0, scatter=0.0078)
    assert trying(stages) == ["trying wfbp"]
    assert run.findings.baseline.noise_s > 0.0075 * run.findings.baseline.iteration_s
    assert run.findings.plan is not None


@pytest.mark.parametrize(("scatter", "count"), [(0.0, 3), (0.05, 12)])
def test_uneven_iterations_are_calibrated_longer(scatter: float, count: int) -> None:
    stages = play(Run(), gaining, computing=contended, scatter=scatter)
    assert [iterations(stages, name) for name in CALIBRATING] == [count] * 2


def test_drift_is_measured_again() -> None:
    run = Run()
    play(run, faster)
    stages = play(run, faster, drifted=True)
    assert names(stages)[:2] == ["measuring DDP", "profiling"]
    assert stages[0].warmup == experiments.REBUILT
    assert len(said(run, "drifted")) == 1
    assert run.findings.plan.wait == "need"


@pytest.mark.parametrize("planner", ["auto", "overlap", "dear"])
def test_deferring_is_given_up_where_gradients_are_read_early(planner: str) -> None:
    run = Run(planner=planner)
    stages = play(run, faster, reads_early)
    assert len([stage for stage in stages if reads_early(stage)]) == 1
    assert (run.findings.plan.wait, run.findings.decision) == ("update", "planned")
    assert len(said(run, READ)) == 1
    assert not said(run, "model.overlap")
    assert not stages[-1].watches_reads


@pytest.mark.parametrize("planner", ["auto", "overlap", "dear"])
def test_a_norm_that_steps_ask_for_is_planned_for(planner: str) -> None:
    run = Run(planner=planner)
    stages = play(run, faster, clips, norm="2")
    norms = [s.plan.norm for s in stages if reads_early(s) and not s.goes_on]
    assert norms[:2] == [None, "2"]
    found = run.findings
    assert (found.plan.wait, found.plan.norm, found.decision) == ("need", "2", "planned")
    assert found.profile.norm == "2"
    assert len(said(run, "every step needs the 2-norm of all gradients")) == 1
    assert not said(run, READ)


@pytest.mark.parametrize("check", [True, False])
def test_a_norm_is_asked_for_in_the_steady_state(check: bool) -> None:
    """What was measured stays; only the plan is made again."""
    run = Run(planner="overlap", check=check)
    play(run, faster)
    stages = play(run, faster, clips, norm="inf", read_early=READ)
    assert names(stages)[0] == (CALIBRATING[0] if check else "recording")
    assert not any(clips(stage) for stage in stages)
    assert stages[-1].plan.norm == "inf"


def test_what_was_tried_in_vain_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    forecast = trials.forecast

    def noted(*given: Any, **more: Any) -> Any:
        asked.append(list(given[3]))
        return forecast(*given, **more)

    monkeypatch.setattr(trials, "forecast", noted)
    play(Run(), faster, reads_early)
    assert len(asked) > 1
    assert all(m.plan.wait == "update" for measured in asked for m in measured)


def test_a_given_plan_is_tried_again_without_deferring() -> None:
    run = Run(plan=GIVEN)
    stages = play(run, faster, reads_early)
    assert names(stages)[2:] == ["trying by hand", "trying by hand", "recording", "steady"]
    tried = [s.plan.wait for s in stages if s.name == "trying by hand"]
    assert (tried[0], set(tried[1:])) == ("need", {"update"})
    assert run.findings.plan == SINGLE
    assert len(said(run, READ)) == 1


def test_an_unchecked_plan_stays_and_it_is_said_once() -> None:
    run = Run(plan=GIVEN, check=False)
    stages = play(run)
    assert names(stages) == ["recording", "steady"]
    assert stages[-1].watches_reads
    assert stages[-1].baseline is None
    for _ in range(2):
        (again,) = play(run, read_early=READ)
        assert (again.name, again.plan, again.watches_reads) == ("steady", GIVEN, False)
    assert len(said(run, READ)) == 1


def test_deferring_is_given_up_in_the_steady_state_too() -> None:
    run = Run()
    assert play(run, faster)[-1].plan.wait == "need"
    stages = play(run, faster, read_early=READ)
    assert not any(reads_early(stage) for stage in stages)
    assert "profiling" not in names(stages)
    assert not said(run, "drifted")


def test_deferring_is_given_up_in_the_second_look_too() -> None:
    run = Run(planner="overlap")
    stages = play(run, slower, lambda s: READ if s.name == "comparing overlap" else None)
    assert run.findings.decision == "reverted"
    assert not any(reads_early(stage) for stage in stages[-3:])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("asked", [{"plan": GIVEN}, {"planner": "overlap"}], ids=str)
def test_without_an_optimizer_nothing_is_deferred(asked: dict[str, Any], check: bool) -> None:
    run = Run(WAITING, check=check, **asked)
    stages = play(run, faster)
    assert all(stage.plan is None or stage.plan.wait == "update" for stage in stages)
    (news,) = said(run, "no optimizer defers its update (optimizer = model.overlap")
    assert news.level == logging.WARNING


def test_auto_without_an_optimizer_asks_for_none() -> None:
    run = Run(WAITING)
    stages = play(run, faster)
    assert "trying overlap" not in names(stages)
    assert {s.warmup for s in stages if "trying" in s.name and not s.goes_on} == {2}
    assert not said(run, "model.overlap")
    assert "overlap" not in {p.planner for p in run.findings.comparison.predictions}


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_can_be_asked_for(planner: str) -> None:
    run = Run(planner=planner)
    stages = play(run, faster)
    found = run.findings
    if planner == "ddp":
        assert (found.decision, found.plan) == ("ddp", None)
        return
    assert found.decision == "planned"
    assert stages[-1].plan is found.plan
    assert planner in ("auto", found.plan.planner)
    waiting = {"wfbp", "single", "buckets", "mgwfbp", "merge", "horovod"}
    assert found.plan.wait == ("update" if planner in waiting else "need")


@pytest.mark.parametrize("planner", ["auto", "overlap", "merge"])
def test_an_unchecked_planner_runs_its_plan_once_there_is_a_profile(planner: str) -> None:
    run = Run(planner=planner, check=False)
    stages = play(run, lambda _: 1.0)
    assert names(stages) == ["profiling", "profiling", "recording", "steady"]
    assert stages[-1].plan is run.findings.plan is not None
    assert run.findings.predicted_planned_s is not None
    assert sum(s.warmup + s.iterations for s in stages[:-2]) <= 6


@pytest.mark.parametrize("plan", [None, GIVEN])
def test_a_checkpoint_goes_on_as_it_was(plan: Plan | None) -> None:
    run = Run(resumed=(plan,))
    stages = play(run)
    assert names(stages) == ["recording", "steady"]
    assert stages[-1].plan == plan
    assert run.findings.decision == ("planned" if plan else "reverted")


def remembered(plan: Plan | None) -> Findings:
    """Return that the plan took 0.8 s, and DDP a second."""
    return Findings(
        profile=PROFILE,
        network=NETWORK,
        plan=plan,
        baseline=Measurement(times_s=(1.0,) * 5).rate("DDP"),
        planned=Measurement(times_s=(0.8,) * 5).rate("by hand") if plan else None,
        decision="planned" if plan else "ddp",
        reason="it was faster then",
        predicted_planned_s=0.79,
    )


@pytest.mark.parametrize("plan", [None, GIVEN])
def test_what_is_remembered_runs_at_once_and_stays_where_nothing_has_changed(
    plan: Plan | None,
) -> None:
    run = Run(remembered=remembered(plan))
    stages = play(run, lambda _: 0.81 if plan else 1.01, scatter=0.005)
    assert names(stages) == ["running the saved plan", "recording", "steady"]
    assert {stage.plan for stage in stages} == {plan}
    assert sum(s.warmup + s.iterations for s in stages[:-2]) <= 6
    found = run.findings
    assert (found.decision, found.predicted_planned_s) == ("planned" if plan else "ddp", 0.79)
    assert "when it was saved" in found.reason


@pytest.mark.parametrize(
    ("plan_s", "stock_s", "compared", "planned"),
    [(0.9, 1.0, True, True), (0.9, 0.85, True, False), (1.2, 1.0, False, True)],
)
def test_what_is_remembered_is_compared_with_ddp_where_it_takes_another_time(
    plan_s: float, stock_s: float, compared: bool, planned: bool
) -> None:
    """A little: with DDP. Much: nothing that was measured then holds."""
    run = Run(remembered=remembered(GIVEN))
    stages = play(run, lambda s: plan_s if s.plan == GIVEN else stock_s * (0.5 if s.plan else 1))
    assert ("comparing with DDP" in names(stages)) is compared
    assert ("profiling" in names(stages)) is not (compared and planned)
    if compared and planned:
        assert (run.findings.plan, run.findings.predicted_planned_s) == (GIVEN, 0.79)


def test_a_remembered_plan_that_ddp_does_not_take_is_forgotten() -> None:
    run = Run(remembered=remembered(GIVEN))
    assert next(run.script).plan == GIVEN
    stages = play(run, faster, times_s=(0.8,), mismatch="other buckets")
    assert "profiling" in names(stages)
    assert run.findings.plan.planner == "overlap"
    assert len(said(run, "DDP did not take the messages of by hand: other buckets")) == 1


def test_a_remembered_plan_is_not_run_where_nothing_defers() -> None:
    assert "profiling" in names(play(Run(WAITING, remembered=remembered(GIVEN)), faster))


def in_16_bits(hooked_s: float, planned_s: float) -> tuple[Run, list[Stage]]:
    """Ask for 16 bits where DDP's buckets take 0.19 s, and a hook and plans as long as said."""

    def takes(stage: Stage) -> float:
        if stage.plan is not None:
            return planned_s
        return STOCK_S if stage.hook is None else hooked_s

    run = Run(compression="bfloat16")
    return run, play(run, takes)


@pytest.mark.parametrize(
    ("hooked_s", "planned_s", "decision", "hook", "reason"),
    [
        (0.16, 0.14, "planned", "bfloat16", "140.00 ms an iteration, DDP with a bfloat16 hook 160"),
        (0.14, 0.16, "reverted", "bfloat16", "; back to DDP's buckets and the hook"),
        (0.25, 0.22, "reverted", None, "DDP 190.00 ms"),
    ],
    ids=["plan", "hook", "neither"],
)
def test_16_bits_are_compared_with_what_one_would_run_otherwise(
    hooked_s: float, planned_s: float, decision: str, hook: str | None, reason: str
) -> None:
    run, stages = in_16_bits(hooked_s, planned_s)
    assert [stage.hook for stage in stages[:4] if stage.plan is None][-1] == "bfloat16"
    found, steady = run.findings, stages[-1]
    assert (found.decision, found.hook) == (decision, hook)
    assert reason in found.reason
    assert found.baseline.iteration_s == (hooked_s if hook else STOCK_S)
    assert (found.plan is not None) is (decision == "planned")
    assert (steady.plan, steady.hook) == (found.plan, None if found.plan else hook)
    # Once it is known to be the faster one, only the hook is measured again.
    again = {hook} if decision == "reverted" else set()
    assert {s.hook for s in stages if s.name == "comparing with DDP"} == again
    if hook is not None:
        assert {m.payload for m in found.running_plan(Ddp()).messages} == {"bfloat16"}
        assert found.predicted_timeline(Ddp()) is not None
        assert found.predicted_baseline_s < STOCK_S


def test_after_drift_ddp_is_measured_with_and_without_the_hook_again() -> None:
    run, _ = in_16_bits(hooked_s=0.16, planned_s=0.14)
    before: dict[str, Any] = {"times_s": (0.14,) * 9, "drifted": True}
    stages = play(run, lambda s: 0.16 if s.hook else 0.2 if s.plan else STOCK_S, **before)
    measured = [s.hook for s in stages if s.name.startswith("measuring") and not s.goes_on]
    assert measured == [None, "bfloat16"]
    assert run.findings.decision == "reverted"
    assert stages[-1].hook == "bfloat16"
