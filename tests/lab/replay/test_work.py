"""An emulated device and a worker that only waits take as long as the simulator says."""

from __future__ import annotations

import copy
import itertools
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.replay.clock import BLOCKED_NS, CATCH_UP_NS, DeviceClock
from syncline.lab.replay.work import Computation, measured_timeline
from syncline.plan.plan import Plan
from syncline.plan.planners.wfbp import Single
from syncline.plan.profile import Operation, Profile
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.predict import predict, predict_computation_s
from syncline.plan.simulator.transformations import with_compute_scale
from tests import strategies as some
from tests.lab.replay.fake import FakeTime
from tests.plan.simulator.chains import gradient, job, op

MS = 1_000_000
FREE = some.IntegerCurve(((0, 0, 0),)).network()


def iterate(work: Computation, fake: FakeTime, *, arrives_ns: int | None) -> None:
    """Run an iteration with an exchange that takes ``arrives_ns`` from the last gradient on."""
    profile = work.profile
    work.begin()
    work.forward(work.first_backward)
    for each in profile.gradients:
        work.backward(each.ready_after)
    ready_ns = fake.now_ns
    work.backward(None)
    if arrives_ns is not None:
        fake.block_until(ready_ns + arrives_ns)
    work.update(profile.gradient_bytes, len(profile.gradients))


def period_ns(work: Computation, fake: FakeTime, *, arrives_ns: int | None) -> int:
    ends = []
    for _ in range(3):
        iterate(work, fake, arrives_ns=arrives_ns)
        ends.append(work.clock.free_ns())
    assert ends[2] - ends[1] == ends[1] - ends[0]
    return ends[2] - ends[1]


@some.few
@given(profile=some.layer_profiles(min_elements=1), curve=some.integer_curves())
def test_one_message_takes_what_is_predicted(profile: Profile, curve: some.IntegerCurve) -> None:
    profile = with_compute_scale(profile, 1000)  # what a device could notice
    fake = FakeTime()
    network = curve.network()
    cost_ns = round(network.all_reduce.seconds(profile.gradient_bytes) * 1e9) + 400_000
    constant = some.IntegerCurve(((0, cost_ns, 0),)).curve()
    network = msgspec.structs.replace(network, all_reduce=constant)
    plan = Single().plan(profile, network)
    predicted = predict(profile, network, plan).prediction.iteration_s
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=cost_ns)
    assert found == pytest.approx(predicted * 1e9, abs=2)


@some.few
@given(profile=some.layer_profiles(), late=st.lists(st.integers(0, 4 * MS), min_size=1))
def test_computation_alone_takes_what_the_profile_says(profile: Profile, late: list[int]) -> None:
    fake = FakeTime(lambda: late[fake.switches % len(late)])
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=None)
    assert found == pytest.approx(predict_computation_s(Scenario(profile, FREE)) * 1e9, abs=2)


def profile_with(*operations: Operation) -> Profile:
    backward = next(i for i, o in enumerate(operations) if o.phase == "backward")
    return job(operations, gradient(100, backward, 0, "a.weight"))


def test_a_host_that_launches_runs_beside_the_device() -> None:
    profile = profile_with(
        op("data", 4 * MS),
        op("copy", 1 * MS),
        op("forward", 2 * MS, name="launch", resource="host"),
        op("forward", 10 * MS, 2),
        op("backward", 3 * MS, name="launch", resource="host"),
        op("backward", 20 * MS, 4),
        op("update", 1 * MS, name="launch", resource="host"),
        op("update", 5 * MS, 6),
    )
    fake = FakeTime()
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=None)
    assert found == round(predict_computation_s(Scenario(profile, FREE)) * 1e9)


def test_what_is_read_after_the_update_belongs_to_the_iteration() -> None:
    ends = op("finalize", 1 * MS), op("update", 5 * MS), op("data", 7 * MS)
    profile = profile_with(op("forward", 10 * MS), op("backward", 20 * MS), *ends)
    fake = FakeTime()
    work = Computation(profile, fake.clock())
    assert period_ns(work, fake, arrives_ns=30 * MS) == (30 + 30 + 6 + 7) * MS
    assert work.clock.idle_ns == 3 * 30 * MS


def passes(update_ms: int) -> Profile:
    operations = op("forward", 10 * MS), op("backward", 20 * MS), op("update", update_ms * MS)
    return profile_with(*operations)


def test_an_update_in_parts_takes_as_long_as_the_whole() -> None:
    fake = FakeTime()
    work = Computation(passes(8), fake.clock())
    work.begin()
    work.forward(work.first_backward)
    work.backward(None)
    work.begin()  # the next iteration, whose pre-forward hooks ask for the update
    before_ns = work.clock.free_ns()
    work.update(300, 1)
    assert work.clock.free_ns() - before_ns == 6 * MS
    work.forward(1)
    fake.block_until(fake.now_ns + MS)
    work.update(100, 1)
    assert work.clock.free_ns() - before_ns == 19 * MS
    assert [(r.label, r.kind) for r in work.ran] == [
        ("update", "update"),
        ("forward", "forward"),
        ("backward", "wait"),  # what was waited for before the backward operation
        ("update", "update"),
    ]


def test_copies_mean_the_same_device() -> None:
    work = Computation(some.profile_of([1], [1]), FakeTime().clock())
    assert copy.copy(work) is work
    assert copy.deepcopy({"work": work})["work"] is work


def test_what_ran_is_a_timeline() -> None:
    fake = FakeTime()
    work = Computation(passes(5), fake.clock())
    iterate(work, fake, arrives_ns=15 * MS)
    timeline = measured_timeline("p", work.begun_ns, work.clock.free_ns(), work.ran)
    assert timeline.iteration_ns == 50 * MS
    assert timeline.source == "measured"
    found = [(s.kind, s.label, s.start_ns // MS, s.stop_ns // MS) for s in timeline.spans]
    assert found == [
        ("forward", "forward", 0, 10),
        ("backward", "backward", 10, 30),
        ("wait", "all gradients", 30, 45),
        ("update", "update", 45, 50),
    ]


def test_a_need_holds_up_just_the_operation_behind_it() -> None:
    forward = (op("forward", 10 * MS, name=name) for name in ("first", "second"))
    profile = job([*forward, op("backward", 20 * MS)], gradient(100, 2, 1))
    fake = FakeTime()
    work = Computation(profile, fake.clock())
    plan = msgspec.structs.replace(Plan.merging("one", profile, 4, [0]), wait="need", in_flight=1)
    cost_ns = 16 * MS
    network = some.IntegerCurve(((0, cost_ns, 0),)).network()
    arrives_ns, ends = 0, []
    for _ in range(3):
        work.begin()
        work.forward(1)
        fake.block_until(arrives_ns)
        work.arrived(1)
        work.forward(work.first_backward)
        work.backward(2)
        arrives_ns = fake.now_ns + cost_ns
        ends.append(work.clock.free_ns())
    assert ends[2] - ends[1] == 46 * MS
    assert predict(profile, network, plan).prediction.iteration_s == pytest.approx(46e-3)


def started() -> tuple[FakeTime, DeviceClock]:
    fake = FakeTime()
    return fake, fake.clock()


def test_operations_follow_one_another_without_a_gap() -> None:
    fake, clock = started()
    ends = [clock.run(5 * MS), clock.run(3 * MS)]
    assert ends == [1_000 + 5 * MS, 1_000 + 8 * MS]
    assert fake.now_ns == 1_000  # the host has not waited
    clock.wait()
    assert fake.now_ns == ends[-1]


def test_lanes_run_beside_one_another_and_wait_for_one_another() -> None:
    _, clock = started()
    launched = clock.run(2 * MS, lane="host")
    assert clock.run(3 * MS, not_before_ns=launched) == 1_000 + 5 * MS
    assert clock.run(1 * MS, lane="host") == 1_000 + 3 * MS


def test_waking_late_is_caught_up() -> None:
    late = itertools.cycle([0, 4 * MS, 1 * MS])
    fake = FakeTime(lambda: next(late))
    clock = fake.clock()
    for _ in range(300):
        clock.run(5 * MS)
        clock.wait()
        clock.arrived()
    assert 1_000 + 1500 * MS <= fake.now_ns <= 1_000 + 1504 * MS
    assert clock.idle_ns == 0


@pytest.mark.parametrize(("busy_ms", "ends_ms", "idle_ms"), [(5, 30, 20), (50, 55, 0)])
def test_the_device_waits_for_what_arrives(busy_ms: int, ends_ms: int, idle_ms: int) -> None:
    fake, clock = started()
    clock.run(busy_ms * MS)
    fake.block_until(1_000 + 25 * MS)
    clock.arrived()
    assert clock.run(5 * MS) == 1_000 + ends_ms * MS
    assert clock.idle_ns == idle_ms * MS


@pytest.mark.parametrize("lost_ns", [BLOCKED_NS // 2, 8 * MS])
def test_a_hook_and_a_lost_core_hold_nothing_up(lost_ns: int) -> None:
    fake, clock = started()
    clock.run(5 * MS)
    clock.wait()
    fake.lose_core(lost_ns)
    clock.arrived()
    assert clock.run(5 * MS) == 1_000 + 10 * MS
    fake.block_until(fake.now_ns + BLOCKED_NS // 2)  # so short a wait is a lock's
    clock.arrived()
    assert clock.idle_ns == 0


def test_a_host_that_is_far_behind_holds_the_device_up() -> None:
    fake, clock = started()
    clock.run(5 * MS)
    clock.wait()
    fake.lose_core(CATCH_UP_NS + 30 * MS)
    assert clock.run(5 * MS) == 1_000 + 40 * MS


def test_time_that_really_passes() -> None:
    clock = DeviceClock()
    before_ns = time.monotonic_ns()
    end_ns = clock.run(20 * MS)
    clock.wait()
    assert time.monotonic_ns() >= end_ns >= before_ns
