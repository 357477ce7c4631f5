"""What the workers of the tests in this folder run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.errors import InternalError
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.quantities import NS_PER_S
from syncline.plan.run import Run
from syncline.torch_private import DDP_ARGUMENTS, bucket_sizes, logging_data
from syncline.train import reducer_executor
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.experiments import Steps
from syncline.train.log import logger
from syncline.train.measure.clock import CpuClock
from syncline.train.policy import Policy
from syncline.train.rank_measurements import RankMeasurements
from syncline.train.stages import Measurement, Stage
from syncline.train.tuning import Tuning
from syncline.train.watches import LossWatch
from tests.clock import added_time
from tests.train.fault_jobs import error_of
from tests.train.models import MODELS, Mixed, Plain
from tests.train.overlap.overlap_plans import Style, plan_of
from tests.words import assert_tells

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
PLAIN_READY = (
    *("narrow.bias", "narrow.weight", "wide.bias", "wide.weight"),
    *("norm.weight", "norm.bias", "conv.weight", "conv.bias"),
)  # the gradients of ``Plain``, in the order in which they become ready
SLOW = Network.line(workers=2, a_s=1e-4, b_s_per_byte=1e-7, name="slow")


def plain_plan(workers: int = 2) -> Plan:
    """Return a plan of three messages for the model ``Plain``, made without measuring it."""
    elements = {name: parameter.numel() for name, parameter in Plain().named_parameters()}
    cuts = (0, 970, 970 + 96 + 96 * 512, sum(elements.values()))
    tensors = tuple(Tensor(name=name, elements=elements[name]) for name in PLAIN_READY)
    messages = tuple(Message(start=a, stop=b) for a, b in itertools.pairwise(cuts))
    return Plan(
        planner="by hand", model="Plain", workers=workers, tensors=tensors, messages=messages
    )


def batch(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    inputs = torch.randn(6, 1, 8, 8, generator=generator)
    return inputs, torch.randint(10, (6,), generator=generator)


def train(
    ddp: TorchDDP,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first: int = 0,
    accumulate: int = 1,
    bf16: bool = False,
    reads: str = "",
) -> None:
    """Train, and read on the way what ``reads`` says."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            inputs, targets = batch(step, micro)
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    output = ddp(inputs)
                cross_entropy(output.float(), targets).backward()
        if "clip" in reads:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        if "one rank" in reads and dist.get_rank() == 1:
            assert all(torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)
        optimizer.step()
        if "average" in reads:
            assert all(p.detach().clone().isfinite().all() for p in ddp.parameters())


def steps_to_steady(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """Train until measuring is over and return how many steps that took."""
    steps = 0
    while ddp.measuring:
        train(ddp, optimizer, 1, first=steps)
        steps += 1
        assert steps < 500, f"still in {ddp.phase!r}"
    return steps


class Twins:
    """A model in our class and a copy of it in torch's, each with an optimizer, trained alike.

    ``asked`` are arguments of our class; torch's gets those that it knows.
    """

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["sgd"],
        *,
        overlaps: bool = False,
        **asked: Any,
    ) -> None:
        known = {name: asked[name] for name in DDP_ARGUMENTS if name in asked}
        stock = TorchDDP(copy.deepcopy(module), **known)
        self.ours = DistributedDataParallel(module, **asked)
        self.pairs = [(ddp, make(ddp.parameters())) for ddp in (self.ours, stock)]
        self.steps = 0
        if overlaps:
            self.ours.overlap(self.pairs[0][1])

    def train(self, steps: int, **how: Any) -> None:
        for pair in self.pairs:
            train(*pair, steps, first=self.steps, **how)
        self.steps += steps


def differing(*pairs: tuple[TorchDDP, torch.optim.Optimizer]) -> list[str]:
    """Return the names of the values in which two models or their optimizers differ."""
    mine, theirs = (
        ddp.module.state_dict()
        | {
            f"optimizer {number} {name}": torch.as_tensor(value)
            for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        for ddp, optimizer in pairs
    )
    assert list(mine) == list(theirs)
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def compare_with_ddp(model: str, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train twins under both classes through every stage; say whether all bits agree."""
    how = {name: options.pop(name) for name in ("accumulate", "bf16") if name in options}
    twins = Twins(MODELS[model](), OPTIMIZERS[optimizer], **options)
    settled: list[str] = []
    phases: list[str] = []
    note = mock.Mock(side_effect=lambda: settled.append(twins.ours.phase))
    with mock.patch.object(CpuClock, "synchronize", note), measured_as(planned_is_faster):
        while twins.ours.measuring:
            twins.train(1, **how)
            phases.append(twins.ours.phase)
            assert twins.steps < 500, phases
    twins.train(20, **how)
    return {
        "differences": differing(*twins.pairs),
        "phases": list(dict.fromkeys(phases)),
        "settled": settled,
        "profile": twins.ours.profile,
        "run": twins.ours.run_record(),
    }


def buckets_are_messages(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a plan of many messages and return it with the reducer's buckets."""
    ddp = DistributedDataParallel(MODELS[model](), planner="wfbp", check=False, **arguments)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 3)
    assert ddp.plan is not None, ddp.run_record().reason
    return {
        "planned": list(ddp.plan.message_bytes()),
        "reducer": bucket_sizes(logging_data(ddp)),
        "profile": ddp.profile,
        "network": ddp.network,
    }


def goes_back_when_the_plan_is_slower() -> None:
    with added_time() as add:
        ddp = DistributedDataParallel(Plain(), planner="wfbp")
        ddp.module.register_forward_pre_hook(lambda *_: add(10.0 if ddp.plan is None else 20.0))
        steps_to_steady(ddp, OPTIMIZERS["sgd"](ddp.parameters()))
    run = ddp.run_record()
    assert (run.decision, run.planner) == ("reverted", "ddp"), run
    (said,) = [event.text for event in run.events if "back to DDP's buckets" in event.text]
    assert_tells(said, "wfbp took", "DDP")
    assert "comparing with DDP" in [phase.name for phase in run.phases]


def with_given_plan(check: bool) -> tuple[int, Run]:
    """Train under a plan made elsewhere; return the number of steps and the record."""
    ddp = DistributedDataParallel(Plain(), plan=plain_plan(), check=check)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    with measured_as(planned_is_faster):
        steps = steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 20, first=steps)
    return steps + 20, ddp.run_record()


def flushes(kind: str) -> dict[str, Any]:
    """Read gradients or parameters at every step, so that nothing is left to overlap.

    Every message is held back, so that it is under way when the update is asked for. What was
    measured is not what decides: the plan wins.
    """
    held_back = tuple(replace(m, delay_s=5e-3) for m in plain_plan().messages)
    plan = replace(plain_plan(), messages=held_back, wait="need")
    twins = Twins(Plain(), overlaps=True, plan=plan)
    waits: list[str] = []
    with measured_as(planned_is_faster):
        while twins.ours.measuring or twins.steps < 160:
            late = "later" not in kind or (not twins.ours.measuring and twins.steps > 60)
            twins.train(1, reads=kind if late else "")
            if twins.ours.plan is not None:
                waits.append(twins.ours.plan.wait)
            assert twins.steps < 500, twins.ours.phase
    return {
        "differences": differing(*twins.pairs),
        "waits": [wait for wait, _ in itertools.groupby(waits)],
        "run": twins.ours.run_record(),
    }


def planned_is_faster(stage: Stage) -> float:
    return 0.1 if stage.plan is None else 0.05


@contextlib.contextmanager
def measured_as(seconds: Callable[[Stage], float]) -> Iterator[None]:
    """Let iterations take what a function of their stage says, as far as policies are told."""
    measure = RankMeasurements.measurement

    def told(measurements: RankMeasurements, stage: Stage, *known: Any) -> Measurement:
        found = measure(measurements, stage, *known)
        times_s = (seconds(stage),) * len(found.times_s)
        return replace(found, times_s=times_s, passes_s=(1.0,) * len(found.passes_s))

    with mock.patch.object(RankMeasurements, "measurement", told):
        yield


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    keep = logging.Handler()
    keep.emit = records.append  # type: ignore[method-assign]
    logger.logger.addHandler(keep)
    try:
        yield records
    finally:
        logger.logger.removeHandler(keep)


def a_bug_of_rank_0_ends_all_ranks() -> None:
    def broken(policy: Policy) -> Steps:
        yield next(steps(policy))
        raise ZeroDivisionError("a bug")

    steps = Policy.steps
    ddp = DistributedDataParallel(Plain())
    is_elsewhere = dist.get_rank() > 0
    expected = InternalError if is_elsewhere else ZeroDivisionError
    text = "ZeroDivisionError: a bug" if is_elsewhere else "^a bug$"
    with mock.patch.object(Policy, "steps", broken), pytest.raises(expected, match=text):
        steps_to_steady(ddp, OPTIMIZERS["sgd"](ddp.parameters()))


def a_plan_that_turns_slow_is_dropped() -> None:
    """Let a plan that was kept be slower in the long run, as far as the script is told."""
    ddp = DistributedDataParallel(Plain(), plan=replace(plain_plan(), wait="need"))
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    slow = False
    closing = mock.patch.object(LossWatch, "close_window", side_effect=lambda *_: slow)
    with measured_as(lambda stage: 0.1 if stage.plan is None else 0.2 if slow else 0.05), closing:
        before = steps_to_steady(ddp, optimizer)
        slow = True
        train(ddp, optimizer, 150, first=before)
    run = ddp.run_record()
    again = ["steady", "comparing with DDP", "comparing by hand", "recording", "steady"]
    assert [phase.name for phase in run.phases][-5:] == again, run.phases
    assert (run.decision, run.deferred) == ("reverted", False), run
    said = "by hand takes longer than DDP did; measuring both again"
    assert said in [event.text for event in run.events]


def hooks_and_groups_are_refused() -> None:
    ddp = DistributedDataParallel(Plain())
    fp16 = dist.BuiltinCommHookType.FP16_COMPRESS
    calls = {
        "would replace the exchange": lambda: ddp.register_comm_hook(None, lambda *_: None),
        "register_comm_hook is not available": lambda: ddp._register_builtin_comm_hook(fp16),
        "wrap the model again": lambda: ddp._update_process_group(dist.group.WORLD),
    }
    for reason, call in calls.items():
        kind, text = error_of(call)
        assert kind == "UserError"
        assert reason in text, text


def a_tracer_hides_the_signature_of_torch_s_class() -> None:
    """Wrap while a tracer's function stands in for the constructor of torch's class."""
    original, given = TorchDDP.__init__, []

    def traced(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        given.append((args[1:], kwargs))
        original(self, *args, **kwargs)

    positional = (None, None, 0, None, True, None, 1)
    with mock.patch.object(TorchDDP, "__init__", traced):
        ddp = DistributedDataParallel(Plain(), *positional, static_graph=True)
        unused = (*[None] * 4, True, None, None, dist.get_rank() == 1)
        _, refused = error_of(lambda: DistributedDataParallel(Plain(), *unused))
    train(ddp, OPTIMIZERS["sgd"](ddp.parameters()), 1)
    assert given == [(positional, {"static_graph": True})], given
    assert (ddp.bucket_bytes_cap, ddp.static_graph) == (2**20, True)
    assert "find_unused_parameters is " in refused, refused


def any_thread_may_read_how_training_goes() -> None:
    """What it reads is as it was after the last iteration, until the next has ended.

    It is read where another thread could: while the reducer or the view changes.
    """
    ddp = DistributedDataParallel(Plain(), planner="merge", check=False)
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    changes: set[str] = set()

    def read() -> tuple[Any, ...]:
        return ddp.metrics(), ddp.run_record(), ddp.exposed_communication_s

    def look(where: str) -> None:
        changes.add(where)
        assert read() == before, (where, read(), before)

    before = read()
    known = {"syncline/iteration": 0, "syncline/steady": 0, "syncline/overlaps": 0}
    assert before[0] == known, before
    make, advance = TorchDDP._ddp_init_helper, Tuning.advance

    def made(*args: Any) -> None:
        look("no reducer")
        make(*args)

    def decided(*args: Any) -> Stage:
        stage = advance(*args)
        look("decided")
        return stage

    making = mock.patch.object(TorchDDP, "_ddp_init_helper", made)
    with making, mock.patch.object(Tuning, "advance", decided):
        while ddp.measuring:
            train(ddp, optimizer, 1)
            before = read()
    assert changes == {"decided", "no reducer"}
    train(ddp, optimizer, 10)
    last = ddp.metrics()
    assert last["syncline/steady"] == 1
    assert last["syncline/messages"] >= 1
    assert last["syncline/iteration_s"] > 0
    assert last["syncline/exposed_communication_s"] >= 0


def a_property_that_fails_says_why() -> None:
    """Not that there is no such property, as ``nn.Module`` would say."""
    ddp = DistributedDataParallel(Plain())
    del planned_training(ddp).runner.iterations.stage
    for name in ("phase", "plan", "measuring"):
        kind, text = error_of(functools.partial(getattr, ddp, name))
        assert kind == "InternalError"
        assert_tells(text, f"{name} cannot be read: ", "has no attribute 'stage'")


def uneven_inputs_are_joined() -> None:
    """Train with another number of batches on every rank under ``join``, in mid-measurement."""
    twins = Twins(Plain())
    twins.train(5)
    for ddp, optimizer in twins.pairs:
        with ddp.join():
            train(ddp, optimizer, 4 + 3 * dist.get_rank(), first=100)
    assert differing(*twins.pairs) == []
    assert twins.ours.phase == "measuring DDP"
    steps_to_steady(*twins.pairs[0])


def what_the_user_attached_stays() -> None:
    ddp = DistributedDataParallel(Plain(), check=False, planner="wfbp")
    before, after = mock.Mock(return_value=None), mock.Mock(return_value=None)
    ddp.register_forward_pre_hook(before)
    ddp.register_forward_hook(after)
    ddp.my_note = "kept"
    steps = steps_to_steady(ddp, OPTIMIZERS["sgd"](ddp.parameters()))
    ddp.eval()
    with torch.no_grad():
        ddp(batch(0)[0])
    assert (before.call_count, after.call_count) == (steps + 1, steps + 1)
    assert ddp.my_note == "kept"
    assert not ddp.training
    assert isinstance(ddp.module, Plain)


def time_in_evaluation_mode_is_no_part_of_an_iteration() -> None:
    away_s = 1000.0
    with added_time() as add:
        ddp = DistributedDataParallel(Plain())
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        steps = steady = 0
        while steady < 10:
            train(ddp, optimizer, 1, first=steps)
            steady += not ddp.measuring
            for _ in range(2):
                ddp.eval()
                add(away_s / 2)
                with torch.no_grad():
                    ddp(batch(0)[0])
            ddp.train()
            steps += 1
        run = ddp.run_record()
    for seconds in (
        sum(each.duration_s for each in ddp.profile.operations),
        run.baseline.iteration_s,
        max(planned_training(ddp).runner.steady_iteration_s),
        sum(phase.seconds for phase in run.phases if phase.name != "steady"),
    ):
        assert 0 < seconds < away_s, run


class ComplexHalves(nn.Module):
    """A parameter of a type that plans do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2).to(torch.complex32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight.to(torch.complex64)


class NoElements(nn.Module):
    """A model whose parameters have no elements, such as adapters of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.nothing = (nn.Parameter(torch.empty(*n, 0)) for n in ((), (3,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum() + self.nothing.sum()


def tells_of_a_compiled_model(how: str) -> list[str]:
    """Return the warnings of a training whose whole model is compiled.

    Its optimizer is overlapped when it first steps, after the first forward pass.
    """
    torch._dynamo.reset()
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = functools.partial(torch.compile, backend="eager")
    if how == "before":
        net = compiled(net)
    elif how == "forward":
        net.forward = compiled(net.forward)
    with logged() as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        ddp = DistributedDataParallel(net, planner="merge", overlap_optimizers=True)
        run = compiled(ddp) if how == "after" else ddp
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            run(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert not ddp.defers
    return [record.getMessage() for record in records]


def trains_unplannable(kind: str) -> tuple[str, Run]:
    module: nn.Module = NoElements()
    options: dict[str, Any] = {}
    inputs = torch.randn(5, 4)
    if kind == "sparse":
        module = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
        inputs = torch.randint(10, (5, 3))
    elif kind == "complex halves":
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        module = ComplexHalves()
    elif kind == "dtypes in a static graph":
        module, options, inputs = Mixed(), {"static_graph": True}, batch(0)[0]
    elif kind.endswith("given"):
        tensors = tuple(Tensor(name=name, elements=0) for name in ("none", "nothing"))
        plan = Plan(planner="by hand", model="", workers=2, tensors=tensors, messages=())
        options = {"plan": replace(plan, wait="need"), "check": False}
    ddp = DistributedDataParallel(module, **options)
    for _ in range(3):
        ddp(inputs).abs().sum().backward()
    return ddp.phase, ddp.run_record()


def a_copy_trains_on() -> None:
    ddp = DistributedDataParallel(Plain())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    train(ddp, optimizer, 5)
    twin = copy.deepcopy(ddp)
    train(twin, OPTIMIZERS["sgd"](twin.parameters()), 3)
    steps_to_steady(ddp, optimizer)
    assert (twin.phase, twin.run_record().decision) == ("steady", "ddp")


def writes_a_report(folder: str, options: dict[str, Any]) -> Run:
    """Train on a network that is said to be slow, and write the report on rank 0."""
    ddp = DistributedDataParallel(Plain(), network=SLOW, **options)
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    with measured_as(planned_is_faster):
        steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 10)
    assert ddp.exposed_communication_s >= 0
    if dist.get_rank() == 0:
        assert ddp.save_report(folder) == Path(folder, "report.html")
    return ddp.run_record()


def replans_after_drift() -> Run:
    """Let the model become slower for good and see it measured again."""
    extra_s, said_by_torch = 10.0, reducer_executor.logging_data

    # What was added to Python's clock is not in that of torch's reducer.
    def logging_data(ddp: TorchDDP) -> dict[str, Any]:
        return {**said_by_torch(ddp), "forward_compute_time": extra_s * NS_PER_S}

    with added_time() as add, mock.patch.object(reducer_executor, "logging_data", logging_data):
        ddp = DistributedDataParallel(Plain())
        ddp.module.register_forward_pre_hook(lambda *_: add(extra_s))
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        steps_to_steady(ddp, optimizer)
        train(ddp, optimizer, 55)
        extra_s = 100.0
        train(ddp, optimizer, 160)
    return ddp.run_record()


def averages_that_do_not_fit_are_refused() -> None:
    ddp = DistributedDataParallel(Plain(), plan=plain_plan(), check=False)
    _, *few = [p.detach().clone() for p in ddp.parameters()]
    odd = [torch.zeros(2), *few]
    for given, said in (
        (few, "expected an average for each of the 8 parameters, found 7"),
        (odd, "expected shape (8, 1, 3, 3) of average 0, as its parameter has, found (2,)"),
    ):
        assert said in error_of(functools.partial(ddp.average, given, 0.1))[1]


def wraps_twice(stock_outside: bool, inside: bool) -> list[str] | None:
    outer, inner = DistributedDataParallel, TorchDDP
    if stock_outside:
        outer, inner = inner, outer
    wrapped = inner(Plain())
    given = nn.Sequential(wrapped) if inside else wrapped
    return error_of(lambda: outer(given)(torch.zeros(2, 1, 8, 8)))


def converts(options: dict[str, Any]) -> None:
    """Train beside DDP with a wrapper that was converted, its optimizer overlapped late."""
    plan = plan_of(Plain(), PLAIN_READY, dist.get_world_size(), Style(piece_elements=4000))
    stock = TorchDDP(Plain(), **options)
    theirs = OPTIMIZERS["adamw"](stock.parameters())
    ours = TorchDDP(copy.deepcopy(stock.module), **options)
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    convert = DistributedDataParallel.convert
    same = convert(ours, plan=plan, check=False, overlap_optimizers=True)
    assert same is ours
    hooked = TorchDDP(Plain())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    for wrong, reason in (
        (hooked, "has a communication hook"),
        (ours, "expected a model wrapped in torch.nn.parallel"),
    ):
        assert reason in error_of(functools.partial(convert, wrong))[1]
    train(stock, theirs, 8)
    train(same, optimizer, 8)
    assert differing((same, optimizer), (stock, theirs)) == []
    assert same.defers
    assert [o.optimizer for o in planned_training(same).wrapped.optimizers] == [optimizer]
    metrics = same.metrics()
    assert (metrics["syncline/iteration"], metrics["syncline/overlaps"]) == (8, 1)
    assert metrics["syncline/messages"] > 1
