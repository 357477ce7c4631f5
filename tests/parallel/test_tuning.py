"""The stages of a training run's start, played without training: times are what the tests say."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from syncline.model.network import Contention, Network
from syncline.model.plan import Message, Plan, Tensor
from syncline.model.profile import Norm
from syncline.model.run import Rate
from syncline.model.timeline import Timeline
from syncline.parallel import tuning as module
from syncline.parallel.rank_measurements import Settings, Stage, StageResult
from syncline.parallel.tuning import TRIALS, Tuning
from syncline.planners import PLANNERS
from syncline.planners.auto import CONFIDENCE
from syncline.planners.ddp import Ddp
from syncline.simulator.contention import Measured
from tests import strategies as some

# The first layer's gradient comes last and is as large as all others: its message can only be
# hidden by the next forward pass.
PROFILE = some.profile_of([10_000_000] * 8, [250_000] * 8, forward_ns=50_000_000)
NETWORK = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1e-8)
GIVEN = Plan(
    planner="by hand",
    model="random",
    workers=4,
    tensors=tuple(Tensor(name=g.name, elements=g.elements) for g in PROFILE.gradients),
    messages=(Message(start=0, stop=2_000_000),),
    wait="need",
)
STOCK_S = 0.19
"""As the simulator predicts without contention."""
NOISE_S = 9e-4
"""Of the median of as many iterations as are compared at least."""
EXPLORING = [f"trying {parts} equal parts" for parts in module.EXPLORED_PARTS]
"""Where parameters are deferred, before planning."""
READ = "gradients are read before each step"


class Told:
    """A job with one optimizer, and measurements that takes every figure as it comes."""

    rank = 0

    def __init__(self, job: Any) -> None:
        self.can_defer = getattr(job, "can_defer", False)

    def rate(self, name: str, result: StageResult) -> Rate:
        iterations = len(result.iteration_s)
        noise_s = NOISE_S * min(math.sqrt(module.COMPARED_ITERATIONS / iterations), 1)
        return Rate(
            name=name, iteration_s=result.iteration_s[-1], noise_s=noise_s, iterations=iterations
        )

    def network(self, _: float, **__: Any) -> Network:
        return NETWORK

    def excess_s(self, result: StageResult, _: Any) -> float | None:
        return result.computing_s[-1] if result.computing_s else None

    def broadcast_s(self, _: StageResult) -> float:
        return 0.0

    def busy_excess_s(self, result: StageResult, _: Any, **__: float) -> float | None:
        return result.busy_s[-1] if result.busy_s else None

    def profile(self, _: StageResult, __: Network) -> Any:
        return PROFILE

    def everything_at_once(self) -> Plan:
        return msgspec.structs.replace(GIVEN, wait="update")

    def gather(self, value: Any) -> list[Any]:
        return [None, value]  # the other rank has nothing to say

    def shared(self, conclude: Callable[[], Any]) -> Any:
        return msgspec.json.decode(msgspec.json.encode(conclude()))


class Deferring:
    can_defer = True
    why_not_deferred: str | None = None
    device = torch.device("cpu")


class Waiting:
    can_defer = False
    why_not_deferred: str | None = None
    device = torch.device("cpu")


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RankMeasurements", Told)


def tuning(job: Any = Deferring, **asked: Any) -> Tuning:
    settings = {"planner": "auto", "plan": None, "profile": None, "network": None, "check": True}
    return Tuning(job(), Settings(**(settings | asked), ddp=Ddp()))


def play(
    script: Any,
    takes: Callable[[Stage], float] = lambda _: STOCK_S,
    flushed: Callable[[Stage], str | None] = lambda _: None,
    *,
    norm: Norm | None = None,
    busy: Callable[[Stage], list[float]] = lambda _: [],
    computing: Callable[[Stage], list[float]] = lambda _: [],
    before: StageResult | None = None,
) -> list[Stage]:
    """Send each stage's result until the steady state; return the stages."""
    stage = next(script) if before is None else script.send(before)
    stages = []
    while stage.iterations:
        stages.append(stage)
        read = flushed(stage)
        result = StageResult(
            iteration_s=[takes(stage)] * stage.iterations,
            busy_s=busy(stage),
            computing_s=computing(stage),
            flushed=read,
            norm=norm if read else None,
        )
        stage = script.send(result)
    return [*stages, stage]


def up_to_baseline(run: Tuning) -> Any:
    """Profile; return the stages, of which the next result is stock DDP's."""
    script = run.stages()
    assert next(script).name == "profiling"
    assert script.send(StageResult(iteration_s=[STOCK_S])).name == "baseline"
    return script


def reads_early(stage: Stage) -> str | None:
    """Say that gradients are read before each step, wherever that could be told."""
    return READ if stage.plan is not None and stage.plan.wait == "need" else None


def faster(stage: Stage) -> float:
    return STOCK_S if stage.plan is None else STOCK_S / 2


def slower(stage: Stage) -> float:
    return STOCK_S if stage.plan is None else STOCK_S * 2


def names(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages]


def told(run: Tuning, text: str) -> list[str]:
    return [event.text for event in run.events if text in event.text]


def test_overlap_is_tried_and_kept_where_it_gains() -> None:
    run = tuning()
    stages = play(run.stages(), faster)
    assert names(stages)[:5] == ["profiling", "baseline", *EXPLORING, "trying overlap"]
    assert stages[-1].plan is run.plan
    assert run.plan is not None
    assert (run.plan.planner, run.plan.wait, run.decision) == ("overlap", "need", "planned")
    assert run.reason.endswith("each update is left to the next forward pass")
    assert run.planned is not None
    assert run.planned.iteration_s == STOCK_S / 2


@pytest.mark.parametrize(
    ("stock_s", "noise_s", "iterations"),
    [(0.2, 2e-3, 16), (0.2, 3e-3, 36), (0.2, 1e-2, 48), (0.05, 1e-5, 30), (1e-3, 1e-5, 48)],
)
def test_short_and_uneven_iterations_are_compared_longer(
    monkeypatch: pytest.MonkeyPatch, stock_s: float, noise_s: float, iterations: int
) -> None:
    monkeypatch.setitem(globals(), "NOISE_S", noise_s)
    stages = play(tuning(planner="merge").stages(), lambda _: stock_s)
    for name in ("baseline", "trying merge"):
        assert sum(s.iterations for s in stages if s.name == name) == iterations


def test_a_plan_is_measured_longer_where_its_iterations_are_more_uneven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate(told: Told, name: str, result: StageResult) -> Rate:
        found = Told.rate(told, name, result)
        is_plan = name.startswith("trying")
        return msgspec.structs.replace(found, noise_s=found.noise_s * (3 if is_plan else 1))

    monkeypatch.setattr(module, "RankMeasurements", type("Uneven", (Told,), {"rate": rate}))
    run = tuning()
    stages = play(run.stages(), faster)
    assert [(s.name, s.warmup > 0, s.iterations) for s in stages[1:-2]] == [
        ("baseline", True, 16),
        *(
            (name, first, iterations)
            for name in (*EXPLORING, "trying overlap")
            for first, iterations in ((True, 16), (False, 32))
        ),
    ]
    assert run.planned is not None
    assert run.planned.iterations == 48


@pytest.mark.parametrize("norm", [None, "2"])
def test_what_the_engines_messages_take_from_computing_is_planned_for(norm: Norm | None) -> None:
    """5 ms each, found under a few messages and many."""

    def busy(stage: Stage) -> list[float]:
        exploring = stage.plan is not None and stage.name in EXPLORING
        return [5e-3 * len(stage.plan.messages)] if exploring and stage.plan else []

    run = tuning(profile=msgspec.structs.replace(PROFILE, norm=norm))
    stages = play(run.stages(), faster, busy=busy)
    explored = [stage.plan for stage in stages if stage.name in EXPLORING]
    assert [plan.norm for plan in explored if plan] == [norm, norm]
    assert run._forecasts is not None
    found = run._forecasts.network.contention_by_need
    assert found is not None
    assert found.per_message_s == pytest.approx(5e-3, rel=0.1)
    assert found.fitted


@pytest.mark.parametrize(("bytes_per_s", "explored"), [(1e8, True), (1e10, False)])
def test_the_engine_is_measured_where_overlapping_would_gain_much_if_it_cost_nothing(
    bytes_per_s: float, explored: bool
) -> None:
    """Stock DDP alone says that every message stops computing, so that no plan is worth trying."""
    network = Network.line(workers=4, a_s=1e-5, b_s_per_byte=1 / bytes_per_s)
    run = tuning(network=network)
    script = up_to_baseline(run)
    before = StageResult(iteration_s=[0.25] * 16, computing_s=[0.05])
    found = names(play(script, faster, before=before))
    assert (found[:2] == EXPLORING) is explored, found


@pytest.mark.parametrize(("planner", "explored"), [("wfbp", EXPLORING[-1:]), ("single", [])])
def test_the_reducer_is_measured_under_many_messages_where_such_a_plan_is_to_be_tried(
    planner: str, explored: list[str]
) -> None:
    """Each message takes 5 ms from computing, which stock DDP's do not tell."""

    def excess_s(stage: Stage) -> float:
        return 5e-3 * len(stage.plan.messages) if stage.plan is not None else 0.0

    run = tuning(Waiting, planner=planner)
    stages = play(run.stages(), lambda s: STOCK_S + excess_s(s), computing=lambda s: [excess_s(s)])
    tried = [name for name in names(stages) if name.startswith("trying")]
    assert tried == [*explored, f"trying {planner}", f"trying again {planner}"]
    assert run.predicted_planned_s is not None
    if explored:
        count = len(PLANNERS[planner].plan(PROFILE, NETWORK).messages)
        assert run.predicted_planned_s == pytest.approx(STOCK_S + 5e-3 * count, rel=0.05)


def test_an_engine_whose_computing_is_not_timed_tells_by_whole_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: both factors are the same."""
    monkeypatch.setattr(Deferring, "device", torch.device("cuda"))
    run = tuning()
    stages = play(run.stages(), slower)
    assert set(EXPLORING) <= set(names(stages))
    assert run._forecasts is not None
    found = run._forecasts.network.contention_by_need
    assert found is not None
    assert found.computing == found.exchange > 1.5
    assert run.plan is None


def test_what_is_predicted_is_what_runs() -> None:
    for job, wait in ((Deferring, "need"), (Waiting, "update")):
        run = tuning(job, planner="pace")
        play(run.stages(), faster)
        assert run.plan is not None
        assert run.plan.wait == wait
        stock = Measured(Ddp().plan(PROFILE, NETWORK), STOCK_S, CONFIDENCE * NOISE_S)
        expected = module.forecast(
            PROFILE, NETWORK, run._settings, [stock], defers=job.can_defer
        ).predicted_s("pace")
        assert run.predicted_planned_s == expected
        assert run.predicted_timeline is not None
        assert run.predicted_timeline.iteration_ns / 1e9 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("stock_s", "excess_s", "contention"),
    [
        # Without contention: 190 ms, in which a message of 20 ms runs beside 60 ms of computing.
        (0.193, 0.0, Contention(computing=1.0, exchange=60 / 17, fitted=True)),
        (0.200, 0.01, Contention(computing=2.0, exchange=1.0, fitted=True)),
        (0.1985, 0.005, Contention(computing=65 / 60, exchange=65 / 16.5, fitted=True)),
        (0.210, None, Contention(computing=2.0, exchange=2.0, fitted=True)),
        (0.191, 0.0, Contention(fitted=True)),  # the rest is noise
        (0.150, 0.0, Contention(fitted=True)),
    ],
)
def test_stock_ddp_is_predicted_as_it_was_measured(
    stock_s: float, excess_s: float | None, contention: Contention
) -> None:
    guessed = msgspec.structs.replace(NETWORK, contention=Contention.of_both(1.25))
    run = tuning(network=guessed)
    script = up_to_baseline(run)
    passes = [] if excess_s is None else [excess_s]
    play(script, faster, before=StageResult(iteration_s=[stock_s], computing_s=passes))
    assert run._forecasts is not None
    found = run._forecasts.network.contention
    assert found.fitted
    assert found.computing == pytest.approx(contention.computing, abs=2e-3)
    assert found.exchange == pytest.approx(contention.exchange, rel=2e-2)
    if stock_s >= 0.190:
        assert run.predicted_baseline_s == pytest.approx(stock_s, rel=6e-3)


def test_an_iteration_more_warms_up_where_updates_are_deferred() -> None:
    stages = play(tuning().stages(), faster)
    warmup = {stage.name: stage.warmup for stage in stages}
    assert warmup["trying overlap"] == warmup["recording"] == warmup["steady"] == 3
    (waiting,) = {
        stage.warmup for stage in play(tuning(Waiting).stages(), faster) if "trying" in stage.name
    }
    assert waiting == 2


def test_a_slower_plan_is_dropped_after_another_look() -> None:
    run = tuning()
    stages = play(run.stages(), lambda s: STOCK_S / 2 if s.name in EXPLORING else slower(s))
    *_, checking, again, recording, steady = names(stages)
    assert (checking, recording, steady) == ("checking again", "recording", "steady")
    assert again.replace(" again", "") in names(stages)
    assert (run.plan, run.decision) == (None, "reverted")
    assert stages[-1].plan is stages[-2].plan is None
    assert len(told(run, "back to DDP's own buckets")) == 1


@pytest.mark.parametrize(
    ("first_s", "stock_s", "again_s", "decision"),
    [
        (0.999, 1.0, 1.0, "planned"),  # 0.9995 in the mean
        (1.001, 1.0, 1.0, "reverted"),
        (0.999, 1.0, 1.001, "planned"),  # as fast
    ],
)
def test_a_plan_that_is_not_clearly_faster_must_show_it(
    first_s: float, stock_s: float, again_s: float, decision: str
) -> None:
    times = {"trying by hand": first_s, "trying again by hand": again_s}
    run = tuning(plan=GIVEN)
    stages = play(run.stages(), lambda stage: times.get(stage.name, stock_s))
    first, again = times
    assert names(stages) == ["baseline", first, "checking again", again, "recording", "steady"]
    assert run.decision == decision
    assert run.planned is not None
    assert run.baseline is not None
    assert run.planned.iteration_s == pytest.approx((first_s + again_s) / 2)
    assert run.baseline.iteration_s == stock_s


@pytest.mark.parametrize(
    ("times_s", "decision"),
    [
        ((1.0, 1.3, 1.4, 1.3, 1.4, 1.3), "planned"),  # the machine has become slower meanwhile
        ((1.0, 1.2, 1.5, 1.2, 1.0, 1.2), "reverted"),  # it was slow for a moment
        ((1.0, 0.999, 1.0, 1.1, 1.0, 0.8), "planned"),  # 0.95 in the mean
        ((1.0, 0.999, 1.0, 1.1, 1.0, 1.1), "reverted"),
    ],
)
def test_two_looks_that_disagree_are_followed_by_a_third(
    times_s: tuple[float, ...], decision: str
) -> None:
    """Stock DDP and the plan in turns."""
    turns = iter(times_s[1:])

    def time_s(stage: Stage) -> float:
        return next(turns) if stage.name.startswith(("trying", "checking")) else times_s[0]

    run = tuning(plan=GIVEN)
    stages = play(run.stages(), time_s)
    assert [name for name in names(stages) if "again" in name] == [
        "checking again",
        "trying again by hand",
    ] * 2
    assert run.decision == decision
    assert run.planned is not None
    assert run.planned.iteration_s == pytest.approx((times_s[3] + times_s[5]) / 2)
    assert run.baseline is not None
    assert run.baseline.iteration_s == times_s[4]


def test_the_timeline_shown_is_of_a_usual_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the others, the program did something else as well."""
    run = tuning(plan=GIVEN)
    play(run.stages(), faster)
    assert run.planned is not None
    usual_ns = round(run.planned.iteration_s * 1e9)

    def timeline(_: object, recorded: int, *__: object) -> Timeline:
        return Timeline(name="", source="measured", iteration_ns=recorded, spans=())

    monkeypatch.setattr(module, "recorded_timeline", timeline)
    monkeypatch.setattr(run._job, "clock", None, raising=False)
    recording = run._record()
    next(recording)
    recorded: list[Any] = [(None, ns) for ns in (3 * usual_ns, usual_ns + 5, 2 * usual_ns)]
    with pytest.raises(StopIteration):
        recording.send(StageResult(iteration_s=[1.0], recorded=recorded))
    assert run.measured_timeline is not None
    assert run.measured_timeline.iteration_ns == usual_ns + 5


def test_a_plan_that_is_clearly_faster_needs_no_second_look() -> None:
    assert "checking again" not in names(play(tuning(plan=GIVEN).stages(), faster))


@pytest.mark.parametrize(("again_s", "decision"), [(1.5, "planned"), (2.0, "reverted")])
def test_a_plan_that_has_become_slow_is_compared_again(again_s: float, decision: str) -> None:
    run = tuning()
    script = run.stages()
    play(script, faster)
    expected = run.predicted_planned_s
    assert run.can_revert
    stages = play(
        script,
        lambda stage: 1.7 if stage.plan is None else again_s,
        before=StageResult(iteration_s=[1.6] * 50, slower=True),
    )
    *looks, recording, steady = names(stages)
    # It was the slower one so far: it must be the faster one twice.
    turns = 2 if decision == "planned" else 1
    assert looks == ["checking again", "trying again overlap"] * turns
    assert (recording, steady) == ("recording", "steady")
    assert run.decision == decision
    assert run.can_revert is (decision == "planned")
    assert len(told(run, "overlap takes longer than stock DDP did; measuring both again")) == 1
    assert run.planned is not None
    measured_s = [again_s] * 2 if decision == "planned" else [1.6, again_s]
    assert run.planned.iteration_s == pytest.approx(sum(measured_s) / 2)
    assert run.predicted_planned_s == expected  # made before the first trial


def test_what_is_not_checked_is_not_compared() -> None:
    run = tuning(plan=GIVEN, check=False)
    play(run.stages())
    assert not run.can_revert


def test_another_plan_is_tried_while_it_is_expected_to_gain_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first forecast brings up the reducer; the third is asked for only to see whether the
    # engine is worth measuring.
    names_left = iter(["wfbp", "wfbp", "", "single", "buckets", "merge", "mgwfbp"])

    def next_one(*_: Any, **__: Any) -> Any:
        forecasts = forecast(*_, **__)
        name = next(names_left)
        if not name:
            return forecasts._replace(plan=None)
        comparison = msgspec.structs.replace(forecasts.comparison, chosen=name)
        return forecasts._replace(comparison=comparison, plan=PLANNERS[name].plan(PROFILE, NETWORK))

    forecast = module.forecast
    monkeypatch.setattr(module, "forecast", next_one)
    run = tuning()
    stages = play(run.stages(), lambda _: 1.0)
    tried = [n for n in names(stages) if n.startswith("trying ") and "again" not in n]
    tried = [n for n in tried if n not in EXPLORING]
    assert tried == ["trying wfbp", "trying single", "trying buckets"]
    assert len(tried) == TRIALS


@pytest.mark.parametrize("planner", ["auto", "overlap", "dear"])
def test_deferring_is_given_up_where_gradients_are_read_early(planner: str) -> None:
    run = tuning(planner=planner)
    stages = play(run.stages(), faster, reads_early)
    deferred = [stage.name for stage in stages if reads_early(stage)]
    assert deferred == EXPLORING[:1]
    assert run.plan is not None
    assert run.plan.wait == "update"
    assert run.decision == "planned"
    (said,) = told(run, READ)
    assert said == (
        f"overlap gains nothing here: {READ}; from here on messages run under the backward pass "
        "only"
    )
    assert not told(run, "model.overlap")
    assert not run.watches_flushes


def clips(stage: Stage) -> str | None:
    """Say that gradients are read before each step, where the plan has no norm."""
    return READ if reads_early(stage) and stage.plan and stage.plan.norm is None else None


@pytest.mark.parametrize("planner", ["auto", "overlap", "dear"])
def test_a_norm_that_steps_ask_for_is_planned_for(planner: str) -> None:
    run = tuning(planner=planner)
    stages = play(run.stages(), faster, clips, norm="2")
    tried = [stage.plan for stage in stages if stage.name.startswith("trying")]
    assert [plan.norm for plan in tried if plan][:2] == [None, "2"]
    assert run.plan is not None
    assert (run.plan.wait, run.plan.norm, run.decision) == ("need", "2", "planned")
    assert run.profile is not None
    assert run.profile.norm == "2"
    assert len(told(run, "every step needs the 2-norm of all gradients")) == 1
    assert not told(run, READ)


def test_a_norm_is_asked_for_in_the_steady_state() -> None:
    run = tuning()
    script = run.stages()
    play(script, faster)
    stages = play(script, faster, clips, norm="inf", before=StageResult(flushed=READ, norm="inf"))
    assert names(stages)[0] == "profiling"
    assert not any(clips(stage) for stage in stages)
    assert stages[-1].plan is not None
    assert stages[-1].plan.norm == "inf"


def test_a_given_plan_gets_no_norm() -> None:
    run = tuning(plan=GIVEN)
    play(run.stages(), faster, clips, norm="2")
    assert run.plan == msgspec.structs.replace(GIVEN, wait="update")


def test_what_was_tried_in_vain_is_no_evidence() -> None:
    asked: list[Any] = []
    stock = Measured(Ddp().plan(PROFILE, NETWORK), STOCK_S, CONFIDENCE * NOISE_S)
    run = tuning()
    forecast = run._forecast
    run._forecast = lambda p, n, measured: asked.append(measured) or forecast(p, n, measured)  # type: ignore[method-assign]
    play(run.stages(), faster, reads_early)
    assert asked[0] == asked[1] == [stock]
    assert all(m.plan.wait == "update" for measured in asked for m in measured)


def test_a_given_plan_is_tried_again_without_deferring() -> None:
    run = tuning(plan=GIVEN)
    stages = play(run.stages(), faster, reads_early)
    assert names(stages) == ["baseline", "trying by hand", "trying by hand", "recording", "steady"]
    assert [s.plan.wait for s in stages[1:3] if s.plan] == ["need", "update"]
    assert run.plan == msgspec.structs.replace(GIVEN, wait="update")
    assert len(told(run, READ)) == 1


def test_an_unchecked_plan_stays_and_it_is_said_once() -> None:
    run = tuning(plan=GIVEN, check=False)
    script = run.stages()
    stages = play(script)
    assert names(stages) == ["recording", "steady"]
    assert run.watches_flushes
    (again,) = play(script, before=StageResult(flushed=READ))
    assert (again.name, again.plan) == ("steady", GIVEN)
    assert not run.watches_flushes
    (again,) = play(script, before=StageResult(flushed=READ))
    assert again.plan == GIVEN
    assert told(run, READ) == [
        f"overlap gains nothing here: {READ}; the plan stays all the same, unchecked"
    ]


def test_deferring_is_given_up_in_the_steady_state_too() -> None:
    run = tuning()
    script = run.stages()
    play(script, faster)
    assert run.plan is not None
    assert run.plan.wait == "need"
    stages = play(script, faster, before=StageResult(flushed=READ))
    assert names(stages)[0] == "profiling"
    assert not any(reads_early(stage) for stage in stages)
    assert not told(run, "drifted")


def test_deferring_is_given_up_in_the_second_look_too() -> None:
    run = tuning(planner="overlap")
    stages = play(
        run.stages(),
        slower,
        lambda stage: READ if stage.name == "trying again overlap" else None,
    )
    assert names(stages).count("baseline") == 2
    assert run.decision == "reverted"


def test_drift_is_measured_again() -> None:
    run = tuning()
    script = run.stages()
    play(script, faster)
    stages = play(script, faster, before=StageResult(drifted=True))
    assert names(stages)[0] == "profiling"
    assert len(told(run, "drifted")) == 1
    assert run.plan is not None
    assert run.plan.wait == "need"


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("asked", [{"plan": GIVEN}, {"planner": "overlap"}], ids=str)
def test_without_an_optimizer_nothing_is_deferred(
    asked: dict[str, Any], check: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = tuning(Waiting, check=check, **asked)
    with caplog.at_level(logging.WARNING, "syncline"):
        stages = play(run.stages(), faster)
    assert all(stage.plan is None or stage.plan.wait == "update" for stage in stages)
    assert len(told(run, "no optimizer defers its update (optimizer = model.overlap")) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_was_told_of_a_compiled_model_is_not_told_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Compiled(Waiting):
        why_not_deferred = "the whole model is compiled"
        will_overlap = True

    run = tuning(Compiled, plan=GIVEN)
    with caplog.at_level(logging.WARNING, "syncline"):
        play(run.stages(), faster)
    assert len(told(run, "no optimizer defers its update; the end")) == 1
    assert not caplog.records


def test_auto_without_an_optimizer_asks_for_none() -> None:
    run = tuning(Waiting)
    stages = play(run.stages(), faster)
    assert not told(run, "model.overlap")
    assert "trying overlap" not in names(stages)
    assert run.comparison is not None
    assert "overlap" not in {p.planner for p in run.comparison.predictions}


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_can_be_asked_for(planner: str) -> None:
    run = tuning(planner=planner)
    stages = play(run.stages(), faster)
    if planner == "ddp":
        assert (run.decision, run.plan) == ("ddp", None)
        return
    assert run.decision == "planned"
    assert stages[-1].plan is run.plan
    assert run.plan is not None
    assert planner in ("auto", run.plan.planner)
    assert run.plan.wait == ("update" if planner in CANDIDATE_NAMES else "need")


CANDIDATE_NAMES = {"wfbp", "single", "buckets", "mgwfbp", "merge", "horovod"}
