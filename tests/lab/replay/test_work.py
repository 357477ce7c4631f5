"""A worker that only waits takes as long as the simulator says."""

from __future__ import annotations

import copy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.replay.work import Computation, measured_timeline
from syncline.plan.plan import Plan
from syncline.plan.planners.wfbp import Single
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.predict import predict, predict_computation_s
from tests import strategies as some
from tests.lab.replay.fake import FakeTime

MS = 1_000_000


def iterate(work: Computation, fake: FakeTime, *, arrives_ns: int | None) -> None:
    """Run an iteration with an exchange that takes ``arrives_ns`` from the last gradient on."""
    profile = work.profile
    work.begin()
    work.forward(work.first_backward)
    for gradient in profile.gradients:
        work.backward(gradient.ready_after)
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


def longer(profile: Profile, factor: int) -> Profile:
    """Return the profile in which everything takes so many times as long."""
    operations = tuple(
        msgspec.structs.replace(o, duration_s=o.duration_s * factor) for o in profile.operations
    )
    return msgspec.structs.replace(profile, operations=operations)


@some.few
@given(profile=some.layer_profiles(min_elements=1), curve=some.integer_curves())
def test_an_iteration_with_one_message_takes_what_is_predicted(
    profile: Profile, curve: some.IntegerCurve
) -> None:
    profile = longer(profile, 1000)  # what a device could notice
    fake = FakeTime()
    network = curve.network()
    cost_ns = round(network.all_reduce.seconds(profile.gradient_bytes) * 1e9) + 400_000
    network = msgspec.structs.replace(
        network,
        all_reduce=some.IntegerCurve(((0, cost_ns, 0),)).curve(),
    )
    plan = Single().plan(profile, network)
    predicted = predict(profile, network, plan).prediction.iteration_s
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=cost_ns)
    assert found == pytest.approx(predicted * 1e9, abs=2)


@some.few
@given(profile=some.layer_profiles(), late=st.lists(st.integers(0, 4 * MS), min_size=1))
def test_computation_alone_takes_what_the_profile_says(profile: Profile, late: list[int]) -> None:
    fake = FakeTime(lambda: late[fake.switches % len(late)])
    network = some.IntegerCurve(((0, 0, 0),)).network()
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=None)
    assert found == pytest.approx(predict_computation_s(profile, network) * 1e9, abs=2)


def profile_with(operations: list[Operation]) -> Profile:
    backward = next(i for i, o in enumerate(operations) if o.phase == "backward")
    return Profile(
        model="some",
        device="cuda",
        workers=2,
        iterations=1,
        operations=tuple(operations),
        gradients=(Gradient(name="a.weight", elements=100, ready_after=backward, needed_by=0),),
    )


def seconds(name: str, milliseconds: int, **fields: object) -> Operation:
    return Operation(name=name, duration_s=milliseconds / 1e3, **fields)  # type: ignore[arg-type]


def test_a_host_that_launches_runs_beside_the_device() -> None:
    profile = profile_with(
        [
            seconds("read", 4, phase="data"),
            seconds("copy", 1, phase="copy"),
            seconds("launch forward", 2, phase="forward", resource="host"),
            seconds("forward", 10, phase="forward", after=(2,)),
            seconds("launch backward", 3, phase="backward", resource="host"),
            seconds("backward", 20, phase="backward", after=(4,)),
            seconds("launch update", 1, phase="update", resource="host"),
            seconds("update", 5, phase="update", after=(6,)),
        ]
    )
    fake = FakeTime()
    network = some.IntegerCurve(((0, 0, 0),)).network()
    found = period_ns(Computation(profile, fake.clock()), fake, arrives_ns=None)
    assert found == round(predict_computation_s(profile, network) * 1e9)


def test_what_is_read_after_the_update_belongs_to_the_iteration() -> None:
    profile = profile_with(
        [
            seconds("forward", 10, phase="forward"),
            seconds("backward", 20, phase="backward"),
            seconds("exchange", 1, phase="finalize"),
            seconds("update", 5, phase="update"),
            seconds("data loading", 7, phase="data"),
        ]
    )
    fake = FakeTime()
    work = Computation(profile, fake.clock())
    assert period_ns(work, fake, arrives_ns=30 * MS) == (30 + 30 + 6 + 7) * MS
    assert work.clock.idle_ns == 3 * 30 * MS


def test_an_update_in_parts_takes_as_long_as_the_whole() -> None:
    profile = profile_with(
        [
            seconds("forward", 10, phase="forward"),
            seconds("backward", 20, phase="backward"),
            seconds("update", 8, phase="update"),
        ]
    )
    fake = FakeTime()
    work = Computation(profile, fake.clock())
    work.begin()
    work.forward(work.first_backward)
    work.backward(None)
    work.begin()  # the next iteration, in which gates ask for the update
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
    profile = profile_with(
        [
            seconds("forward", 10, phase="forward"),
            seconds("backward", 20, phase="backward"),
            seconds("update", 5, phase="update"),
        ]
    )
    fake = FakeTime()
    work = Computation(profile, fake.clock())
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


def test_needs_are_gates() -> None:
    """Under a plan that waits on need, a gate holds up just the operation behind it."""
    profile = profile_with(
        [
            seconds("first", 10, phase="forward"),
            seconds("second", 10, phase="forward"),
            seconds("backward", 20, phase="backward"),
        ]
    )
    gradient = msgspec.structs.replace(profile.gradients[0], needed_by=1)
    profile = msgspec.structs.replace(profile, gradients=(gradient,))
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
