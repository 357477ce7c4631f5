from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import FileError, MismatchError, UserError
from syncline.files.traces.execution_trace import read_execution_trace
from syncline.files.traces.kineto import KinetoTrace, in_turn, read_kineto, with_waiting
from syncline.files.traces.kineto_profile import exchange_of, make_profile, make_timeline
from syncline.files.traces.kineto_steps import MeasuredCollective, message_parts
from syncline.files.traces.sizes import GradientSizes, read_sizes
from syncline.plan.network import Measurement, Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict_iteration_s
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.transformations import with_compute_scale
from syncline.plan.timeline import active_ns, merged
from tests import strategies as some
from tests.files.traces.kineto_files import Job, execution_trace, gloo_job

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
KINETO = SHARED / "kineto"
needs_shared = pytest.mark.skipif(
    not KINETO.is_dir(), reason="the shared profiler traces are not beside the project"
)


def read(tmp_path: Path, job: Job, name: str = "job.json", **options: Any) -> KinetoTrace:
    return read_kineto(job.write(tmp_path / name), **options)


def predicted_us(
    trace: KinetoTrace, profile: Profile | None = None, message_us: int = 200
) -> float:
    profile = profile or trace.profile()
    network = Network.line(workers=trace.workers or 1, a_s=message_us * 1e-6, b_s_per_byte=0)
    plan = trace.plan() or Plan.merging("all", profile, 1, [len(profile.gradients) - 1])
    return predict_iteration_s(profile, network, plan) * 1e6


def rescaled(profile: Profile, resource: str, factor: float) -> Profile:
    operations = tuple(
        msgspec.structs.replace(o, duration_s=o.duration_s * factor)
        if o.lane == resource and o.phase != "copy"
        else o
        for o in profile.operations
    )
    return msgspec.structs.replace(profile, operations=operations)


# --- what is recovered ---


@pytest.mark.parametrize("schema", ["2021", "2026"])
@pytest.mark.parametrize("name", ["job.json", "job.json.gz", "job.gz"])
def test_both_schemas_give_the_same_profile(tmp_path: Path, schema: Any, name: str) -> None:
    trace = read(tmp_path, Job(schema=schema), name)
    assert [step.number for step in trace.steps] == [3, 4, 5]
    assert trace.device == "cuda"
    assert trace.workers == 2  # 2021: from the messages' group
    profile = trace.profile()
    assert profile.phase_s("data") == pytest.approx(500e-6)
    assert profile.phase_s("copy") == pytest.approx(40e-6)
    kernels = [o for o in profile.operations if o.lane == "device" and o.duration_s > 2e-6]
    assert [o.phase for o in kernels] == ["forward"] * 4 + ["backward"] * 4 + ["update"] * 4
    assert [o.duration_s for o in kernels] == pytest.approx([30e-6] * 12)
    assert [g.elements for g in profile.gradients] == [1000] * 4
    assert {g.dtype for g in profile.gradients} == {"float32"}
    # Gradients become ready from the last layer to the first, and the next forward reads them so.
    needs = [profile.operations[g.needed_by or 0].name for g in profile.gradients]
    assert needs == [f"kernel of aten::layer{i}" for i in (3, 2, 1, 0)]


def test_messages_and_their_costs(tmp_path: Path) -> None:
    trace = read(tmp_path, Job())
    plan = trace.plan()
    assert plan is not None
    assert plan.message_bytes() == (8000, 8000)
    assert [list(tensors) for tensors in plan.message_tensors()] == [[0, 1], [2, 3]]
    assert [(p.size_bytes, p.repetitions) for p in trace.points] == [(8000, 6)]
    assert trace.points[0].time_s == pytest.approx(200e-6)
    assert any("one rank only" in note for note in trace.notes)
    with pytest.raises(UserError, match="at least two"):
        trace.trace().network()


def test_a_smaller_message_takes_no_longer_than_a_larger_one(tmp_path: Path) -> None:
    job = Job(shapes=False)
    sizes = iter([3000, 2000] * 3)
    lasting = iter([150, 250] * 3)
    for event in job.events:
        if "nccl" in event["name"]:
            event["args"]["In msg nelems"] = next(sizes)
            event["dur"] = next(lasting)
    trace = read(tmp_path, job)
    assert [p.size_bytes for p in trace.points] == [8000, 12000]
    assert [p.time_s for p in trace.points] == pytest.approx([150e-6, 150e-6])
    network = trace.trace().network()
    assert network.all_reduce.seconds(12000) == pytest.approx(150e-6)
    assert network.workers == 2


def test_timelines_show_what_ran_without_the_waiting(tmp_path: Path) -> None:
    timeline = make_timeline(read(tmp_path, Job(kernel_us=400)).steps[0])
    assert set(timeline.lanes()) == {"disk", "copy", "host", "compute", "communication"}
    host_ns = sum(s.stop_ns - s.start_ns for s in timeline.spans if s.lane == "host")
    assert host_ns < timeline.iteration_ns / 4  # it waits for the device most of the time
    sizes = [s.size_bytes for s in timeline.spans if s.kind == "message"]
    assert sizes == [8000, 8000]


# --- replay: waiting is computed anew ---


@pytest.mark.parametrize("schema", ["2021", "2026"])
@pytest.mark.parametrize("kernel_us", [1, 30, 55, 200, 1000])
@pytest.mark.parametrize("message_us", [1, 200, 5000])
def test_replay_takes_what_was_measured(
    tmp_path: Path, schema: Any, kernel_us: int, message_us: int
) -> None:
    job = Job(schema=schema, kernel_us=kernel_us, message_us=message_us)
    trace = read(tmp_path, job)
    assert [s.measured_s * 1e6 for s in trace.steps] == pytest.approx(job.step_us)
    assert predicted_us(trace, message_us=message_us) == pytest.approx(job.step_us[-1], rel=0.01)


@given(
    idle_us=st.integers(0, 20_000),
    kernel_us=st.sampled_from([3, 30, 300, 3000]),
    host_us=st.sampled_from([10, 50, 500]),
)
@settings(deadline=None)
def test_idle_time_that_nothing_explains_is_a_wait(
    tmp_path_factory: pytest.TempPathFactory, idle_us: int, kernel_us: int, host_us: int
) -> None:
    job = Job(idle_us=idle_us, kernel_us=kernel_us, host_us=host_us)
    trace = read(tmp_path_factory.mktemp("trace"), job)
    assert predicted_us(trace) == pytest.approx(job.step_us[-1], rel=0.01)
    if idle_us > 1000:
        assert any("nothing in the trace explains" in note for note in trace.notes)
        faster = predicted_us(trace, with_compute_scale(trace.profile(), 0.01))
        assert faster >= 4 * idle_us  # a faster device idles as long


def test_a_step_in_which_the_host_runs_ahead_takes_what_the_device_takes(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(ahead=True, kernel_us=400, host_us=10, load_us=50, steps=5))
    kernels_us = 12 * 400 + 200  # and the last message, which the update waits for
    assert trace.trace().iteration_s == pytest.approx(kernels_us * 1e-6, rel=0.01)
    assert predicted_us(trace) == pytest.approx(kernels_us, rel=0.01)


def test_one_kernel_for_all_collectives_is_told_apart_by_its_arguments(tmp_path: Path) -> None:
    named, generic = (
        read(tmp_path, Job(generic=generic, peers_us=100)) for generic in (False, True)
    )
    assert generic.plan() == named.plan()
    assert generic.points == named.points
    unsized = read(tmp_path, Job(generic=True, sizes=False))
    assert unsized.plan() is None  # nothing says that they are all-reduces


@pytest.mark.parametrize("host_us", [10, 50])
@pytest.mark.parametrize(("was", "becomes"), [(400, 100), (100, 400), (30, 300), (300, 3)])
def test_what_if_kernels_took_another_time(
    tmp_path: Path, host_us: int, was: int, becomes: int
) -> None:
    trace = read(tmp_path, Job(kernel_us=was, host_us=host_us))
    truth = Job(kernel_us=becomes, host_us=host_us)
    guess = predicted_us(trace, rescaled(trace.profile(), "device", becomes / was))
    assert guess == pytest.approx(truth.step_us[-1], rel=0.02)


@pytest.mark.parametrize("kernel_us", [30, 300])
@pytest.mark.parametrize("becomes", [20, 2000])
def test_what_if_messages_took_another_time(tmp_path: Path, kernel_us: int, becomes: int) -> None:
    trace = read(tmp_path, Job(kernel_us=kernel_us))
    truth = Job(kernel_us=kernel_us, message_us=becomes)
    assert predicted_us(trace, message_us=becomes) == pytest.approx(truth.step_us[-1], rel=0.02)


def test_merging_launches_changes_the_replay_little(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(layers=60, kernel_us=70))
    step = trace.steps[0]
    exchange = exchange_of(step, [])
    assert exchange is not None
    whole, merged = (
        make_profile([step], exchange, model="m", device="cuda", workers=2, most_operations=most)
        for most in (4000, 300)
    )
    assert len(merged.operations) <= 300 < len(whole.operations)
    for lane in ("host", "device", "disk", "copy"):
        total_s = [
            sum(o.duration_s for o in p.operations if o.lane == lane) for p in (whole, merged)
        ]
        assert total_s[0] == pytest.approx(total_s[1])
    assert predicted_us(trace, merged) == pytest.approx(predicted_us(trace, whole), rel=0.02)


# --- other streams and other workers ---


@pytest.mark.parametrize("kernel_us", [30, 300])
@pytest.mark.parametrize("peers_us", [50, 3000])
def test_waiting_for_other_workers_is_no_computing(
    tmp_path: Path, kernel_us: int, peers_us: int
) -> None:
    job = Job(kernel_us=kernel_us, peers_us=peers_us)
    trace = read(tmp_path, job)
    assert predicted_us(trace) == pytest.approx(job.step_us[-1], rel=0.01)
    profile = trace.profile()
    (sent,) = [o for o in profile.operations if o.lane == "peers" and "SendRecv" in o.name]
    assert sent.duration_s == pytest.approx(peers_us * 1e-6)
    computing = sum(o.duration_s for o in profile.operations if o.lane == "device")
    assert computing == pytest.approx((12 * kernel_us + 1) * 1e-6)
    spans = [s for s in make_timeline(trace.steps[0]).spans if "SendRecv" in s.label]
    assert {(s.lane, s.kind) for s in spans} == {("peers", "wait")}
    assert any("1 communication operations of a step" in note for note in trace.notes)
    # A device twice as fast makes the other workers no earlier.
    truth = Job(kernel_us=kernel_us // 2, peers_us=peers_us)
    guess = predicted_us(trace, with_compute_scale(profile, 0.5))
    assert guess == pytest.approx(truth.step_us[-1], rel=0.02)


@pytest.mark.parametrize("kernel_us", [30, 300])
@pytest.mark.parametrize("side_us", [100, 2000])
def test_streams_run_beside_each_other(tmp_path: Path, kernel_us: int, side_us: int) -> None:
    job = Job(kernel_us=kernel_us, side_us=side_us)
    trace = read(tmp_path, job)
    assert predicted_us(trace) == pytest.approx(job.step_us[-1], rel=0.01)
    assert "stream 2" in make_timeline(trace.steps[0]).lanes()
    truth = Job(kernel_us=2 * kernel_us, side_us=2 * side_us)
    guess = predicted_us(trace, with_compute_scale(trace.profile(), 2))
    assert guess == pytest.approx(truth.step_us[-1], rel=0.02)


@pytest.mark.parametrize("late_us", [100, 3000])
@pytest.mark.parametrize("kernel_us", [30, 300])
def test_waiting_inside_gradient_messages_is_replayed(
    tmp_path: Path, late_us: int, kernel_us: int
) -> None:
    job = Job(late_us=late_us, late_step=1, kernel_us=kernel_us)
    trace = read(tmp_path, job)
    assert trace.points[0].time_s == pytest.approx(200e-6)
    for step, measured_us in zip(trace.steps, job.step_us, strict=True):
        own = trace._replace(steps=(step,)).profile()
        assert predicted_us(trace, own) == pytest.approx(measured_us, rel=0.01)
        waiting_s = sum(o.duration_s for o in own.operations if o.lane == "waits")
        assert (waiting_s > 0.5 * late_us * 1e-6) == (step.number == 4)


NCCL_MS = {4912: 4.62, 9496: 9.08, 25640: 26.98, 25928: 27.03, 26652: 27.14}
"""A step's messages by KiB: ResNet-50's buckets over an emulated link of 10 Gbit/s."""


def test_few_sizes_of_messages_count_as_measured_and_many_are_fitted(tmp_path: Path) -> None:
    few = [
        Measurement(size_bytes=kib << 10, time_s=ms * 1e-3, repetitions=1)
        for kib, ms in NCCL_MS.items()
    ]
    trace = read(tmp_path, Job())
    network = trace._replace(points=tuple(few)).trace().network(2)
    for point in few:
        assert network.all_reduce.seconds(point.size_bytes) == pytest.approx(point.time_s)
    many = few + [
        Measurement(size_bytes=kib << 10, time_s=(1 + kib % 2 / 5) * kib * 1e-6, repetitions=1)
        for kib in range(100, 115)
    ]
    fit_error = trace._replace(points=tuple(many)).trace().network(2).fit_error
    assert fit_error is not None
    assert fit_error > 0.01


def test_all_ranks_wait_until_a_message_begins(tmp_path: Path) -> None:
    """So that it begins in the mean of the ranks when the last one is ready."""
    late = read(tmp_path, Job(message_us=2000)).steps[0]
    first, second = late.collectives
    sooner = first._replace(start_ns=first.start_ns - 1_000_000)
    early = late._replace(rank=1, collectives=[sooner, second])
    points = [Measurement(size_bytes=8000, time_s=2e-3, repetitions=1)]
    found = with_waiting([early, late], points)
    waiting, queued = (message.ready_after for message in late.messages)
    for step in found:
        assert step.tasks[waiting].stop_ns == first.start_ns
        assert step.tasks[queued] == late.tasks[queued]


@pytest.mark.parametrize(("ranks", "message_us"), [(1, 200), (2, 220)])
def test_where_all_ranks_were_traced_the_usual_message_counts(
    tmp_path: Path, ranks: int, message_us: int
) -> None:
    """The rank that comes last does not wait, so the shortest of all is a lucky one."""
    paths = [
        Job(rank=rank, pid=rank, late_us=-20, late_step=1, message_us=220).write(
            tmp_path / f"{rank}.json"
        )
        for rank in range(ranks)
    ]
    (point,) = read_kineto(paths).points
    assert point.time_s == pytest.approx(message_us * 1e-6)


@pytest.mark.parametrize("wait_us", [50, 3000])
@pytest.mark.parametrize("call_us", [20, 400])
def test_a_host_that_waits_for_other_workers_computes_nothing(
    tmp_path: Path, wait_us: int, call_us: int
) -> None:
    path, lasted_us = gloo_job(tmp_path / "gloo.json", wait_us=wait_us, call_us=call_us)
    trace = read_kineto(path)
    assert predicted_us(trace, message_us=250) == pytest.approx(lasted_us, rel=0.01)
    operations = trace.profile().operations
    computing_s = sum(o.duration_s for o in operations if o.lane == "device")
    assert computing_s == pytest.approx((20 + 4 * 300 + 2 * (5 + call_us) + 20 + 50) * 1e-6)
    (waited,) = [o for o in operations if o.name == "gloo:all_to_all"]
    assert (waited.lane, waited.duration_s) == ("peers", pytest.approx((wait_us - 10) * 1e-6))


@some.many
@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6),
)
def test_messages_at_once_take_as_long_as_one_after_another(spans: list[tuple[int, int]]) -> None:
    begun = sorted((start, start + lasting) for start, lasting in spans)
    sent = [MeasuredCollective(a, a, b, None, None, None, None) for a, b in begun]
    alone = in_turn(sent)
    assert sum(b - a for a, b in alone) == pytest.approx(active_ns(merged(begun)), abs=len(spans))
    assert alone[-1][1] == pytest.approx(max(b for _, b in begun), abs=len(spans))
    for (start, _), (after, _) in zip(begun, alone, strict=True):
        assert after >= start
    for (_, stop), (start, _) in itertools.pairwise(alone):
        assert stop <= start


# --- narrower answers ---


def test_one_gradient_without_a_tensor_takes_the_rest_of_its_message(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(layers=16, undefined=(5,)))
    assert [g.elements for g in trace.profile().gradients] == [1000] * 16
    plan = trace.plan()
    assert plan is not None
    assert plan.message_bytes() == (8000,) * 8
    (note,) = [n for n in trace.notes if "without a size" in n]
    assert note.startswith("1 of 16 gradients without a size in the trace (in ready order: 10)")


def test_gradients_without_a_size_are_left_out_where_nothing_tells_it(tmp_path: Path) -> None:
    for options in ({"messages": False, "workers": None}, {"sizes": False}):
        trace = read(tmp_path, Job(layers=16, undefined=(0, 5), **options))
        profile = trace.profile()
        assert [g.elements for g in profile.gradients] == [1000] * 14
        assert predicted_us(trace) > 0
        assert any("2 are left out" in note for note in trace.notes)
    trace = read(tmp_path, Job(layers=16, undefined=(4, 5)))
    assert [g.elements for g in trace.profile().gradients] == [1000] * 10 + [2000] + [1000] * 4


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    data=st.data(),
)
def test_messages_give_back_one_missing_size_each(sizes: list[int], data: st.DataObject) -> None:
    stops = sorted({*data.draw(st.lists(st.integers(1, len(sizes)))), len(sizes)})
    bounds = list(itertools.pairwise((0, *stops)))
    known: list[int | None] = list(sizes)
    for start, stop in bounds:
        if data.draw(st.booleans()):
            known[data.draw(st.integers(start, stop - 1))] = None
    messages = [sum(sizes[start:stop]) for start, stop in bounds]
    parts = message_parts(known, messages, stops)
    assert parts == [sizes[start:stop] for start, stop in bounds]


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (lambda e: "Backward" not in e["name"] and e["tid"] != 2, "holds no backward pass"),
        (lambda e: "AccumulateGrad" not in e["name"], "no gradient became ready in it"),
        (
            lambda e: e["cat"] not in ("cpu_op", "user_annotation") or "Profiler" in e["name"],
            "record it with ProfilerActivity.CPU",
        ),
    ],
)
def test_the_note_says_what_to_record(tmp_path: Path, keep: Any, says: str) -> None:
    job = Job(messages=False)
    job.events = [e for e in job.events if keep(e)]
    trace = read(tmp_path, job)
    assert trace.trace().profile is None
    assert says in trace.notes[-1]


def test_gradients_without_tensors_were_recorded_with_shapes(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(messages=False, undefined=(0, 1, 2, 3)))
    assert trace.trace().profile is None
    assert "hold no tensors" in trace.notes[-1]
    assert "record_shapes" not in trace.notes[-1]


def test_steps_that_do_not_train_are_left_out(tmp_path: Path) -> None:
    job = Job(steps=5)
    starts = [e for e in job.events if "ProfilerStep" in e["name"]][:3]
    evaluated = starts[2]["ts"] + starts[2]["dur"]
    job.events = [e for e in job.events if e["ts"] >= evaluated or e["tid"] != 2 or e["pid"] != 1]
    trace = read(tmp_path, job)
    assert trace.profile().iterations == 2
    assert any("3 of 5 steps" in note for note in trace.notes)


# --- sizes written by hand ---


def sizes_file(tmp_path: Path, *rows: str, header: str = "name elements") -> GradientSizes:
    path = tmp_path / "sizes.txt"
    path.write_text("\n".join((header, *rows)))
    return read_sizes(path)


def test_sizes_by_hand(tmp_path: Path) -> None:
    rows = [f"layer{i}.weight {i + 1}000" for i in (3, 2, 1, 0)]
    job = Job(shapes=False, sizes=False)
    trace = read(tmp_path, job, sizes=sizes_file(tmp_path, *rows))
    gradients = trace.profile().gradients
    assert [(g.name, g.elements) for g in gradients] == [
        ("layer3.weight", 4000),
        ("layer2.weight", 3000),
        ("layer1.weight", 2000),
        ("layer0.weight", 1000),
    ]
    # The messages are as large as their gradients.
    assert [p.size_bytes for p in trace.points] == [12000, 28000]
    in_bytes = sizes_file(tmp_path, "a 4000", "b 8000", header="name bytes")
    profile = read(tmp_path, job, sizes=in_bytes).profile()
    assert [g.name for g in profile.gradients] == ["a", "b"]
    assert [g.elements for g in profile.gradients] == [1000, 2000]


def test_sizes_by_hand_must_fit(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"3 sizes, but step 3 of .* has 4 gradients in 2"):
        read(tmp_path, Job(), sizes=sizes_file(tmp_path, "a 1", "b 2", "c 3"))
    rows = ["a 1000", "b 1000", "# c 5", "c 1000", "d 999"]
    with pytest.raises(MismatchError, match=r"line 6, 'd': 999 elements, but .* says 1000"):
        read(tmp_path, Job(), sizes=sizes_file(tmp_path, *rows))
    with pytest.raises(MismatchError, match=r"line 2, 'a': 7 bytes are not a whole number"):
        read(
            tmp_path,
            Job(shapes=False),
            sizes=sizes_file(tmp_path, "a 7", "b 4", "c 4", "d 4", header="name bytes"),
        )


@pytest.mark.parametrize(
    ("header", "row", "says"),
    [
        ("", "", "the file holds|found none|empty"),
        ("a 1000", "", "line 1: expected the header 'name elements' or 'name bytes'"),
        ("name elements", "", "then a line for each gradient"),
        ("name elements", "a", "line 2: expected a name and a whole number of elements"),
        ("name elements", "a b c", "line 2: expected a name"),
        ("name elements", "a -1", "line 2: expected a name"),
        ("name elements", "a 1.5", "line 2: expected a name"),
        ("name bytes", "a 0", "line 2: a size is from 1"),
        ("name bytes", "a 9999999999999999999", "line 2: a size is from 1"),
        ("name bytes", "a 4\na 4", "line 3: 'a' was named before"),
    ],
)
def test_broken_files_of_sizes_are_refused(
    tmp_path: Path, header: str, row: str, says: str
) -> None:
    with pytest.raises(FileError, match=says):
        sizes_file(tmp_path, row, header=header)


def test_sizes_from_messages_only(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(shapes=False))
    profile = trace.profile()
    assert [(g.name, g.elements) for g in profile.gradients] == [
        ("bucket 0", 2000),
        ("bucket 1", 2000),
    ]
    assert any("sizes of single gradients are not in the trace" in n for n in trace.notes)
    needs = [profile.operations[g.needed_by or 0].name for g in profile.gradients]
    assert needs == ["kernel of aten::layer2", "kernel of aten::layer0"]


def test_sizes_from_gradients_only(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(sizes=False))
    assert [g.elements for g in trace.profile().gradients] == [1000] * 4
    plan = trace.plan()
    assert plan is not None
    assert len(plan.messages) == 2


def test_without_sizes_there_are_timelines_but_no_profile(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(shapes=False, sizes=False))
    assert make_timeline(trace.steps[0]).spans
    assert trace.trace().profile is None
    with pytest.raises(UserError, match=r"job\.json: the sizes .* record_shapes=True"):
        trace.profile()


def test_one_worker_has_no_messages(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(schema="2021", messages=False))
    assert trace.plan() is None
    assert trace.workers is None
    assert trace.profile().workers == 1
    assert trace.trace().points == ()


def test_without_rank_and_workers(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(rank=None, workers=None))
    assert {step.rank for step in trace.steps} == {0}
    assert "distributedInfo does not hold 'rank'" in trace.notes


def test_without_step_annotations(tmp_path: Path) -> None:
    job = Job()
    job.events = [e for e in job.events if "ProfilerStep" not in e["name"]]
    trace = read(tmp_path, job)
    assert any("no ProfilerStep" in note for note in trace.notes)
    assert len(trace.steps) == 2
    # From the end of one update to the end of the next is as long.
    assert trace.steps[0].measured_s * 1e6 == pytest.approx(job.step_us[1], rel=0.02)
    job.events = [e for e in job.events if "Optimizer" not in e["name"]]
    assert len(read(tmp_path, job).steps) == 1


def test_only_one_step(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(), step=4)
    assert [s.number for s in trace.steps] == [4]
    with pytest.raises(UserError, match="no step 9; the trace has steps 3, 4, 5"):
        read(tmp_path, Job(), step=9)


def test_a_step_that_differs_is_left_out(tmp_path: Path) -> None:
    job = Job()
    extra = next(e for e in job.events if e["name"] == "kernel of aten::add_")
    job.events.append({**extra, "ts": extra["ts"] + 1})
    trace = read(tmp_path, job)
    assert any("1 of 3 steps consist of other tasks" in note for note in trace.notes)
    assert trace.profile().iterations == 2


def test_only_the_last_backward_pass_makes_gradients_final(tmp_path: Path) -> None:
    job = Job(steps=1, messages=False, item=False)
    first = [e for e in job.events if "ProfilerStep" not in e["name"]]
    length = job.step_us[0]
    again = []
    for event in first:
        if "Optimizer" in event["name"] or "aten::add_" in event["name"]:
            continue
        args = dict(event["args"])
        if "Sequence number" in args:
            args["Sequence number"] += 100
        if "correlation" in args:
            args["correlation"] += 1000
        again.append({**event, "ts": event["ts"] - length, "args": args})
    step = {**job.events[0], "ts": job.begin_us - length, "dur": 2 * length}
    job.events = [step, *again, *first]
    trace = read(tmp_path, job)
    assert any("several backward passes" in note for note in trace.notes)
    assert len(trace.profile().gradients) == 4


# --- several ranks ---


def test_ranks_are_aligned_on_the_ends_of_messages(tmp_path: Path) -> None:
    first = Job(late_us=70)
    second = Job(rank=1, begin_us=9_000_000.0)
    files = [first.write(tmp_path / "0.json"), second.write(tmp_path / "1.json")]
    trace = read_kineto(files)
    assert {step.rank for step in trace.steps} == {0, 1}
    assert not any("one rank only" in note for note in trace.notes)
    # The first rank's messages take 270 us, of which 70 are waiting.
    assert trace.points[0].time_s == pytest.approx(200e-6)
    assert trace.points[0].repetitions == 6
    for number in (3, 4, 5):
        ends = [
            [s.stop_ns for s in make_timeline(step).spans if s.kind == "message"][-1]
            for step in trace.steps
            if step.number == number
        ]
        assert ends[0] == pytest.approx(ends[1], abs=400_000)


def test_ranks_of_different_jobs_are_refused(tmp_path: Path) -> None:
    one = Job().write(tmp_path / "0.json")
    with pytest.raises(MismatchError, match=r"rank 0, as .*0\.json; give one trace for each rank"):
        read_kineto([one, Job().write(tmp_path / "same.json")])
    with pytest.raises(MismatchError, match="2 and 3 workers"):
        read_kineto([one, Job(rank=1, workers=3).write(tmp_path / "other.json")])


# --- joined with an execution trace ---


def joined(tmp_path: Path, job: Job, **options: Any) -> KinetoTrace:
    path = tmp_path / "et.json"
    path.write_text(json.dumps(execution_trace(**options)))
    return read(tmp_path, job, execution_traces=[read_execution_trace(path)])


@pytest.mark.parametrize("first_record", [0, 1])
def test_an_execution_trace_gives_the_sizes(tmp_path: Path, first_record: int) -> None:
    trace = joined(tmp_path, Job(shapes=False, sizes=False), first_record=first_record)
    assert [g.elements for g in trace.profile().gradients] == [1000] * 4
    assert [p.size_bytes for p in trace.points] == [8000]
    assert any("joined from the execution trace by order" in note for note in trace.notes)


def test_an_execution_trace_of_another_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="6 in 3"):
        joined(tmp_path, Job(shapes=False), layers=6)
    with pytest.raises(MismatchError, match="messages of other sizes"):
        joined(tmp_path, Job(shapes=False), elements=999)


def test_an_execution_trace_with_a_gradient_without_a_tensor_is_joined(tmp_path: Path) -> None:
    job = Job(shapes=False, sizes=False)
    trace = joined(tmp_path, job, undefined=(1,))
    assert [g.elements for g in trace.profile().gradients] == [1000] * 4


def test_every_rank_is_joined_with_its_own_execution_trace(tmp_path: Path) -> None:
    """Their process ids say which; without, their order does."""
    for pids, et_pids in (((11, 12), (12, 11)), ((1, 1), (1, 1))):
        ranks = [
            Job(shapes=False, sizes=False, rank=rank, pid=pid).write(tmp_path / f"{rank}.json")
            for rank, pid in enumerate(pids)
        ]
        structures = []
        for place, pid in enumerate(et_pids):
            path = tmp_path / f"et{place}.json"
            path.write_text(json.dumps(execution_trace(pid=pid, elements=1000 * (place + 1))))
            structures.append(read_execution_trace(path))
        trace = read_kineto(ranks, execution_traces=structures)
        found = [trace.steps[i].parameters[0].elements for i in (0, 3)]
        assert found == ([2000, 1000] if pids[0] != pids[1] else [1000, 2000])
        with pytest.raises(MismatchError, match="2 profiler traces and 3 execution traces"):
            read_kineto(ranks, execution_traces=[*structures, structures[0]])


# --- real traces ---


@needs_shared
@pytest.mark.parametrize(
    "name",
    [
        "ddp_resnet50_2xA100_rank0.json.gz",
        "resnet50_num_workers_0.pt.trace.json.gz",
        "resnet50_num_workers_4.pt.trace.json.gz",
    ],
)
def test_traced_steps_are_replayed_from_themselves(name: str) -> None:
    """One step left the device more to do than it found: its period is the device's."""
    trace = read_kineto(KINETO / name)
    plan = trace.plan()
    network = trace.trace().network() if plan else Network.line(workers=1, a_s=0, b_s_per_byte=0)
    for step in trace.steps:
        own = trace._replace(steps=(step,)).profile()
        sent = plan or Plan.merging("none", own, 1, [len(own.gradients) - 1])
        measured_s = step.measured_s
        if name.startswith("resnet50_num_workers_4") and step.number == 10:
            measured_s = (step.ended_ns - step.begun_ns) / 1e9
        assert predict_iteration_s(own, network, sent) == pytest.approx(measured_s, rel=0.002)


@needs_shared
def test_the_traced_ddp_steps_are_predicted_from_the_others() -> None:
    trace = read_kineto(KINETO / "ddp_resnet50_2xA100_rank0.json.gz")
    plan, network = trace.plan(), trace.trace().network()
    assert plan is not None
    assert plan.message_bytes() == (8196000, 31502336, 26255360, 26550272, 9724160)
    numbers = [step.number for step in trace.steps]
    assert numbers == [4, 5, 6]
    for step in trace.steps:
        others = trace._replace(steps=tuple(s for s in trace.steps if s is not step)).profile()
        assert predict_iteration_s(others, network, plan) == pytest.approx(
            step.measured_s, rel=0.05
        )


@needs_shared
def test_loading_by_four_processes_is_predicted_from_loading_by_none() -> None:
    trace = read_kineto(KINETO / "resnet50_num_workers_0.pt.trace.json.gz")
    other = read_kineto(KINETO / "resnet50_num_workers_4.pt.trace.json.gz")
    measured_s = sorted(step.measured_s for step in other.steps)[2:4]
    profile = trace.profile()
    assert profile.gradient_bytes == 102_228_128
    strategy = msgspec.structs.replace(STRATEGIES["mxnet"], loaders=4)
    plan = Plan.merging("all", profile, 1, [len(profile.gradients) - 1])
    network = Network.line(workers=1, a_s=0, b_s_per_byte=0)
    guess_s = predict_iteration_s(profile, network, plan, strategy=strategy)
    assert guess_s == pytest.approx(sum(measured_s) / 2, rel=0.10)


@needs_shared
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("distributed_info_unavailable__distributed_info_not_found", "no distributedInfo"),
        ("rank_unavailable__rank_not_found", "does not hold 'rank'"),
    ],
)
def test_traces_without_rank_give_a_timeline(name: str, said: str) -> None:
    trace = read_kineto(KINETO / f"{name}.json.gz")
    assert any(said in note for note in trace.notes)
    assert any("no device activities" in note for note in trace.notes)
    assert make_timeline(trace.steps[0]).spans
    with pytest.raises(UserError, match="hold no tensors"):
        trace.profile()


@needs_shared
def test_the_shared_execution_trace_refines_the_profile() -> None:
    structure = read_execution_trace(SHARED / "et" / "pytorch_et_resnet50_ddp_rank1of2.json.gz")
    trace = read_kineto(KINETO / "ddp_resnet50_2xA100_rank0.json.gz", execution_traces=[structure])
    profile, plan = trace.profile(), trace.plan()
    assert plan is not None
    assert len(profile.gradients) == 161
    assert len(plan.messages) == 5
    assert profile.gradient_bytes == 102_228_128
