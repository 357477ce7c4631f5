from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import FileError, MismatchError, UserError
from syncline.files.traces.execution_trace import ExecutionTrace, read_execution_trace
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
from tests.files.traces.seeds import written

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
KINETO = SHARED / "kineto"
DDP = "ddp_resnet50_2xA100_rank0.json.gz"
ALONE = "resnet50_num_workers_0.pt.trace.json.gz"
LOADED = "resnet50_num_workers_4.pt.trace.json.gz"
needs_shared = pytest.mark.skipif(
    not KINETO.is_dir(), reason="the shared profiler traces are not beside the project"
)
schemas = pytest.mark.parametrize("schema", ["2021", "2026"])


def read(tmp_path: Path, job: Job, **options: Any) -> KinetoTrace:
    return read_kineto(job.write(tmp_path / "job.json"), **options)


def replay_us(trace: KinetoTrace, profile: Profile | None = None, message_us: int = 200) -> float:
    profile = profile or trace.profile()
    network = Network.line(workers=trace.workers or 1, a_s=message_us * 1e-6, b_s_per_byte=0)
    return predict_iteration_s(profile, network, trace.plan() or all_in_one(profile)) * 1e6


def all_in_one(profile: Profile) -> Plan:
    return Plan.merging("all", profile, 1, [len(profile.gradients) - 1])


def noted(trace: KinetoTrace, text: str) -> bool:
    return any(text in note for note in trace.notes)


def sizes_of(trace: KinetoTrace) -> list[int]:
    return [gradient.elements for gradient in trace.profile().gradients]


def needs(profile: Profile) -> list[str]:
    """Return the names of the operations that wait for the gradients."""
    return [profile.operations[g.needed_by or 0].name for g in profile.gradients]


@schemas
def test_both_schemas_give_the_same_profile(tmp_path: Path, schema: Any) -> None:
    trace = read(tmp_path, Job(schema=schema))
    assert [step.number for step in trace.steps] == [3, 4, 5]
    # The 2021 schema has the number of workers from the messages' group.
    assert (trace.device, trace.workers) == ("cuda", 2)
    profile = trace.profile()
    assert profile.phase_s("data") == pytest.approx(500e-6)
    assert profile.phase_s("copy") == pytest.approx(40e-6)
    kernels = [o for o in profile.operations if o.lane == "device" and o.duration_s > 2e-6]
    assert [o.phase for o in kernels] == ["forward"] * 4 + ["backward"] * 4 + ["update"] * 4
    assert [o.duration_s for o in kernels] == pytest.approx([30e-6] * 12)
    assert [(g.elements, g.dtype) for g in profile.gradients] == [(1000, "float32")] * 4
    # Gradients become ready from the last layer to the first, and the next forward reads them so.
    assert needs(profile) == [f"kernel of aten::layer{i}" for i in (3, 2, 1, 0)]


def test_messages_and_their_costs(tmp_path: Path) -> None:
    trace = read(tmp_path, Job())
    assert trace.plan().message_bytes() == (8000, 8000)
    assert [list(tensors) for tensors in trace.plan().message_tensors()] == [[0, 1], [2, 3]]
    (point,) = trace.points
    assert (point.size_bytes, point.repetitions) == (8000, 6)
    assert point.time_s == pytest.approx(200e-6)
    assert noted(trace, "one rank only")
    with pytest.raises(UserError, match="at least two"):
        trace.trace().network()


def test_a_smaller_message_takes_no_longer_than_a_larger_one(tmp_path: Path) -> None:
    job = Job(shapes=False)
    messages = (event for event in job.events if "nccl" in event["name"])
    for event, (elements, lasting) in zip(messages, [(3000, 150), (2000, 250)] * 3, strict=True):
        event["args"]["In msg nelems"] = elements
        event["dur"] = lasting
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
    assert [s.size_bytes for s in timeline.spans if s.kind == "message"] == [8000, 8000]


# --- replay: waiting is computed anew ---


@schemas
@pytest.mark.parametrize("kernel_us", [1, 30, 55, 200, 1000])
@pytest.mark.parametrize("message_us", [1, 200, 5000])
def test_replay_is_as_traced(tmp_path: Path, schema: Any, kernel_us: int, message_us: int) -> None:
    job = Job(schema=schema, kernel_us=kernel_us, message_us=message_us)
    trace = read(tmp_path, job)
    assert [s.measured_s * 1e6 for s in trace.steps] == pytest.approx(job.step_us)
    assert replay_us(trace, message_us=message_us) == pytest.approx(job.step_us[-1], rel=0.01)


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
    assert replay_us(trace) == pytest.approx(job.step_us[-1], rel=0.01)
    if idle_us > 1000:
        assert noted(trace, "nothing in the trace explains")
        faster = replay_us(trace, with_compute_scale(trace.profile(), 0.01))
        assert faster >= 4 * idle_us  # a faster device idles as long


def test_a_step_in_which_the_host_runs_ahead_takes_what_the_device_takes(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(ahead=True, kernel_us=400, host_us=10, load_us=50, steps=5))
    kernels_us = 12 * 400 + 200  # and the last message, which the update waits for
    assert trace.trace().iteration_s == pytest.approx(kernels_us * 1e-6, rel=0.01)
    assert replay_us(trace) == pytest.approx(kernels_us, rel=0.01)


def test_one_kernel_for_all_collectives_is_told_apart_by_its_arguments(tmp_path: Path) -> None:
    named, generic = (read(tmp_path, Job(generic=one, peers_us=100)) for one in (False, True))
    assert generic.plan() == named.plan()
    assert generic.points == named.points
    unsized = read(tmp_path, Job(generic=True, sizes=False))
    assert unsized.plan() is None  # nothing says that they are all-reduces


WHAT_IFS = [
    ({"kernel_us": was, "host_us": host_us}, {"kernel_us": becomes})
    for was, becomes in [(400, 100), (100, 400), (30, 300), (300, 3)]
    for host_us in (10, 50)
]
for k in (30, 300):
    WHAT_IFS += [({"kernel_us": k}, {"message_us": becomes}) for becomes in (20, 2000)]
    # A device twice as fast makes the other workers no earlier.
    WHAT_IFS += [({"kernel_us": k, "peers_us": p}, {"kernel_us": k // 2}) for p in (50, 3000)]
    twice = {"kernel_us": 2 * k}
    WHAT_IFS += [({"kernel_us": k, "side_us": s}, twice | {"side_us": 2 * s}) for s in (100, 2000)]


@pytest.mark.parametrize(("was", "change"), WHAT_IFS, ids=str)
def test_what_if_times_changed(tmp_path: Path, was: dict[str, int], change: dict[str, int]) -> None:
    job, truth = Job(**was), Job(**was | change)
    trace = read(tmp_path, job)
    assert replay_us(trace) == pytest.approx(job.step_us[-1], rel=0.01)
    assert ("stream 2" in make_timeline(trace.steps[0]).lanes()) == bool(job.side_us)
    changed = with_compute_scale(trace.profile(), truth.kernel_us / job.kernel_us)
    guess = replay_us(trace, changed, message_us=truth.message_us)
    assert guess == pytest.approx(truth.step_us[-1], rel=0.02)


def test_merging_launches_changes_the_replay_little(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(layers=60, kernel_us=70))
    step = trace.steps[0]
    common = {"model": "m", "device": "cuda", "workers": 2}
    whole, merged = (
        make_profile([step], exchange_of(step, []), most_operations=most, **common)
        for most in (4000, 300)
    )
    assert len(merged.operations) <= 300 < len(whole.operations)
    for lane in ("host", "device", "disk", "copy"):
        before_s, after_s = (
            sum(o.duration_s for o in p.operations if o.lane == lane) for p in (whole, merged)
        )
        assert after_s == pytest.approx(before_s)
    assert replay_us(trace, merged) == pytest.approx(replay_us(trace, whole), rel=0.02)


@pytest.mark.parametrize("kernel_us", [30, 300])
@pytest.mark.parametrize("peers_us", [50, 3000])
def test_waiting_for_workers_is_no_computing(tmp_path: Path, kernel_us: int, peers_us: int) -> None:
    trace = read(tmp_path, Job(kernel_us=kernel_us, peers_us=peers_us))
    operations = trace.profile().operations
    (sent,) = [o for o in operations if o.lane == "peers" and "SendRecv" in o.name]
    assert sent.duration_s == pytest.approx(peers_us * 1e-6)
    computing_s = sum(o.duration_s for o in operations if o.lane == "device")
    assert computing_s == pytest.approx((12 * kernel_us + 1) * 1e-6)
    spans = [s for s in make_timeline(trace.steps[0]).spans if "SendRecv" in s.label]
    assert {(s.lane, s.kind) for s in spans} == {("peers", "wait")}
    assert noted(trace, "1 communication operations of a step")


@pytest.mark.parametrize("late_us", [100, 3000])
@pytest.mark.parametrize("kernel_us", [30, 300])
def test_waiting_inside_messages_is_replayed(tmp_path: Path, late_us: int, kernel_us: int) -> None:
    job = Job(late_us=late_us, late_step=1, kernel_us=kernel_us)
    trace = read(tmp_path, job)
    assert trace.points[0].time_s == pytest.approx(200e-6)
    for step, measured_us in zip(trace.steps, job.step_us, strict=True):
        own = trace._replace(steps=(step,)).profile()
        assert replay_us(trace, own) == pytest.approx(measured_us, rel=0.01)
        waiting_s = sum(o.duration_s for o in own.operations if o.lane == "waits")
        assert (waiting_s > 0.5 * late_us * 1e-6) == (step.number == 4)


NCCL_MS = {4912: 4.62, 9496: 9.08, 25640: 26.98, 25928: 27.03, 26652: 27.14}
"""A step's messages by KiB: ResNet-50's buckets over an emulated link of 10 Gbit/s."""


def test_few_sizes_of_messages_count_as_measured_and_many_are_fitted(tmp_path: Path) -> None:
    def network(times_ms: dict[int, float]) -> Network:
        points = (
            Measurement(size_bytes=kib << 10, time_s=ms * 1e-3, repetitions=1)
            for kib, ms in times_ms.items()
        )
        return trace._replace(points=tuple(points)).trace().network(2)

    trace = read(tmp_path, Job())
    few = network(NCCL_MS).all_reduce
    assert [few.seconds(kib << 10) for kib in NCCL_MS] == pytest.approx(
        [ms * 1e-3 for ms in NCCL_MS.values()]
    )
    scattered = {kib: (1 + kib % 2 / 5) * kib * 1e-3 for kib in range(100, 115)}
    assert (network(NCCL_MS | scattered).fit_error or 0) > 0.01


def test_all_ranks_wait_until_a_message_begins(tmp_path: Path) -> None:
    """So that it begins in the mean of the ranks when the last one is ready."""
    late = read(tmp_path, Job(message_us=2000)).steps[0]
    first, second = late.collectives
    sooner = first._replace(start_ns=first.start_ns - 1_000_000)
    early = late._replace(rank=1, collectives=[sooner, second])
    points = [Measurement(size_bytes=8000, time_s=2e-3, repetitions=1)]
    waiting, queued = (message.ready_after for message in late.messages)
    for step in with_waiting([early, late], points):
        assert step.tasks[waiting].stop_ns == first.start_ns
        assert step.tasks[queued] == late.tasks[queued]


@pytest.mark.parametrize(("ranks", "message_us"), [(1, 200), (2, 220)])
def test_of_all_ranks_the_usual_message_counts(tmp_path: Path, ranks: int, message_us: int) -> None:
    """The rank that comes last does not wait, so the shortest of all is a lucky one."""
    late = {"late_us": -20, "late_step": 1, "message_us": 220}
    jobs = (Job(rank=rank, pid=rank, **late) for rank in range(ranks))
    (point,) = read_kineto([job.write(tmp_path / f"{job.rank}.json") for job in jobs]).points
    assert point.time_s == pytest.approx(message_us * 1e-6)


@pytest.mark.parametrize("wait_us", [50, 3000])
@pytest.mark.parametrize("call_us", [20, 400])
def test_a_host_that_waits_computes_nothing(tmp_path: Path, wait_us: int, call_us: int) -> None:
    made, lasted_us = gloo_job(wait_us=wait_us, call_us=call_us)
    trace = read_kineto(written(tmp_path, made))
    assert replay_us(trace, message_us=250) == pytest.approx(lasted_us, rel=0.01)
    operations = trace.profile().operations
    computing_s = sum(o.duration_s for o in operations if o.lane == "device")
    assert computing_s == pytest.approx((20 + 4 * 300 + 2 * (5 + call_us) + 20 + 50) * 1e-6)
    (waited,) = [o for o in operations if o.name == "gloo:all_to_all"]
    assert (waited.lane, waited.duration_s) == ("peers", pytest.approx((wait_us - 10) * 1e-6))


@some.many
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6))
def test_messages_at_once_take_as_long_as_one_after_another(spans: list[tuple[int, int]]) -> None:
    begun = sorted((start, start + lasting) for start, lasting in spans)
    alone = in_turn([MeasuredCollective(a, a, b, None, None, None, None) for a, b in begun])
    assert sum(b - a for a, b in alone) == pytest.approx(active_ns(merged(begun)), abs=len(spans))
    assert alone[-1][1] == pytest.approx(max(b for _, b in begun), abs=len(spans))
    assert all(after >= start for (start, _), (after, _) in zip(begun, alone, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(alone))


def test_one_gradient_without_a_tensor_takes_the_rest_of_its_message(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(layers=16, undefined=(5,)))
    assert sizes_of(trace) == [1000] * 16
    assert trace.plan().message_bytes() == (8000,) * 8
    assert noted(trace, "1 of 16 gradients without a size in the trace (in ready order: 10)")


def test_gradients_without_a_size_are_left_out_where_nothing_tells_it(tmp_path: Path) -> None:
    for options in ({"messages": False, "workers": None}, {"sizes": False}):
        trace = read(tmp_path, Job(layers=16, undefined=(0, 5), **options))
        assert sizes_of(trace) == [1000] * 14
        assert replay_us(trace) > 0
        assert noted(trace, "2 are left out")
    trace = read(tmp_path, Job(layers=16, undefined=(4, 5)))
    assert sizes_of(trace) == [1000] * 10 + [2000] + [1000] * 4


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), data=st.data())
def test_messages_give_back_one_missing_size_each(sizes: list[int], data: st.DataObject) -> None:
    stops = sorted({*data.draw(st.lists(st.integers(1, len(sizes)))), len(sizes)})
    bounds = list(itertools.pairwise((0, *stops)))
    known: list[int | None] = list(sizes)
    for start, stop in bounds:
        if data.draw(st.booleans()):
            known[data.draw(st.integers(start, stop - 1))] = None
    parts = [sizes[start:stop] for start, stop in bounds]
    assert message_parts(known, [sum(part) for part in parts], stops) == parts


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
    third = [e for e in job.events if "ProfilerStep" in e["name"]][2]
    evaluated = third["ts"] + third["dur"]
    job.events = [e for e in job.events if e["ts"] >= evaluated or e["tid"] != 2 or e["pid"] != 1]
    trace = read(tmp_path, job)
    assert trace.profile().iterations == 2
    assert noted(trace, "3 of 5 steps")


# --- sizes written by hand, or only partly recorded ---


def sizes_file(tmp_path: Path, *rows: str, header: str = "name elements") -> GradientSizes:
    return read_sizes(written(tmp_path, "\n".join((header, *rows)), "sizes.txt"))


def test_sizes_by_hand(tmp_path: Path) -> None:
    named = [(f"layer{i}.weight", 1000 * (i + 1)) for i in (3, 2, 1, 0)]
    rows = [f"{name} {elements}" for name, elements in named]
    job = Job(shapes=False, sizes=False)
    trace = read(tmp_path, job, sizes=sizes_file(tmp_path, *rows))
    assert [(g.name, g.elements) for g in trace.profile().gradients] == named
    # The messages are as large as their gradients.
    assert [p.size_bytes for p in trace.points] == [12000, 28000]
    in_bytes = sizes_file(tmp_path, "a 4000", "b 8000", header="name bytes")
    profile = read(tmp_path, job, sizes=in_bytes).profile()
    assert [(g.name, g.elements) for g in profile.gradients] == [("a", 1000), ("b", 2000)]


@pytest.mark.parametrize(
    ("header", "rows", "says"),
    [
        ("name elements", ["a 1", "b 2", "c 3"], "3 sizes, but step 3 of .* has 4 gradients in 2"),
        (
            "name elements",
            ["a 1000", "b 1000", "# c 5", "c 1000", "d 999"],
            "line 6, 'd': 999 elements, but .* says 1000",
        ),
        ("name bytes", ["a 7", "b 4", "c 4", "d 4"], "line 2, 'a': 7 bytes are not a whole number"),
    ],
)
def test_sizes_by_hand_must_fit(tmp_path: Path, header: str, rows: list[str], says: str) -> None:
    with pytest.raises(MismatchError, match=says):
        read(tmp_path, Job(), sizes=sizes_file(tmp_path, *rows, header=header))


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
def test_broken_files_of_sizes(tmp_path: Path, header: str, row: str, says: str) -> None:
    with pytest.raises(FileError, match=says):
        sizes_file(tmp_path, row, header=header)


def test_sizes_from_messages_or_from_gradients_only(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(shapes=False))
    profile = trace.profile()
    gradients = [(g.name, g.elements) for g in profile.gradients]
    assert gradients == [("bucket 0", 2000), ("bucket 1", 2000)]
    assert noted(trace, "sizes of single gradients are not in the trace")
    assert needs(profile) == ["kernel of aten::layer2", "kernel of aten::layer0"]
    trace = read(tmp_path, Job(sizes=False))
    assert sizes_of(trace) == [1000] * 4
    assert trace.plan().message_bytes() == (8000, 8000)


def test_without_sizes_there_are_timelines_but_no_profile(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(shapes=False, sizes=False))
    assert make_timeline(trace.steps[0]).spans
    assert trace.trace().profile is None
    with pytest.raises(UserError, match=r"job\.json: the sizes .* record_shapes=True"):
        trace.profile()


def test_one_worker_has_no_messages(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(schema="2021", messages=False))
    assert (trace.plan(), trace.workers, trace.points) == (None, None, ())
    assert trace.profile().workers == 1


def test_without_rank_and_workers(tmp_path: Path) -> None:
    trace = read(tmp_path, Job(rank=None, workers=None))
    assert {step.rank for step in trace.steps} == {0}
    assert "distributedInfo does not hold 'rank'" in trace.notes


def test_without_step_annotations(tmp_path: Path) -> None:
    job = Job()
    job.events = [e for e in job.events if "ProfilerStep" not in e["name"]]
    trace = read(tmp_path, job)
    assert noted(trace, "no ProfilerStep")
    assert len(trace.steps) == 2
    # From the end of one update to the end of the next is as long.
    assert trace.steps[0].measured_s * 1e6 == pytest.approx(job.step_us[1], rel=0.02)
    job.events = [e for e in job.events if "Optimizer" not in e["name"]]
    assert len(read(tmp_path, job).steps) == 1


def test_only_one_step(tmp_path: Path) -> None:
    assert [s.number for s in read(tmp_path, Job(), step=4).steps] == [4]
    with pytest.raises(UserError, match="no step 9; the trace has steps 3, 4, 5"):
        read(tmp_path, Job(), step=9)


def test_a_step_that_differs_is_left_out(tmp_path: Path) -> None:
    job = Job()
    extra = next(e for e in job.events if e["name"] == "kernel of aten::add_")
    job.events.append({**extra, "ts": extra["ts"] + 1})
    trace = read(tmp_path, job)
    assert noted(trace, "1 of 3 steps consist of other tasks")
    assert trace.profile().iterations == 2


def test_only_the_last_backward_pass_makes_gradients_final(tmp_path: Path) -> None:
    job = Job(steps=1, messages=False, item=False)
    step, *first = job.events
    length = job.step_us[0]
    more = {"Sequence number": 100, "correlation": 1000}
    again = [
        e
        | {"ts": e["ts"] - length}
        | {"args": {k: v + more[k] if k in more else v for k, v in e["args"].items()}}
        for e in first
        if "Optimizer" not in e["name"] and "aten::add_" not in e["name"]
    ]
    job.events = [{**step, "ts": step["ts"] - length, "dur": 2 * length}, *again, *first]
    trace = read(tmp_path, job)
    assert noted(trace, "several backward passes")
    assert len(trace.profile().gradients) == 4


def test_ranks_are_aligned_on_the_ends_of_messages(tmp_path: Path) -> None:
    first, second = Job(late_us=70), Job(rank=1, begin_us=9_000_000.0)
    trace = read_kineto([first.write(tmp_path / "0.json"), second.write(tmp_path / "1.json")])
    assert {step.rank for step in trace.steps} == {0, 1}
    assert not noted(trace, "one rank only")
    # The first rank's messages take 270 us, of which 70 are waiting.
    (point,) = trace.points
    assert (point.time_s, point.repetitions) == (pytest.approx(200e-6), 6)
    for number in (3, 4, 5):
        one, other = (
            [s.stop_ns for s in make_timeline(step).spans if s.kind == "message"][-1]
            for step in trace.steps
            if step.number == number
        )
        assert one == pytest.approx(other, abs=400_000)


def test_ranks_of_different_jobs_are_refused(tmp_path: Path) -> None:
    one = Job().write(tmp_path / "0.json")
    with pytest.raises(MismatchError, match=r"rank 0, as .*0\.json; give one trace for each rank"):
        read_kineto([one, Job().write(tmp_path / "same.json")])
    with pytest.raises(MismatchError, match="2 and 3 workers"):
        read_kineto([one, Job(rank=1, workers=3).write(tmp_path / "other.json")])


def structure(tmp_path: Path, **options: Any) -> ExecutionTrace:
    return read_execution_trace(written(tmp_path, execution_trace(**options), "et.json"))


def joined(tmp_path: Path, job: Job, **options: Any) -> KinetoTrace:
    return read(tmp_path, job, execution_traces=[structure(tmp_path, **options)])


@pytest.mark.parametrize("options", [{}, {"first_record": 1}, {"undefined": (1,)}], ids=str)
def test_an_execution_trace_gives_the_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    trace = joined(tmp_path, Job(shapes=False, sizes=False), **options)
    assert sizes_of(trace) == [1000] * 4
    assert [p.size_bytes for p in trace.points] == [8000]
    assert noted(trace, "joined from the execution trace by order")


def test_an_execution_trace_of_another_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="6 in 3"):
        joined(tmp_path, Job(shapes=False), layers=6)
    with pytest.raises(MismatchError, match="messages of other sizes"):
        joined(tmp_path, Job(shapes=False), elements=999)


@pytest.mark.parametrize(
    ("pids", "et_pids", "found"),
    [((11, 12), (12, 11), [2000, 1000]), ((1, 1), (1, 1), [1000, 2000])],
    ids=["by process", "by order"],
)
def test_every_rank_is_joined_with_its_own_execution_trace(
    tmp_path: Path, pids: tuple[int, int], et_pids: tuple[int, int], found: list[int]
) -> None:
    jobs = [Job(shapes=False, sizes=False, rank=r, pid=pid) for r, pid in enumerate(pids)]
    ranks = [job.write(tmp_path / f"{job.rank}.json") for job in jobs]
    structures = [structure(tmp_path, pid=p, elements=1000 * n) for n, p in enumerate(et_pids, 1)]
    trace = read_kineto(ranks, execution_traces=structures)
    assert [trace.steps[i].parameters[0].elements for i in (0, 3)] == found
    with pytest.raises(MismatchError, match="2 profiler traces and 3 execution traces"):
        read_kineto(ranks, execution_traces=[*structures, structures[0]])


@cache
def shared(name: str) -> KinetoTrace:
    return read_kineto(KINETO / name)


@needs_shared
@pytest.mark.parametrize("name", [DDP, ALONE, LOADED])
def test_traced_steps_are_replayed_from_themselves(name: str) -> None:
    """One step left the device more to do than it found: its period is the device's."""
    trace = shared(name)
    plan = trace.plan()
    network = trace.trace().network() if plan else Network.line(workers=1, a_s=0, b_s_per_byte=0)
    for step in trace.steps:
        own = trace._replace(steps=(step,)).profile()
        measured_s = step.measured_s
        if name == LOADED and step.number == 10:
            measured_s = (step.ended_ns - step.begun_ns) / 1e9
        replayed_s = predict_iteration_s(own, network, plan or all_in_one(own))
        assert replayed_s == pytest.approx(measured_s, rel=0.002)


@needs_shared
def test_the_traced_ddp_steps_are_predicted_from_the_others() -> None:
    trace = shared(DDP)
    plan, network = trace.plan(), trace.trace().network()
    assert plan.message_bytes() == (8196000, 31502336, 26255360, 26550272, 9724160)
    assert [step.number for step in trace.steps] == [4, 5, 6]
    for step in trace.steps:
        others = trace._replace(steps=tuple(s for s in trace.steps if s is not step)).profile()
        guess_s = predict_iteration_s(others, network, plan)
        assert guess_s == pytest.approx(step.measured_s, rel=0.05)


@needs_shared
def test_loading_by_four_processes_is_predicted_from_loading_by_none() -> None:
    measured_s = sorted(step.measured_s for step in shared(LOADED).steps)[2:4]
    profile = shared(ALONE).profile()
    assert profile.gradient_bytes == 102_228_128
    strategy = msgspec.structs.replace(STRATEGIES["mxnet"], loaders=4)
    network = Network.line(workers=1, a_s=0, b_s_per_byte=0)
    guess_s = predict_iteration_s(profile, network, all_in_one(profile), strategy=strategy)
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
    assert noted(trace, said)
    assert noted(trace, "no device activities")
    assert make_timeline(trace.steps[0]).spans
    with pytest.raises(UserError, match="hold no tensors"):
        trace.profile()


@needs_shared
def test_the_shared_execution_trace_refines_the_profile() -> None:
    et = read_execution_trace(SHARED / "et" / "pytorch_et_resnet50_ddp_rank1of2.json.gz")
    trace = read_kineto(KINETO / DDP, execution_traces=[et])
    profile = trace.profile()
    assert (len(profile.gradients), profile.gradient_bytes) == (161, 102_228_128)
    assert len(trace.plan().messages) == 5
